"""Refuses environment variables in the texts of a configuration, because shardplan does not expand them."""

import os
import re
from typing import Any

from shardplan.errors import ConfigError

VARIABLE = re.compile(r"\$\{(?:[\w.]+:(?=\w))?(?P<name>\w+)[^}]*\}|(?:^|(?<=/))\$(?P<component>[A-Za-z_]\w*)(?=/|$)")
"""Pattern for `${NAME}`, `${NAME:-default}`, interpolations such as `${oc.env:NAME}`, and `$NAME` in a path."""


def check_variables(where: str, value: Any) -> None:
    """Check that a text of a configuration contains no environment variable, unless a file of this name exists.

    Raises:
        ConfigError: the text contains an environment variable.
    """
    match = VARIABLE.search(value) if isinstance(value, str) else None
    if match is None or os.path.exists(value):
        return
    name = match["name"] or match["component"]
    is_set = bool(os.environ.get(name))  # its value is not shown: it may be a secret
    remedy = f"write the value of {name}" if is_set else f"{name} is not set; write the path itself"
    raise ConfigError(f"{where} is {value!r}; variables such as {match[0]} are not expanded: {remedy}")
