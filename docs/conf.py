"""The documentation as a site: `python3 scripts/run.py docs` builds it into build/docs."""

import shutil
from importlib import metadata
from pathlib import Path

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

# blocks of code without a language are commands and what they print
highlight_language = "none"

# docstrings are plain text: what is in backticks is code
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True


def setup(app):
    """Put the reports of the gallery where its page links them."""
    app.connect("build-finished", copy_reports)


def copy_reports(app, exception):
    """Copy the reports of the gallery beside its page."""
    if exception is None and app.builder.format == "html":
        for report in Path(app.srcdir, "gallery").glob("*.html"):
            shutil.copy(report, Path(app.outdir, "gallery"))
