"""Prepares a Levanter configuration for the lint: its program, Levanter's own verdict, and its sections corrected.

Sections in the schema of another Levanter than the installed one are converted first; whatever Levanter's parser
refuses then is corrected or left out, so that the other checks see what was probably meant.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.config import PlanConfig
from shardplan.errors import ConfigError
from shardplan.hardware import Slice, parse_slice
from shardplan.levanter_config.conversion import NAME_OF_VERSION, convert_sections, foreign_keys
from shardplan.levanter_config.levanter_file import LevanterFile, read_levanter_file
from shardplan.levanter_config.programs import ProgramChoice, choose_program
from shardplan.levanter_config.trainer_section import OWN_KEYS
from shardplan.lint.corrections import correct_keys, parse_nearest
from shardplan.lint.findings import Finding, FindingKind, Severity, names_text
from shardplan.lint.parser.corrections import CorrectedSections, correct_sections
from shardplan.lint.parser.problem import ParserVerdict, Problem, ProblemKind
from shardplan.lint.parser.run_worker import ParserStopped, shared_parser
from shardplan.model.levanter_compat import INSTALLED_SCHEMA, TrainerSchema

KINDS = {"eval": "evaluation", "prefill": "sampling", "train": "training"}
"""Kind of workload -> what Levanter's program does."""
CORRECTED_ELSEWHERE = ("model.attn_backend", "trainer")
"""Keys that other checks report."""


@dataclass(frozen=True)
class PreparedFile:
    """A Levanter configuration as the lint goes on with it."""

    file: LevanterFile
    config: PlanConfig
    """The user's configuration, with the kind of workload and the slice of the file."""
    choice: ProgramChoice
    corrected: CorrectedSections
    findings: tuple[Finding, ...]
    """What Levanter's parser refuses, and keys of another version."""
    converted: Mapping[str, Any]
    """Section -> its content in the schema of the installed Levanter, for sections that are in another one."""
    notes: tuple[str, ...]
    """What is assumed, and what could not be asked."""

    @property
    def sections(self) -> dict[str, Any]:
        """The sections after conversion and correction."""
        return self.corrected.sections


def prepare_file(path: str, config: PlanConfig) -> PreparedFile:
    """Read the Levanter configuration `path`, and have the installed Levanter's parser judge it.

    Raises:
        ConfigError: it cannot be read, or its trainer section has a value of the wrong type.
    """
    file = read_levanter_file(path)
    is_kind_given = "workload.kind" in config.given
    choice = choose_program(file.sections, config.workload.kind, is_kind_given, file.inside)
    if choice.program.kind != config.workload.kind and not is_kind_given:
        config = dataclasses.replace(config, workload=dataclasses.replace(config.workload, kind=choice.program.kind))
    if file.slice is not None and "hardware.slice" not in config.given:
        config = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, slice=file.slice))
    schema = config.levanter_schema if "levanter_schema" in config.given else INSTALLED_SCHEMA
    notes = [] if choice.evidence or is_kind_given else [f"{KINDS[choice.program.kind]} (workload.kind)"]
    try:
        sections, findings, changed = _in_schema(file.sections, schema, parse_slice(config.hardware.slice))
        parse_nearest(sections["trainer"], parse_slice(config.hardware.slice))  # errors before the parser is asked
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    verdict = ParserVerdict(())
    if schema == INSTALLED_SCHEMA:
        verdict, unasked = _ask(file, choice, sections if changed else None)
        notes += unasked
    else:
        notes.append(f"that {NAME_OF_VERSION[schema]}, which is not installed here, takes all other keys")
    corrected = correct_sections(sections, verdict, choice.program, CORRECTED_ELSEWHERE)
    converted = {name: sections[name] for name in changed}
    findings += _check_length(corrected.sections, choice)
    return PreparedFile(file, config, choice, corrected, (*findings, *corrected.findings), converted, tuple(notes))


def _check_length(sections: Mapping[str, Any], choice: ProgramChoice) -> Iterator[Finding]:
    """Find a training on longer sequences than the model has positions."""
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


def _in_schema(
    sections: Mapping[str, Any], schema: TrainerSchema, hardware: Slice
) -> tuple[dict[str, Any], list[Finding], list[str]]:
    """Return the sections in `schema`, a finding where they are in another one, and the names of those that changed."""
    trainer = sections["trainer"]
    if isinstance(trainer, dict):  # a misspelt key of the other version is one of that version
        trainer, _ = correct_keys(trainer, hardware)
    foreign = foreign_keys({**sections, "trainer": trainer}, schema)
    if not foreign:
        return dict(sections), [], []
    (other,) = (each for each in TrainerSchema if each != schema)
    findings = [
        Finding(
            Severity.ERROR,
            FindingKind.SCHEMA,
            tuple(foreign),
            f"{names_text(key.partition('.')[2] for key in foreign)} {'is' if len(foreign) == 1 else 'are'} of "
            f"{NAME_OF_VERSION[other]}: {NAME_OF_VERSION[schema]} does not start; the other findings are about the "
            "converted section",
            f"use the converted section, or {NAME_OF_VERSION[other]} (levanter_schema {other})",
        )
    ]
    trainer = sections["trainer"]
    if isinstance(trainer, dict) and not any(key in OWN_KEYS[schema] for key in trainer):
        _, corrections, trainer = parse_nearest(trainer, hardware)
        findings += corrections
    converted = convert_sections({**sections, "trainer": trainer}, schema, hardware)
    return converted, findings, [name for name in converted if converted[name] != sections.get(name)]


def _ask(
    file: LevanterFile, choice: ProgramChoice, sections: Mapping[str, Any] | None
) -> tuple[ParserVerdict, list[str]]:
    """Return the verdict of Levanter's parser on the file, or on the converted `sections`, and what it cannot judge."""
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
    """Whether the problem is that the file lacks a section, or is refused as a whole."""
    return not problem.path or (problem.kind == ProblemKind.MISSING_KEY and len(problem.path) == 1)
