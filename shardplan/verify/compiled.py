"""What came out of one compile: the module's text and the compiler's reports, or why there is none."""

import dataclasses
import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """The outcome of one compile, as the process that did it leaves it."""

    error: str = ""
    """What JAX or the compiler had against the program; empty where it compiled."""
    attention: str = ""
    """Levanter's attention backend."""
    seconds: float = 0.0
    """Tracing and compiling."""
    versions: dict[str, str] = field(default_factory=dict)
    module: str = ""
    """The scheduled HLO module. Where memory was exhausted, as far as the compiler got."""
    live_ranges: str = ""
    """The compiler's report of what is alive when."""
    usage: str = ""
    """The compiler's report of memory by space."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes per device, by part, where it compiled."""
    slices: list[int] = field(default_factory=list)
    """Partition -> the slice it is in."""

    def save(self, path: Path) -> None:
        """Write it, compressed."""
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
            json.dump(dataclasses.asdict(self), file)

    @classmethod
    def load(cls, path: Path) -> "Compiled | None":
        """Read it; None where the file is not there, or not whole."""
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                values: Any = json.load(file)
            return cls(**values)
        except (OSError, EOFError, ValueError, TypeError):
            return None
