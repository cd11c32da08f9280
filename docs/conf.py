"""The documentation as a site: `python3 scripts/run.py docs` builds it into build/docs."""

from importlib import metadata

project = "shardplan"
release = version = metadata.version(project)
copyright = "the shardplan contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False

# anchors of headings as code hosts make them, so that links work there and here
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

# docstrings are plain text: what is in backticks is code
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
