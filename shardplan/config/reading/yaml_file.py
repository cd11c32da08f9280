"""Reads YAML files in which every key is unique, with one-line errors."""

from pathlib import Path
from typing import Any

import yaml

from shardplan.errors import ConfigError, one_line

MERGE_TAG = "tag:yaml.org,2002:merge"
"""Tag of the key `<<`, whose merged keys a mapping may override."""


class _DuplicateKeyError(Exception):
    """A mapping of a YAML file has a key twice."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, where PyYAML silently keeps the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # not when values are constructed: by then a mapping contains the keys of those merged into it
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE_TAG:
                line = key.start_mark.line + 1
                if (key.tag, key.value) in lines:
                    first = lines[key.tag, key.value]
                    raise _DuplicateKeyError(f"key {key.value!r} is in line {first} and again in line {line}")
                lines[key.tag, key.value] = line
        return node


def read_yaml(path: str) -> Any:
    """Read the content of a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has a key twice.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {one_line(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path} is not YAML: {one_line(error)}") from error
    except _DuplicateKeyError as error:
        raise ConfigError(f"config file {path}: {error}; remove one of the two") from error
