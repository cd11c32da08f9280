"""Reads the config.json that `model.config` names: a file, or that of a released model that is part of the package."""

from pathlib import Path

from shardplan.errors import ConfigError, nearest

BUNDLED = {path.stem: path for path in sorted(Path(__file__).with_name("configs").glob("*.json"))}
"""Name of a released model -> its config.json, which is part of the package, so that planning needs no network."""


def read_config_file(name: str) -> bytes:
    """Read the config.json that `name` means, unchanged: the file of this path, or else that of the bundled model.

    Raises:
        ConfigError: there is neither, or it cannot be read.
    """
    path = Path(name)
    if name in BUNDLED and not path.is_file():
        path = BUNDLED[name]
    try:
        return path.read_bytes()
    except OSError as error:
        checkpoints = (file.parent.name for file in path.parent.glob("*/config.json"))
        raise ConfigError(
            f"model.config {name} is no bundled model, and cannot be read as a file: {error.strerror}; "
            f"{nearest(path.name.removesuffix('.json'), [*BUNDLED, *checkpoints])}"
        ) from error
