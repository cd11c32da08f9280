"""Reads one section of a hand-written configuration, and checks the type of every value that is read."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardplan.errors import ConfigError, closest, nearest

AxisLists = dict[str, list[str]]
"""Logical axis -> mesh axes, major to minor; an empty list if it is replicated."""


@dataclass(frozen=True)
class MappingEntry:
    """One entry of an axis mapping in the file: a logical axis, its mesh axes, and the key of the entry."""

    key: str
    """Dotted name of the key, as in trainer.axis_resources.mlp; the file may omit a key that has a default."""
    axis: str
    mesh_axes: list[str]


class CorrectableError(ConfigError):
    """A value that Levanter rejects; at `key`, it would accept `nearest` instead."""

    def __init__(self, message: str, key: str, nearest: Any) -> None:
        super().__init__(message)
        self.key, self.nearest = key, nearest


class MappingError(CorrectableError):
    """The logical axis `axis` is mapped to `unknown`, which is not a mesh axis, or to an empty list."""

    def __init__(self, message: str, key: str, nearest: Any, axis: str, unknown: str | None) -> None:
        super().__init__(message, key, nearest)
        self.axis, self.unknown = axis, unknown


class SectionReader:
    """Reads the keys of one section, and checks their values; `name` is the section's dotted name.

    Raises:
        ConfigError: a value does not have the type of its key; raised by the constructor and by every method.
    """

    def __init__(self, name: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{name} is {short_repr(values)}; it must be a section with keys")
        self.name = name
        self.values: dict[Any, Any] = values

    def check_keys(self, valid: Iterable[str], problem: str) -> None:
        """Check that every key is one of `valid`; otherwise the error begins with `problem`."""
        for key in self.values:
            if key not in valid:
                raise ConfigError(f"{self.name}: {problem} {short_repr(key)}; {nearest(str(key), valid)}")

    def subsection(self, key: str) -> "SectionReader":
        """Read a section within this one; an omitted section has no keys."""
        return SectionReader(f"{self.name}.{key}", self.values.get(key, {}))

    def size(self, key: str, default: int | None, allow_minus_one: bool = False) -> int:
        """Read a positive integer, or -1 if `allow_minus_one`; without `default` the file must have it."""
        value = self.values.get(key, default)
        if type(value) is not int or (value < 1 and not (allow_minus_one and value == -1)):
            expected = "a positive integer or -1" if allow_minus_one else "a positive integer"
            raise ConfigError(f"{self.name}.{key} is {short_repr(value)}; it must be {expected}")
        return value

    def axis_name(self, key: str, default: str) -> str | None:
        """Read the name of a logical axis, or None for null."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.name}.{key} is {short_repr(value)}; it must be the name of an axis, or null")
        return value

    def axis_names(self, key: str, default: str | None, allow_text: bool = True) -> list[str]:
        """Read names of logical axes from a list, null, or a single name if `allow_text`; null is empty."""
        names = _names(self.values.get(key, default), allow_text)
        if names is None:
            expected = "the name of an axis, a list of names, or null" if allow_text else "a list of axes, or null"
            raise ConfigError(f"{self.name}.{key} is {short_repr(self.values[key])}; it must be {expected}")
        return names

    def mapping_entries(self, key: str, default: AxisLists, mesh_axes: Iterable[str]) -> list[MappingEntry]:
        """Read a mapping of logical axes to mesh axes, and check that each is one of `mesh_axes`."""
        name = f"{self.name}.{key}"
        if key not in self.values:
            return [MappingEntry(f"{name}.{axis}", axis, names) for axis, names in default.items()]
        entries = []
        for axis, value in self.subsection(key).values.items():
            names = _names(value)
            if not isinstance(axis, str) or names is None:
                raise ConfigError(
                    f"{name} maps {short_repr(axis)} to {short_repr(value)}; "
                    "it must map names of axes to a mesh axis, a list of them, or null"
                )
            if value == []:
                raise MappingError(
                    f"{name} maps {short_repr(axis)} to an empty list, with which Levanter fails; null replicates it",
                    f"{name}.{axis}",
                    None,
                    axis,
                    None,
                )
            for mesh_axis in names:
                if mesh_axis not in mesh_axes:
                    raise MappingError(
                        f"{name} maps {short_repr(axis)} to the unknown mesh axis {short_repr(mesh_axis)}; "
                        f"{nearest(mesh_axis, mesh_axes)}",
                        f"{name}.{axis}",
                        _nearest_value(value, mesh_axes),
                        axis,
                        mesh_axis,
                    )
            entries.append(MappingEntry(f"{name}.{axis}", axis, names))
        return entries


def _nearest_value(value: str | list[str], valid: Iterable[str]) -> str | list[str] | None:
    """Replace every name in `value` by the most similar one in `valid`; without any name, return None (replicated)."""
    names = [name if name in valid else closest(name, valid) for name in ([value] if isinstance(value, str) else value)]
    kept = [name for name in names if name is not None]
    return kept if isinstance(value, list) and len(kept) > 1 else next(iter(kept), None)


def _names(value: Any, allow_text: bool = True) -> list[str] | None:
    """Convert a name, a list of names or null to a list of names; return None for anything else."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value] if allow_text else None
    return value if isinstance(value, list) and all(isinstance(name, str) for name in value) else None


def short_repr(value: Any) -> str:
    """Format a value of the file for a message: its repr, truncated to 80 characters."""
    return f"{value!r:.80}"
