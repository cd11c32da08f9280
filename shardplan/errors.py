"""What can go wrong that is not a bug: one exception class per exit code.

| exit code | class | meaning |
|---|---|---|
| 0 | | success |
| 1 | any other exception | a bug, shown with its traceback |
| 2 | `ConfigError` | bad configuration or arguments |
| 3 | `InfeasibleError` | no plan fits |
| 4 | `CheckpointError` | the checkpoint does not match the model, or is damaged |
| 5 | `PeerError` | another process of the run was lost |

Every message is one line: what is wrong, where, the nearest valid value, the remedy.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ShardplanError(Exception):
    """Base of the errors that end a command with one line and an exit code."""

    exit_code: int


class ConfigError(ShardplanError):
    """A configuration value, a command-line argument or an input file cannot be used."""

    exit_code = 2


class InfeasibleError(ShardplanError):
    """No mesh and mapping satisfy the constraints."""

    exit_code = 3


class CheckpointError(ShardplanError):
    """The checkpoint is incomplete, damaged, or holds another model than the configuration says."""

    exit_code = 4


class PeerError(ShardplanError):
    """Another process of the run was lost, or failed."""

    exit_code = 5


def closest(name: str, valid: Iterable[str]) -> str | None:
    """The valid value closest to `name`, where one is close."""
    # cutoff 0.5 finds `batchsize` -> `batch`, which difflib's default of 0.6 misses
    return next(iter(get_close_matches(name, sorted(valid), n=1, cutoff=0.5)), None)


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint naming the valid value closest to `name`, or all of them where none is close."""
    choices = sorted(valid)
    close = closest(name, choices)
    return f"did you mean {close!r}?" if close else f"valid: {', '.join(choices) or 'none'}"


def one_line(error: BaseException, limit: int = 300) -> str:
    """What a library says went wrong, on one line of at most `limit` characters."""
    said, _, _ = str(error).partition("Debug source:")  # obstore's, of many lines
    return " ".join(said.split())[:limit]
