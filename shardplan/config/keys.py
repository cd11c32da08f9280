"""The keys of a configuration: their types, defaults and documentation, read from its dataclasses."""

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from draccus.wrappers.docstring import get_attribute_docstring

from shardplan.plan.workload.workload import AUTO

MEANING = "meaning"
"""Name of the field metadata that documents a key which has no docstring."""
NO_KEY = "no key"
"""Name of the field metadata that marks a field of a configuration as not a key."""
TYPE_NAMES = {
    int: "an integer", float: "a number", str: "text", bool: "true or false", tuple: "a list of texts",
    type(None): "null",
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """A key of a configuration."""

    default: Any
    documentation: str
    types: tuple[type, ...]
    """Types that the key's value may have."""
    section: type
    """The dataclass that declares the key."""
    auto: Any = None
    """The value that `auto` stands for; None if the key does not accept `auto`."""

    def problem(self, value: Any) -> str | None:
        """Describe what is wrong with the type of `value`; None if the type is right.

        Types must match exactly: in Python, True is also an int, and a number in a YAML file was not meant as a path.
        """
        if value == "" and type(None) in self.types:
            return "it must not be empty; leave it out, or write null"
        is_list_of_texts = tuple in self.types and isinstance(value, list) and all(isinstance(v, str) for v in value)
        is_integer_for_float = float in self.types and type(value) is int
        if type(value) in self.types or is_list_of_texts or is_integer_for_float:
            return None
        return f"it must be {' or '.join(TYPE_NAMES[kind] for kind in self.types)}"


def keys_of(cls: type) -> dict[str, Key]:
    """Return every key of the configuration `cls`, by dotted name."""
    return dict(_cached_keys(cls))


@cache
def _cached_keys(cls: type) -> tuple[tuple[str, Key], ...]:
    return tuple(_keys(cls, ""))


def _keys(cls: type, prefix: str) -> Iterator[tuple[str, Key]]:
    """Yield dotted name and key of every field, also of nested sections."""
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if NO_KEY in item.metadata:
            continue
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            yield from _keys(typing.cast(type, hint), f"{prefix}{item.name}.")
        else:
            owner = next(base for base in reversed(cls.__mro__) if item.name in getattr(base, "__annotations__", {}))
            documentation = item.metadata.get(MEANING) or get_attribute_docstring(owner, item.name).docstring_below
            yield f"{prefix}{item.name}", Key(item.default, documentation, _types(hint), owner, item.metadata.get(AUTO))


def _types(hint: Any) -> tuple[type, ...]:
    if typing.get_origin(hint) is tuple:
        return (tuple,)
    return tuple(str if issubclass(each, StrEnum) else each for each in typing.get_args(hint) or (hint,))
