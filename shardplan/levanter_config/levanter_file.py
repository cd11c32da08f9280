"""Reads the YAML file of a Levanter configuration into its sections."""

from collections.abc import Mapping
from typing import Any

from shardplan.config.yaml_file import read_yaml
from shardplan.errors import ConfigError
from shardplan.plan.serialization import value_kind


def is_levanter_config(values: Any) -> bool:
    """Whether the content of a YAML file is a Levanter configuration rather than one of shardplan."""
    return isinstance(values, Mapping) and "trainer" in values and not {"hardware", "workload"} & set(values)


def read_sections(path: str) -> dict[str, Any]:
    """Read the sections of the Levanter configuration `path`, which must have a `trainer` section.

    Raises:
        ConfigError: no such file, not YAML, a key twice, no `trainer` section, or a section that contains itself.
    """
    values = read_yaml(path)
    if not isinstance(values, dict) or "trainer" not in values:
        content = f"the sections {', '.join(map(str, values))}" if isinstance(values, dict) else value_kind(values)
        content = " ".join(content.split())
        raise ConfigError(f"config file {path} contains {content:.200}, but no trainer section; is it for Levanter?")
    for name, section in values.items():
        recursive = _recursive_alias(section, str(name), ())
        if recursive is not None:
            raise ConfigError(
                f"config file {path}: {recursive:.200} is an alias of a section that contains it; write it out"
            )
    return values


def _recursive_alias(value: Any, name: str, parents: tuple[int, ...]) -> str | None:
    """Return the dotted name of a section or list within `value` that is one of its own parents; None if none is.

    YAML aliases allow that. `parents` has the ids of the objects that contain `value`, which itself is called `name`.
    """
    if not isinstance(value, dict | list):
        return None
    if id(value) in parents:
        return name
    items = value.items() if isinstance(value, dict) else enumerate(value)
    names = (_recursive_alias(child, f"{name}.{key}", (*parents, id(value))) for key, child in items)
    return next(filter(None, names), None)
