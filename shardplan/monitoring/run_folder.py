"""The output folder of a run: `run.json` lists the inputs and settings of the results, and other runs are refused."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from shardplan.errors import ConfigError, ShardplanError, one_line
from shardplan.plan.serialization import json_bytes
from shardplan.storage import read_bytes
from shardplan.storage.listing import list_files
from shardplan.storage.writing import PARTIAL_SUFFIX, OutputFolder

RUN = "run.json"
DIGESTS = ("texts", "checkpoint", "adapter")
"""Keys of run.json whose values hold a digest or version for each of several texts or files."""
DIGEST = re.compile("[0-9a-f]{64}")
SHOWN = 5
"""Maximum number of names in a message."""


class RunFolder:
    """The output folder of one run."""

    records: ClassVar[tuple[str, ...]] = ()
    """Elements that the run adds to `run.json` and on which no result depends."""
    prepared: ClassVar[tuple[str, ...]] = ()
    """Files that may be in the folder before the first run."""

    def __init__(self, path: str):
        """Open the folder at `path`."""
        self._folder = OutputFolder(path)
        self.ref = self._folder.ref
        """Absolute path, or URL."""

    def claim(self, determinants: Mapping[str, Any]) -> None:
        """Claim the folder for a run: it must be empty, or hold an earlier run with equal inputs and settings.

        Incomplete files, which a run that was killed left behind, are removed.

        Args:
            determinants: inputs and settings that determine the results, by name.

        Raises:
            ConfigError: the folder holds something else, or cannot be written to.
        """
        try:
            if not self._folder.has_file(RUN):
                others = [name for name in self._names() if name not in (*self.prepared, RUN + PARTIAL_SUFFIX)]
                if others:
                    raise ConfigError(f"it holds {others[0]}, which is no run; name another folder")
                self._write(RUN, json_bytes(determinants))
            known = self._read_run()
        except (ShardplanError, ValueError) as error:
            raise ConfigError(f"output {self.ref} cannot be used: {one_line(error)}") from error
        self._folder.remove_partial_files()
        for name in self.records:
            known.pop(name, None)
        wanted = json.loads(json.dumps(determinants))
        for name in {**wanted, **known}:  # a setting that one of them does not name has its default there
            if known.get(name) != wanted.get(name):
                raise ConfigError(
                    f"output {self.ref} holds the results of another run: "
                    f"{_difference(name, known.get(name), wanted.get(name))}; name another folder, or remove it"
                )

    def check_shared(self) -> None:
        """Check that this process sees the folder that process 0 has claimed, because each host may have its own disk.

        Raises:
            ConfigError: this process sees another folder.
        """
        if not self._folder.has_file(RUN):
            raise ConfigError(f"output {self.ref} is not the same folder as for process 0; give all processes one")

    def _read_run(self) -> dict[str, Any]:
        run: dict[str, Any] = json.loads(read_bytes(self._folder.open_for_reading(), RUN) or b"")
        return run

    def _names(self, subfolder: str = "") -> list[str]:
        """Return the names of the files in the folder or a subfolder; none if it does not exist."""
        ref = f"{self.ref}/{subfolder}".rstrip("/")
        return list_files(ref) if "://" in ref or Path(ref).is_dir() else []

    def _write(self, name: str, data: bytes) -> None:
        with self._folder.create(name) as file:
            file.write(data)


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def differing_names(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """List the names whose values differ between two mappings, or that only one of them has, for a message."""
    names = [name for name in {**known, **wanted} if known.get(name) != wanted.get(name)]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _difference(name: str, known: Any, wanted: Any) -> str:
    """Describe how an input or setting differs from the earlier run's; digests are not shown."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        values = [*known.values(), *wanted.values()]
        if name in DIGESTS or all(_is_digest(value) for value in values):
            noun = name if name.endswith("s") else f"files of the {name}"
            return f"{noun} differ: {differing_names(known, wanted)}"
    if _is_digest(known) and _is_digest(wanted):
        return f"its {name} differs from this run's"
    return f"its {name} is {_short(known)}, this run's is {_short(wanted)}"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
