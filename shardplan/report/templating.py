"""The environment of the HTML templates: strict, escaping, and with templates of the package only."""

import base64
import hashlib
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape


@cache
def environment() -> Environment:
    """Return the environment of all templates."""
    environment = Environment(
        loader=PackageLoader("shardplan.report"), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters.update(prose=prose, ended=ended)
    environment.policies["json.dumps_kwargs"] = {}  # the default sorts keys, and the order of mesh axes matters
    return environment


def prose(text: str) -> Markup:
    """Convert a message of the terminal to HTML, in which text between backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without a second one
        return escape(text)
    marked = [Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)]
    return Markup("").join(marked)


def ended(text: str) -> Markup:
    """Convert a message as `prose` does, with a full stop unless it ends with a punctuation mark."""
    return prose(text if text.endswith((".", "?", "!")) else f"{text}.")


def template_text(name: str) -> Markup:
    """Return a style sheet or script of the templates unchanged, to be embedded in a page."""
    return Markup((resources.files("shardplan.report") / "templates" / name).read_text(encoding="utf-8"))


def script_hash(script: str) -> str:
    """Return the Content-Security-Policy source that allows only this script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
