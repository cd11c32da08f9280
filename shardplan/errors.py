"""Errors that are not bugs: one exception class per exit code.

| exit code | class | meaning |
|---|---|---|
| 0 | | success |
| 1 | any other exception | a bug, shown with its traceback |
| 2 | `ConfigError` | bad configuration or arguments, with the nearest valid value |
| 3 | `InfeasibleError` | no plan fits, by estimate or by the compiler: the nearest miss, and the GiB that are missing |
| 4 | `CheckpointError` | the checkpoint does not match its config.json, is damaged, or differs between processes |
| 5 | `PeerError` | a process of the run was lost, failed, or is stuck: which one |
| 6 | `UndecidedError` | the compiler gave no verdict: a limit of time or memory was reached first, or it crashed |
| 7 | `SlowError` | the run was stopped, because it is slower than `gate.factor` allows |
| 130 | `KeyboardInterrupt` | interrupted with Ctrl-C, as shells report it |

Code 6 is neither 2 nor 3: the configuration is right, and with a higher limit the same plan may be found to fit.

Every message is one line: what is wrong, where, the nearest valid value, and the remedy.
"""

from collections.abc import Iterable
from difflib import get_close_matches

SIMILAR = 0.5
"""Similarity (`difflib.SequenceMatcher.ratio`) of a hint: `batch` for `batchsize`, which difflib's default misses."""


class ShardplanError(Exception):
    """Base class of errors that end a command with a one-line message and an exit code."""

    exit_code: int
    is_shared = False
    """Whether all processes of the run raise it, so that they need not be told."""


class ConfigError(ShardplanError):
    """A configuration value, a command-line argument or an input file cannot be used."""

    exit_code = 2


class InfeasibleError(ShardplanError):
    """No mesh and mapping satisfy the constraints."""

    exit_code = 3


class CheckpointError(ShardplanError):
    """The checkpoint is incomplete or damaged, or does not match the configured model."""

    exit_code = 4


class PeerError(ShardplanError):
    """A process of the run was lost, failed, or is stuck."""

    exit_code = 5


class UndecidedError(ShardplanError):
    """The compiler gave no verdict on a plan, because it reached a limit of this machine first, or crashed."""

    exit_code = 6


class SlowError(ShardplanError):
    """The run is slower than its plan predicts, by more than was allowed."""

    exit_code = 7


def closest(name: str, valid: Iterable[str], cutoff: float = SIMILAR) -> str | None:
    """Return the valid value most similar to `name`, or None if none is as similar as `cutoff`."""
    return next(iter(get_close_matches(name, sorted(map(str, valid)), n=1, cutoff=cutoff)), None)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint for an error message: the valid value most similar to `name`, or all of them if none is similar."""
    choices = sorted(map(str, valid))
    close = closest(name, choices)
    return f"did you mean {close!r}?" if close else f"valid: {', '.join(choices) or 'none'}"


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return the message of another library's error on one line of at most `limit` characters."""
    message, _, _ = str(error).partition("Debug source:")  # obstore appends a dump of many lines
    return " ".join(message.split())[:limit]
