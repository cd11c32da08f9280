"""Output files and folders: checks before long work that they can be written, and writes them."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardplan.errors import ConfigError


def check_writable(key: str, path: str) -> None:
    """Create the folder of `path`, and check that a file can be written there.

    Args:
        key: configuration key of the path, for the message.

    Raises:
        ConfigError: the path cannot be written.
    """
    with _errors_named(key, path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        is_new = not os.path.lexists(path)  # a link is kept, also one to a file that does not exist yet
        with open(path, "a", encoding="utf-8"):
            pass
        if is_new:
            Path(path).unlink(missing_ok=True)


def check_folder_writable(key: str, folder: str) -> None:
    """Create a folder, and check that files can be written in it.

    Args:
        key: configuration key of the folder, for the message.

    Raises:
        ConfigError: the folder cannot be written.
    """
    with _errors_named(key, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write_text(key: str, path: str, text: str) -> None:
    """Write a text file in UTF-8.

    Args:
        key: configuration key of the path, for the message.

    Raises:
        ConfigError: the file cannot be written, for example because the disk is full.
    """
    with _errors_named(key, path):
        Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _errors_named(key: str, path: str) -> Iterator[None]:
    """Convert an error of the operating system to one that names the configuration key and its path."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key} {path!r} cannot be written: {error.strerror}") from error
