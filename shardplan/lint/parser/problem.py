"""An error of Levanter's parser, in the form that is sent between the two processes. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class ProblemKind(StrEnum):
    """The reason why Levanter does not accept a value."""

    UNKNOWN_KEY = "unknown key"
    """The section does not have the key."""
    MISSING_KEY = "missing key"
    """A key without a default is not in the file."""
    UNKNOWN_TYPE = "unknown type"
    """No class of that `type` is registered."""
    VALUE = "value"
    """The value cannot be converted to the type of its key, or the configuration class raises an error for it."""
    NOT_INSTALLED = "not installed"
    """The key needs a package that cannot be imported here, which is no fault of the file."""


@dataclass(frozen=True)
class Problem:
    """One key or value that keeps Levanter from starting."""

    kind: ProblemKind
    path: tuple[str, ...]
    """Keys from the top of the file down to the key or value with the problem."""
    text: str
    """The parser's own message, on one line."""
    valid: tuple[str, ...] = ()
    """Keys or types that Levanter accepts there."""


@dataclass(frozen=True)
class ParserVerdict:
    """The verdict of Levanter's parser on a file: all problems that it found."""

    problems: tuple[Problem, ...]
    is_program_installed: bool = True
    """Whether the installed Levanter has the program that the file was parsed for."""

    @property
    def starts(self) -> bool:
        """Whether Levanter can parse the file."""
        return self.is_program_installed and not self.of_the_file

    @property
    def of_the_file(self) -> tuple[Problem, ...]:
        """The problems of the file itself, without problems of the environment."""
        return tuple(problem for problem in self.problems if problem.kind != ProblemKind.NOT_INSTALLED)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ParserVerdict":
        """Convert back from JSON values."""
        problems = tuple(
            Problem(ProblemKind(item["kind"]), tuple(item["path"]), item["text"], tuple(item["valid"]))
            for item in values["problems"]
        )
        return cls(problems, values["is_program_installed"])
