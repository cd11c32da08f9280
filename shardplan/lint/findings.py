"""Findings: the defects of a hand-written trainer section, with the words that their messages share."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shardplan.hardware import GIB
from shardplan.plan.mapping import mesh_text


class Severity(StrEnum):
    """The severity of a finding."""

    ERROR = "error"
    """Levanter does not start, fails, silently gives wrong results, or replicates what should be sharded."""
    WARNING = "warning"
    """The section is wasteful, or a part of it has no effect."""


class FindingKind(StrEnum):
    """The subject of a finding."""

    ACTIVATION_AXIS = "activation axis"
    """A logical axis that only activations have is mapped."""
    ATTENTION = "attention"
    """Levanter's attention gives wrong results under the mapping."""
    ATTENTION_BACKEND = "attention backend"
    """Levanter does not have the attention backend."""
    BARELY_SHARDED = "barely sharded"
    """Large parameters have far fewer shards than there are devices."""
    BATCH = "batch"
    """The batch is not divisible by its shards, or not sharded."""
    DUPLICATE = "duplicate"
    """A mesh axis is on two dimensions of one array."""
    EXPERTS = "experts"
    """Levanter's blocks of experts fail under the mapping."""
    HEADS = "heads"
    """The axis of all heads is mapped, which the query, key and value projections do not have."""
    INDIVISIBLE = "indivisible"
    """The size of a logical axis is not divisible by its shards."""
    LIST = "list"
    """A list of mesh axes stands where Levanter reads one name, or the list is empty."""
    LOADING = "loading"
    """The checkpoint does not fit while Levanter's own loader reads it."""
    LOSS = "loss"
    """Levanter's loss is wrong under the mapping."""
    MEMORY = "memory"
    """The step does not fit in memory, or may not."""
    MESH_SIZE = "mesh size"
    """The sizes of the mesh axes do not multiply to the number of devices."""
    MISSING_KEY = "missing key"
    """Levanter needs a key that the file does not have."""
    NOT_COUNTED = "not counted"
    """The prediction ignores the effect of a section of the file."""
    PROGRAM = "program"
    """The installed Levanter does not have the program that the file is for."""
    REPLICATED = "replicated"
    """Large parameters are replicated."""
    SCHEMA = "schema"
    """Keys of another version of Levanter than the installed one."""
    STACKED_AXIS = "stacked axis"
    """The axis along which layers are stacked is mapped."""
    UNKNOWN_AXIS = "unknown axis"
    """The model does not have the logical axis."""
    UNKNOWN_KEY = "unknown key"
    """Levanter does not have the key."""
    UNKNOWN_MESH_AXIS = "unknown mesh axis"
    """The mesh does not have the mesh axis."""
    UNUSED_MESH_AXIS = "unused mesh axis"
    """No logical axis is mapped to a mesh axis."""
    VALUE = "value"
    """Levanter's parser refuses a value."""
    VOCABULARY = "vocabulary"
    """Levanter rounds the vocabulary up."""


@dataclass(frozen=True)
class Finding:
    """One defect of a trainer section."""

    severity: Severity
    kind: FindingKind
    where: tuple[str, ...]
    """Dotted keys of the configuration."""
    text: str
    """Description of what is wrong, and why."""
    remedy: str
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Path -> bytes per device, of the affected parameters."""
    axes: frozenset[str] = frozenset()
    """Logical and mesh axes whose entry or size must change; empty if any change may help."""

    def to_json(self) -> dict[str, Any]:
        """Convert everything but `axes` to JSON values."""
        return {
            "severity": self.severity,
            "kind": self.kind,
            "where": list(self.where),
            "text": self.text,
            "remedy": self.remedy,
            "parameters": dict(self.parameters),
        }


Findings = Iterator[Finding]


MAX_SHOWN = 4
"""Most parameters in a message."""


def short(path: str) -> str:
    """Shorten a parameter's path to its last two names."""
    return ".".join(path.split(".")[-2:])


def sizes_text(parameters: Mapping[str, int]) -> str:
    """Format the first `MAX_SHOWN` parameters as `a.weight 1.50, b.weight 0.50 GiB and 3 more`."""
    shown = ", ".join(f"{short(path)} {amount / GIB:.2f}" for path, amount in [*parameters.items()][:MAX_SHOWN])
    more = len(parameters) - MAX_SHOWN
    return f"{shown} GiB" + (f" and {more} more" if more > 0 else "")


def product_text(mesh: Mapping[str, int], mesh_axes: Iterable[str]) -> str:
    """Format mesh axes with their sizes as `replica 2 x data 16`."""
    return mesh_text({axis: mesh[axis] for axis in mesh_axes})
