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

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

SIMILAR = 0.6
"""Least similarity (`SequenceMatcher.ratio`) of a hint: `batch` is one for `batchsize`, `logs` none for `launcher`."""
NO_SYNONYMS: Mapping[str, str] = {}


class ShardplanError(Exception):
    """Base class of errors that end a command with a one-line message and an exit code."""

    exit_code: int
    is_shared = False
    """Whether all processes of the run raise the error, so that no process has to be told of it."""


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
    """Another process of the run was lost, failed, or is stuck."""

    exit_code = 5


class UndecidedError(ShardplanError):
    """The compiler gave no verdict on a plan, because it reached a limit of this machine first, or crashed."""

    exit_code = 6


class SlowError(ShardplanError):
    """The run is slower than its plan predicts, by more than was allowed."""

    exit_code = 7


def closest(
    name: str, valid: Iterable[str], cutoff: float = SIMILAR, synonyms: Mapping[str, str] = NO_SYNONYMS
) -> str | None:
    """Return the valid value that `name` means, or None if none is near.

    It looks for a value with the same letters and digits, then for a synonym, then for the most similar text. A value
    with other digits is never similar: bfloat16 is not a misspelt float64.

    Args:
        synonyms: synonym, as `fold` returns it -> the value that it means.
    """
    choices, folded = sorted(map(str, valid)), fold(name)
    for choice in choices:
        if fold(choice) == folded:
            return choice
    if synonyms.get(folded) in choices:
        return synonyms[folded]
    digits = re.sub("[^0-9]", "", name)
    by_lower = {
        choice.lower(): choice for choice in choices if re.sub("[^0-9]", "", choice) in ("", digits) or not digits
    }
    similar = get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[similar[0]] if similar else None


def fold(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub(r"[\s\-_.]", "", name.lower())


def nearest(name: str, valid: Iterable[str], synonyms: Mapping[str, str] = NO_SYNONYMS) -> str:
    """Return a hint for an error message: the valid value that `name` means, or all of them if none is near."""
    choices = sorted(map(str, valid))
    close = closest(name, choices, synonyms=synonyms)
    return f"did you mean {close!r}?" if close else f"valid: {', '.join(choices) or 'none'}"


def names_text(names: Iterable[str]) -> str:
    """Return names in words: `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def missing_path(path: str, others: Iterable[str]) -> str:
    """Explain in a message why a path cannot be opened: it is a dangling link, or does not exist; with a hint.

    Args:
        others: existing paths that could be meant instead.
    """
    if os.path.islink(path):
        return f"is a link to {os.readlink(path)}, which does not exist"
    # names without endings, because paths into one folder are all similar, and so are short names of one kind
    name, ending = os.path.splitext(os.path.basename(path))
    by_name = {}
    folder = os.path.dirname(path)
    for other in sorted(others, key=lambda other: (other.endswith(ending), os.path.dirname(other) == folder, other)):
        by_name[os.path.splitext(os.path.basename(other))[0]] = other
    close = by_name.get(closest(name, by_name) or "")
    return "does not exist" + (f"; did you mean {close!r}?" if close else "")


def check_argument(function: str, name: str, value: Any, kind: type | tuple[type, ...], remedy: str) -> None:
    """Check the type of an argument of a public function.

    Args:
        function, name: names of the function and of the argument, for the message.
        remedy: what to pass instead, for the message.

    Raises:
        ConfigError: the argument has another type.
    """
    if not isinstance(value, kind):
        shown = " ".join(repr(value).split())
        shown = shown if len(shown) <= 60 else f"{type(value).__name__}"
        raise ConfigError(f"{function}: {name} is {shown}; pass {remedy}")


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return the message of another library's error on one line of at most `limit` characters."""
    # obstore and TensorStore append dumps of many lines
    message = re.split(r"Debug source:|\[source locations=", str(error), maxsplit=1)[0]
    return " ".join(message.split())[:limit]
