"""Environment variables in configurations, which are not expanded."""

import os
import re
from typing import Any

from shardplan.errors import ConfigError

VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-[^}]*)?\}|([A-Za-z_]\w*))|\$\{([^}]*)\}")
"""`$NAME`, `${NAME}`, `${NAME:-default}`, and what other tools interpolate, `${oc.env:NAME}`."""


def check_variables(where: str, value: Any) -> None:
    """Check that a text of a configuration names no environment variable, unless a file has this name.

    Raises:
        ConfigError: it names one.
    """
    match = VARIABLE.search(value) if isinstance(value, str) else None
    if match is None or os.path.exists(value):
        return
    name = match[1] or match[2] or match[3].rpartition(":")[2]
    known = os.environ.get(name)
    remedy = f"write its value, {known}" if known else f"{name} is not set; write the path itself"
    raise ConfigError(f"{where} is {value!r}; variables such as {match[0]} are not expanded: {remedy}")
