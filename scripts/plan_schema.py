"""The JSON Schema of a Plan file, and its keys as tables, from the dataclasses of `shardplan.plan`."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from draccus.wrappers.docstring import get_attribute_docstring

from shardplan.plan import Plan
from shardplan.plan.plan import CHECKSUM, REQUIRED_WORKLOAD, SCHEMA_VERSION
from shardplan.plan.workload.workload import Workload

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
CHECKSUM_TEXT = "Shows whether the file is as it was written; version 0.1 wrote none."


def plan_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of Plan files of the current schema version."""
    classes = list(plan_classes())
    schema = _object_schema(Plan)
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    schema["properties"][CHECKSUM] = {"type": "string", "description": CHECKSUM_TEXT}
    schema["required"].append("schema_version")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Plan",
        **schema,
        "$defs": {cls.__name__: _object_schema(cls) for cls in classes if cls is not Plan},
    }


def plan_classes() -> Iterator[type]:
    """Yield `Plan`, and every dataclass that a Plan contains, in the order of its fields."""
    seen: dict[type, None] = {}

    def visit(hint: Any) -> None:
        if dataclasses.is_dataclass(hint):
            cls = typing.cast(type, hint)
            if cls not in seen:
                seen[cls] = None
                for each in typing.get_type_hints(cls).values():
                    visit(each)
        for argument in typing.get_args(hint):
            visit(argument)

    visit(Plan)
    yield from seen


def key_tables() -> str:
    """A Markdown table for each dataclass of a Plan: key, type, meaning."""
    parts = []
    for cls in plan_classes():
        hints = typing.get_type_hints(cls)
        first = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
        rows = [f"| `{item.name}` | {type_text(hints[item.name])} | {_meaning(cls, item)} |" for item in _fields(cls)]
        if cls is Plan:
            rows.append(f"| `{CHECKSUM}` | text | {CHECKSUM_TEXT} |")
        parts.append(f"## {cls.__name__}\n\n{first}\n\n| key | type | meaning |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def type_text(hint: Any) -> str:
    """A type in words, as the tables of keys have it."""
    names = {str: "text", int: "integer", float: "number", bool: "true or false", types.NoneType: "null"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in names:
        return names[hint]
    if dataclasses.is_dataclass(hint):
        name = typing.cast(type, hint).__name__
        return f"[{name}](#{name.lower()})"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return " or ".join(f"`{member}`" for member in hint)
    if origin is dict:
        return f"keys with {type_text(arguments[1])}"
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    return " or ".join(map(type_text, arguments))


def _object_schema(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    required = [item.name for item in _fields(cls) if not _has_default(item)]
    if cls is Workload:
        required = sorted(REQUIRED_WORKLOAD)
    properties = {}
    for item in _fields(cls):
        meaning = _meaning(cls, item)
        properties[item.name] = _schema_of(hints[item.name]) | ({"description": meaning} if meaning else {})
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema_of(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if dataclasses.is_dataclass(hint):
        return {"$ref": f"#/$defs/{typing.cast(type, hint).__name__}"}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"enum": [str(member) for member in hint]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1])}
    if origin is list:
        return {"type": "array", "items": _schema_of(arguments[0])}
    return {"anyOf": [_schema_of(each) for each in arguments]}


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _has_default(item: dataclasses.Field[Any]) -> bool:
    return item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING


def _meaning(cls: type, item: dataclasses.Field[Any]) -> str:
    return " ".join(get_attribute_docstring(cls, item.name).docstring_below.split()).replace("|", "\\|")
