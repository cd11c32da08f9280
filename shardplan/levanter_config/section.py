"""A section of a hand-written configuration, whose values are checked as they are read."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardplan.errors import ConfigError, nearest

AxisLists = dict[str, list[str]]
"""Logical axis -> mesh axes, major to minor; none where it is replicated."""


@dataclass(frozen=True)
class Entry:
    """What one key of the configuration says of one logical axis."""

    key: str
    """Dotted name of the key, as in trainer.axis_resources.mlp; the file may leave it out where it has a default."""
    axis: str
    mesh_axes: list[str]


class Section:
    """A section of the configuration, whose values are checked when they are read. `name` is its dotted name."""

    def __init__(self, name: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{name} is {text_of(values)}; it must be a section with keys")
        self.name = name
        self.values: dict[Any, Any] = values

    def only(self, keys: Iterable[str], complaint: str) -> None:
        """Raises ConfigError, beginning with `complaint`, where there is a key that is not one of `keys`."""
        for key in self.values:
            if key not in keys:
                raise ConfigError(f"{self.name}: {complaint} {text_of(key)}; {nearest(str(key), keys)}")

    def section(self, key: str) -> "Section":
        """A section in this one; without keys where it is not given."""
        return Section(f"{self.name}.{key}", self.values.get(key, {}))

    def size(self, key: str, default: int | None, absorbs: bool = False) -> int:
        """A positive number, or -1 if `absorbs`."""
        value = self.values.get(key, default)
        if type(value) is not int or (value < 1 and not (absorbs and value == -1)):
            wanted = "a positive integer or -1" if absorbs else "a positive integer"
            raise ConfigError(f"{self.name}.{key} is {text_of(value)}; it must be {wanted}")
        return value

    def axis(self, key: str, default: str) -> str | None:
        """The name of a logical axis, or none."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.name}.{key} is {text_of(value)}; it must be the name of an axis, or null")
        return value

    def axes(self, key: str, default: str | None, may_be_text: bool = True) -> list[str]:
        """Names of logical axes: a list, none, or one by itself if `may_be_text`."""
        names = _names(self.values.get(key, default), may_be_text)
        if names is None:
            wanted = "the name of an axis, a list of names, or null" if may_be_text else "a list of axes, or null"
            raise ConfigError(f"{self.name}.{key} is {text_of(self.values[key])}; it must be {wanted}")
        return names

    def entries(self, key: str, default: AxisLists, mesh_axes: Iterable[str]) -> list[Entry]:
        """What the mapping of logical axes to mesh axes, each one of `mesh_axes`, says."""
        name = f"{self.name}.{key}"
        if key not in self.values:
            return [Entry(f"{name}.{axis}", axis, given) for axis, given in default.items()]
        entries = []
        for axis, value in self.section(key).values.items():
            names = _names(value)
            if not isinstance(axis, str) or names is None:
                raise ConfigError(
                    f"{name} maps {text_of(axis)} to {text_of(value)}; "
                    "it must map names of axes to a mesh axis, a list of them, or null"
                )
            for mesh_axis in names:
                if mesh_axis not in mesh_axes:
                    raise ConfigError(
                        f"{name} maps {text_of(axis)} to the unknown mesh axis {text_of(mesh_axis)}; "
                        f"{nearest(mesh_axis, mesh_axes)}"
                    )
            entries.append(Entry(f"{name}.{axis}", axis, names))
        return entries


def _names(value: Any, may_be_text: bool = True) -> list[str] | None:
    """A list of names from a name, a list of names or null; None where it is something else."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value] if may_be_text else None
    return value if isinstance(value, list) and all(isinstance(name, str) for name in value) else None


def text_of(value: Any) -> str:
    """A value of the file, on one line and not longer than that."""
    return f"{value!r:.80}"
