"""Converts dataclasses to and from values of JSON and YAML: enums as their values, and nested keys as dotted ones."""

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import draccus
from draccus.utils import ParsingError

from shardplan.errors import ConfigError, ShardplanError, nearest, one_line


def decode[T](cls: type[T], values: dict[str, Any]) -> T:
    """Make an instance of the dataclass `cls` from nested `values`.

    >>> from shardplan.plan.attention_plan import AttentionPlan
    >>> decode(AttentionPlan, {"strategy": "ring"}).strategy
    <Strategy.RING: 'ring'>

    Raises:
        ConfigError: `cls` does not accept a value, or a key is unknown or missing.
    """
    try:
        return draccus.decode(cls, values)
    except ParsingError as error:
        # draccus wraps what a dataclass says of its own values
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ShardplanError):
                raise cause from None
            cause = cause.__cause__
        raise ConfigError(one_line(error)) from error


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file.

    >>> print(json_bytes({"mesh": {"data": 8}}).decode(), end="")
    {
     "mesh": {
      "data": 8
     }
    }

    Raises:
        ValueError: a number is not finite, and JSON cannot express it.
    """
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"


def value_kind(value: Any) -> str:
    """Name the type of a value of JSON or YAML for a message: `a list`, or `nothing` for null and an empty file.

    >>> value_kind(None), value_kind([1]), value_kind(True)
    ('nothing', 'a list', 'true or false')
    """
    kinds: dict[type, str] = {
        type(None): "nothing", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list",
        dict: "keys and values",
    }  # fmt: skip
    return kinds.get(type(value), f"a {type(value).__name__}")


def checksum(values: Any) -> str:
    """Return a checksum of JSON values that treats 1 and 1.0 as equal, because other programs may swap them.

    >>> checksum({"batch": 8}) == checksum({"batch": 8.0}) != checksum({"batch": 9})
    True
    """
    canonical = json.dumps(_with_float_numbers(values), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _with_float_numbers(value: Any) -> Any:
    match value:
        case dict():
            return {key: _with_float_numbers(each) for key, each in value.items()}
        case list():
            return [_with_float_numbers(each) for each in value]
        case int() if not isinstance(value, bool):
            return float(value)
        case _:
            return value


def flatten(sections: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys: `{"a": {"b": 1}}` becomes `{"a.b": 1}`.

    >>> flatten({"trainer": {"mesh": {"axes": {"data": 8}}, "seed": 0}})
    {'trainer.mesh.axes.data': 8, 'trainer.seed': 0}
    """
    values: dict[str, Any] = {}
    for key, value in sections.items():
        if isinstance(value, Mapping):
            values.update(flatten(value, f"{prefix}{key}."))
        else:
            values[f"{prefix}{key}"] = value
    return values


def _member(cls: type[StrEnum], value: Any, path: tuple[str, ...]) -> StrEnum:
    if value not in list(cls):
        raise ConfigError(f"{'.'.join(path)} is {value!r}; {nearest(str(value), cls)}")
    return cls(value)


# draccus writes a member of an enum as its name; configurations and Plans have its value
draccus.decode.register(StrEnum, _member, include_subclasses=True)
