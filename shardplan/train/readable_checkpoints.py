"""Errors with a remedy, on one line, for Levanter checkpoints that cannot be read.

`levanter.main.train_lm` and its Trainer read checkpoints by functions of `levanter.checkpoint`, which raise whatever
TensorStore, fsspec and json raise: a traceback of a hundred lines for a file that a full disk has cut off.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from levanter import checkpoint
from levanter.main import train_lm

from shardplan.errors import CheckpointError, ConfigError, one_line

CLOSED_LOOP = "Event loop is closed"
"""Message of asyncio for a read that ends too late."""


@contextlib.contextmanager
def explain_unreadable(own: tuple[str, ...]) -> Iterator[None]:
    """Make Levanter's errors about checkpoints name the checkpoint that cannot be read, within the context.

    `CheckpointError` is raised for a damaged checkpoint, and `ConfigError` if a folder that the configuration names has
    no checkpoint.

    Args:
        own: the folders of the run's own checkpoints, from which it resumes.
    """
    load, load_metadata, find = checkpoint.load_checkpoint, checkpoint._load_metadata, train_lm.latest_checkpoint_path

    def load_or_explain(tree: Any, path: Any, **settings: Any) -> Any:
        try:
            return load(tree, path, **settings)
        except (OSError, ValueError, KeyError) as error:  # those of TensorStore are ValueError
            raise _unreadable(str(path), own, one_line(error)) from error

    def load_metadata_or_explain(path: str, *arguments: Any, **settings: Any) -> Any:
        try:
            return load_metadata(path, *arguments, **settings)
        except ValueError as error:  # a missing file is no error: then the folder is no checkpoint
            raise _unreadable(path, own, f"metadata.json: {one_line(error)}") from error

    def find_or_explain(path: str) -> str:
        try:
            return find(path)
        except FileNotFoundError as error:
            raise no_checkpoint(path) from error

    with (
        mock.patch.object(checkpoint, "load_checkpoint", load_or_explain),
        mock.patch.object(train_lm, "load_checkpoint", load_or_explain),
        mock.patch.object(checkpoint, "_load_metadata", load_metadata_or_explain),
        mock.patch.object(train_lm, "latest_checkpoint_path", find_or_explain),
        _without_late_reads(),
    ):
        yield


@contextlib.contextmanager
def _without_late_reads() -> Iterator[None]:
    """Hide the tracebacks of reads that end after the load has failed and its event loop is closed."""
    report = sys.unraisablehook

    def report_others(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != CLOSED_LOOP:
            report(unraisable)

    sys.unraisablehook = report_others
    yield
    sys.unraisablehook = report  # not after an error: reads go on until the process ends


def no_checkpoint(path: str) -> ConfigError:
    """Return the error for a folder, named by the configuration, that holds no checkpoint.

    >>> print(no_checkpoint("runs/a"))
    runs/a holds no checkpoint of Levanter, which has a metadata.json; name the folder of one
    """
    return ConfigError(f"{path} holds no checkpoint of Levanter, which has a metadata.json; name the folder of one")


def _unreadable(path: str, own: tuple[str, ...], problem: str) -> CheckpointError:
    """Return the error for a checkpoint that cannot be read; its remedy depends on whether the run has written it."""
    if path.startswith(own):
        remedy = "remove this folder: the run goes on from the checkpoint before it, or begins anew if there is none"
    else:
        remedy = "name another one"
    return CheckpointError(f"checkpoint {path} cannot be read: {problem}; {remedy}")
