"""The result of one compile, as the worker process sends it and the cache keeps it."""

import dataclasses
import gzip
import json
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from shardplan.model.corrections.levanter_compat import LEVANTER_PACKAGES

PACKAGES = ("jax", "jaxlib", "libtpu", *LEVANTER_PACKAGES, "equinox", "optax")
"""Packages on whose versions the result of a compile depends."""


def package_versions() -> dict[str, str]:
    """Return package -> installed version, for the packages on which the result of a compile depends."""
    return {package: metadata.version(package) for package in PACKAGES}


@dataclass(frozen=True)
class Compiled:
    """The module's text and the compiler's reports, or the error."""

    error: str = ""
    """Error of JAX or the compiler, on one line; empty if the program compiled."""
    is_out_of_hbm: bool = False
    """Whether the error says that the program needs more HBM than there is."""
    attention: str = ""
    """Levanter's attention backend."""
    seconds: float = 0.0
    """Seconds of tracing and compiling."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package -> installed version."""
    module: str = ""
    """The scheduled HLO module; if memory was exhausted, as far as the compiler got."""
    live_ranges: str = ""
    """The compiler's report of live ranges."""
    usage: str = ""
    """The compiler's report of memory by memory space."""
    memory: dict[str, int] = field(default_factory=dict)
    """Field of `CompiledMemory` -> bytes per device; empty without a program."""
    slices: list[int] = field(default_factory=list)
    """Partition -> the number of its slice."""
    has_cycles: bool = True
    """Whether the compiler also made code for the cores, so that the module's instructions have cycles."""

    def save(self, path: Path) -> None:
        """Write gzipped JSON to `path`."""
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
            json.dump(dataclasses.asdict(self), file)

    @classmethod
    def load(cls, path: Path) -> "Compiled | None":
        """Read a result that `save` wrote; None if the file is missing or damaged."""
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                values: Any = json.load(file)
            return cls(**values)
        except (OSError, EOFError, ValueError, TypeError):
            return None
