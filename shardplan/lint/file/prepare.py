"""Prepares a Levanter configuration for the lint: its program, Levanter's own verdict, and its corrected sections.

Sections of levanter 1.2 are converted first; whatever Levanter's parser
refuses then is corrected or left out, so that the other checks see what was probably meant.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.config import PlanConfig
from shardplan.errors import ConfigError, names_text
from shardplan.hardware import Slice, parse_slice
from shardplan.levanter_config.levanter_file import LevanterFile, read_levanter_file
from shardplan.levanter_config.programs import ProgramChoice, choose_program
from shardplan.lint.corrections import convert_nearest, parse_nearest
from shardplan.lint.findings import Finding, FindingKind, Severity
from shardplan.lint.parser.corrections import CorrectedSections, correct_sections
from shardplan.lint.parser.problem import ParserVerdict, Problem, ProblemKind
from shardplan.lint.parser.run_worker import ParserStopped, shared_parser
from shardplan.plan.workload.kinds import KINDS

CORRECTED_ELSEWHERE = ("model.attn_backend", "trainer")
"""Keys whose problems other checks report."""


@dataclass(frozen=True)
class PreparedFile:
    """A Levanter configuration, prepared for the lint."""

    file: LevanterFile
    config: PlanConfig
    """The user's configuration, with the file's kind of workload and slice."""
    choice: ProgramChoice
    corrected: CorrectedSections
    findings: tuple[Finding, ...]
    """Findings on values that Levanter's parser refuses, and on keys of levanter 1.2."""
    converted: Mapping[str, Any]
    """Section -> its content for today's Levanter, for sections of levanter 1.2."""
    notes: tuple[str, ...]
    """Assumptions, and facts that the parser could not check."""

    @property
    def sections(self) -> dict[str, Any]:
        """The sections after conversion and correction."""
        return self.corrected.sections


def prepare_file(path: str, config: PlanConfig) -> PreparedFile:
    """Read the Levanter configuration `path`, and have the installed Levanter's parser judge it.

    Raises:
        ConfigError: the file cannot be read, or its trainer section has a value of the wrong type.
    """
    file = read_levanter_file(path)
    is_kind_given = "workload.kind" in config.given
    choice = choose_program(file.sections, config.workload.kind, is_kind_given, file.inside)
    if choice.program.kind != config.workload.kind and not is_kind_given:
        config = dataclasses.replace(config, workload=dataclasses.replace(config.workload, kind=choice.program.kind))
    if file.slice is not None and "hardware.slice" not in config.given:
        config = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, slice=file.slice))
    notes = [] if choice.evidence or is_kind_given else [f"{KINDS[choice.program.kind].activity} (workload.kind)"]
    try:
        sections, findings, changed = _convert(file.sections, parse_slice(config.hardware.slice))
        parse_nearest(sections["trainer"], parse_slice(config.hardware.slice))  # errors before the parser is asked
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    verdict, unasked = _ask(file, choice, sections if changed else None)
    notes += unasked
    corrected = correct_sections(sections, verdict, choice.program, CORRECTED_ELSEWHERE)
    converted = {name: sections[name] for name in changed}
    findings += _check_length(corrected.sections, choice)
    return PreparedFile(file, config, choice, corrected, (*findings, *corrected.findings), converted, tuple(notes))


def _check_length(sections: Mapping[str, Any], choice: ProgramChoice) -> Iterator[Finding]:
    """Find training on sequences that are longer than the model's number of positions."""
    model, length = sections.get("model"), choice.position(sections)
    positions = model.get("max_seq_len") if isinstance(model, Mapping) else None
    uses_section = choice.program.kind == "train" and sections.get("use_hf_model_config") is not True
    if uses_section and type(positions) is int and length is not None and length > positions:
        yield Finding(
            Severity.ERROR,
            FindingKind.VALUE,
            (choice.program.length_keys[0], "model.max_seq_len"),
            f"{choice.program.length_keys[0]} is {length}, and the model has {positions} positions: Levanter stops",
            f"use at most {positions}, or a larger max_seq_len",
        )


def _convert(sections: Mapping[str, Any], hardware: Slice) -> tuple[dict[str, Any], list[Finding], list[str]]:
    """Convert a file of levanter 1.2: return the sections for today's Levanter, findings, and the changed sections."""
    converted, old, corrections = convert_nearest(sections, hardware)
    if not old:
        return converted, [], []
    finding = Finding(
        Severity.ERROR,
        FindingKind.SCHEMA,
        tuple(old),
        f"{names_text(key.partition('.')[2] for key in old)} {'is' if len(old) == 1 else 'are'} of levanter 1.2: "
        "Levanter does not start; the other findings are about the converted section",
        "use the converted section",
    )
    changed = [name for name in converted if converted[name] != sections.get(name)]
    return converted, [finding, *corrections], changed


def _ask(
    file: LevanterFile, choice: ProgramChoice, sections: Mapping[str, Any] | None
) -> tuple[ParserVerdict, list[str]]:
    """Return the parser's verdict on the file or on the converted `sections`, and which parts were not checked."""
    try:
        if sections is None:
            verdict = shared_parser().parse(file.text, choice.program, file.inside)
        else:
            verdict = shared_parser().parse_values(sections, choice.program)
    except ParserStopped as stopped:
        return ParserVerdict(()), [f"that Levanter takes all keys: its parser could not be asked ({stopped})"]
    if not choice.evidence:  # a fragment of a file, which need not have what an assumed program requires
        kept = [problem for problem in verdict.problems if not _is_about_the_whole_file(problem)]
        verdict = dataclasses.replace(verdict, problems=tuple(kept))
    missing = [problem for problem in verdict.problems if problem.kind == ProblemKind.NOT_INSTALLED]
    return verdict, [f"{'.'.join(problem.path)}, which is not installed here ({problem.text})" for problem in missing]


def _is_about_the_whole_file(problem: Problem) -> bool:
    """Return whether the problem is that the file lacks a section, or is refused as a whole."""
    return not problem.path or (problem.kind == ProblemKind.MISSING_KEY and len(problem.path) == 1)
