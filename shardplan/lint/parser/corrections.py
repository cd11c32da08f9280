"""Converts errors of Levanter's parser to findings, and removes the refused parts from the sections.

A misspelt key is renamed to the one that was probably meant, and a value that is refused is left out, so that
Levanter's default holds: all other checks can run then, and the smallest edit contains these changes.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.errors import closest, nearest
from shardplan.levanter_config.programs import LevanterProgram
from shardplan.lint.edits import value_text
from shardplan.lint.findings import Finding, FindingKind, Severity
from shardplan.lint.parser.problem import ParserVerdict, Problem, ProblemKind

RENAME_CUTOFF = 0.75
"""Least similarity (`difflib.SequenceMatcher.ratio`) at which an unknown name counts as misspelt."""
TRAINER_SECTIONS = (("trainer",), ("trainer", "mesh"), ("trainer", "mesh", "axes"))
"""Sections whose unknown keys `shardplan.lint.corrections` corrects, because it knows what their values mean."""


@dataclass(frozen=True)
class CorrectedSections:
    """The sections of a file without the parts that Levanter's parser refuses."""

    sections: dict[str, Any]
    findings: tuple[Finding, ...]
    lines: tuple[str, ...]
    """The changes as lines of a unified diff."""
    is_complete: bool
    """Whether the parser refuses nothing more in the sections."""

    @property
    def edits(self) -> int:
        """Number of keys that were changed, removed or renamed."""
        return len({finding.where for finding in self.findings})


def correct_sections(
    sections: Mapping[str, Any], verdict: ParserVerdict, program: LevanterProgram, skipped: Collection[str] = ()
) -> CorrectedSections:
    """Return the sections after the corrections, with a finding for each problem of the file.

    Args:
        skipped: dotted keys that another check corrects.
    """
    corrected, is_complete = copy.deepcopy(dict(sections)), verdict.is_program_installed
    findings, lines = list(_program_findings(verdict, program)), []
    for problem in verdict.of_the_file:
        key = ".".join(problem.path)
        if key in skipped or (problem.kind == ProblemKind.UNKNOWN_KEY and problem.path[:-1] in TRAINER_SECTIONS):
            continue
        section, _ = _parent(corrected, problem.path)
        findings.append(_finding(problem, program, section if isinstance(section, dict) else ()))
        changes = _correct(corrected, problem)
        lines += changes
        is_complete = is_complete and bool(changes)
    return CorrectedSections(corrected, tuple(findings), tuple(lines), is_complete)


def _program_findings(verdict: ParserVerdict, program: LevanterProgram) -> Iterator[Finding]:
    if not verdict.is_program_installed:
        yield Finding(
            Severity.ERROR,
            FindingKind.PROGRAM,
            (program.module,),
            f"the keys of the file are for levanter.main.{program.name}, which the installed Levanter does not have",
            "use the file with the version of Levanter that it was written for, or write it for train_lm",
        )


def _finding(problem: Problem, program: LevanterProgram, present: Collection[str]) -> Finding:
    """Make a finding from an error of Levanter's parser, with the value to write instead.

    Args:
        present: the keys of the section, which are not suggested for an unknown key.
    """
    *parents, name = problem.path or ("the file",)
    section = ".".join(parents) or f"levanter.main.{program.name}"
    match problem.kind:
        case ProblemKind.UNKNOWN_KEY:
            kind, text = FindingKind.UNKNOWN_KEY, f"Levanter has no key {name!r} in {section} and does not start"
            similar = closest(name, [each for each in problem.valid if each not in present])
            remedy = f"did you mean {similar!r}?" if similar else "remove it"
        case ProblemKind.MISSING_KEY:
            kind, text = FindingKind.MISSING_KEY, f"Levanter needs the key {name!r} in {section} and does not start"
            remedy = nearest("", problem.valid) if problem.valid else "add it"
        case ProblemKind.UNKNOWN_TYPE:
            kind, text = FindingKind.VALUE, f"Levanter does not start: {problem.text} for {'.'.join(problem.path)}"
            remedy = nearest(_quoted(problem.text), problem.valid)
        case _:
            kind, text = FindingKind.VALUE, f"Levanter does not take this value and does not start: {problem.text}"
            remedy = "correct it, or leave it out for Levanter's default"
    return Finding(Severity.ERROR, kind, (".".join(problem.path) or name,), text, remedy)


def _quoted(text: str) -> str:
    """Return the word that the text has in quotes."""
    return text.split("'")[1] if "'" in text else text


def _correct(sections: dict[str, Any], problem: Problem) -> list[str]:
    """Change `sections` so that the problem disappears; return the changes, or an empty list if no change helps."""
    if problem.kind == ProblemKind.MISSING_KEY or not problem.path:
        return []
    path = (*problem.path, "type") if problem.kind == ProblemKind.UNKNOWN_TYPE else problem.path
    parent, name = _parent(sections, path)
    if not isinstance(parent, dict) or name not in parent:
        return []
    value = parent[name]
    meant = _meant(problem, name, value)
    if problem.kind == ProblemKind.UNKNOWN_TYPE:
        if meant is None:
            return []
        parent[name] = meant
        return [f"-{'.'.join(path)}: {value_text(value)}", f"+{'.'.join(path)}: {meant}"]
    if problem.kind == ProblemKind.VALUE and isinstance(value, dict):
        return []  # a section as a whole is refused: which of its keys must change is not known
    del parent[name]
    lines = [f"-{'.'.join(path)}: {value_text(value)}"]
    if problem.kind == ProblemKind.UNKNOWN_KEY and meant is not None and meant not in parent:
        parent[meant] = value
        lines.append(f"+{'.'.join((*path[:-1], meant))}: {value_text(value)}")
    return lines


def _meant(problem: Problem, name: Any, value: Any) -> str | None:
    """Return the key or type that the file probably intends."""
    misspelt = str(value) if problem.kind == ProblemKind.UNKNOWN_TYPE else str(name)
    return closest(misspelt, problem.valid, RENAME_CUTOFF)


def _parent(sections: Any, path: Sequence[str]) -> tuple[Any, Any]:
    """Return the section that holds the last key of `path`, and the key's spelling in the file."""
    for key in path[:-1]:
        sections = _child(sections, key)
        if sections is None:
            return None, None
    if not isinstance(sections, dict):
        return None, None
    return sections, next((key for key in sections if str(key) == path[-1]), path[-1])


def _child(section: Any, key: str) -> Any:
    if isinstance(section, list):
        return section[int(key)] if key.isdigit() and int(key) < len(section) else None
    if isinstance(section, dict):
        return next((value for name, value in section.items() if str(name) == key), None)
    return None
