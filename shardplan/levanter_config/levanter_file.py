"""Reads the YAML file of a Levanter configuration, also in its form for pods, and divides it into sections.

A file for a pod has Levanter's configuration in a section of its own, beside `resources` that name the slice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardplan.config.reading.yaml_file import read_yaml
from shardplan.errors import ConfigError
from shardplan.plan.serialization import value_kind


@dataclass(frozen=True)
class LevanterFile:
    """The sections of a Levanter configuration."""

    path: str
    text: str
    """The content of the file."""
    sections: dict[str, Any]
    """Section or key of Levanter's configuration -> its content."""
    inside: tuple[str, ...]
    """The key that contains the sections, in the form for pods; empty if they are at the top of the file."""
    slice: str | None
    """The slice that `resources` names."""

    def key(self, name: str) -> str:
        """Return the dotted key of the file for the dotted key `name` of Levanter's configuration."""
        return ".".join((*self.inside, name))


def is_levanter_config(values: Any) -> bool:
    """Return whether the content of a YAML file is a Levanter configuration rather than one of shardplan."""
    if not isinstance(values, Mapping) or {"hardware", "workload"} & set(values):
        return False
    return "trainer" in values or _pod_section(values) is not None


def read_levanter_file(path: str) -> LevanterFile:
    """Read the Levanter configuration `path`, which must have a `trainer` section.

    Raises:
        ConfigError: the file does not exist, is not YAML, has a key twice, has no `trainer` section, or has a section
            that contains itself.
    """
    values = read_yaml(path)
    if isinstance(values, dict):
        for name, section in values.items():
            recursive = _recursive_alias(section, str(name), ())
            if recursive is not None:
                raise ConfigError(
                    f"config file {path}: {recursive:.200} is an alias of a section that contains it; write it out"
                )
    pod = _pod_section(values)
    if pod is not None:
        return LevanterFile(path, _text(path), values[pod], (pod,), _slice(values.get("resources")))
    if not isinstance(values, dict) or "trainer" not in values:
        content = f"the sections {', '.join(map(str, values))}" if isinstance(values, dict) else value_kind(values)
        content = " ".join(content.split())
        raise ConfigError(f"config file {path} contains {content:.200}, but no trainer section; is it for Levanter?")
    return LevanterFile(path, _text(path), values, (), None)


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _pod_section(values: Any) -> str | None:
    """Return the key of the only section with a `trainer` section; None if the file has one itself."""
    if not isinstance(values, Mapping) or "trainer" in values:
        return None
    names = [str(key) for key, section in values.items() if isinstance(section, Mapping) and "trainer" in section]
    return names[0] if len(names) == 1 else None


def _slice(resources: Any) -> str | None:
    """Return the slice of `resources: {tpu_type: v4-64, slice_count: 2}` in the form of `hardware.slice`."""
    if not isinstance(resources, Mapping) or not isinstance(resources.get("tpu_type"), str):
        return None
    count = resources.get("slice_count", 1)
    return f"{count}x{resources['tpu_type']}" if isinstance(count, int) and count > 1 else resources["tpu_type"]


def _recursive_alias(value: Any, name: str, parents: tuple[int, ...]) -> str | None:
    """Return the dotted name of a section or list within `value` that contains itself; None if none does.

    YAML aliases allow such sections. `parents` has the ids of the objects that contain `value`, and `name` is its
    dotted name.
    """
    if not isinstance(value, dict | list):
        return None
    if id(value) in parents:
        return name
    items = value.items() if isinstance(value, dict) else enumerate(value)
    names = (_recursive_alias(child, f"{name}.{key}", (*parents, id(value))) for key, child in items)
    return next(filter(None, names), None)
