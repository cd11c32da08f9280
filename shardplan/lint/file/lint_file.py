"""Lints the trainer section of a Levanter configuration, after Levanter's own parser has judged the whole file."""

from dataclasses import dataclass

from shardplan.config import PlanConfig
from shardplan.errors import ConfigError
from shardplan.levanter_config.model_section import parse_model_section
from shardplan.levanter_config.training_extras import parse_extras
from shardplan.lint.file.prepare import PreparedFile, prepare_file
from shardplan.lint.file.target import file_target
from shardplan.lint.lint import LintResult, LintTarget, assumptions, lint_trainer


@dataclass(frozen=True)
class LintedFile:
    """A Levanter configuration, the target of its lint, and the findings on its trainer section."""

    prepared: PreparedFile
    target: LintTarget
    result: LintResult
    assumed: list[str]
    """Settings that the prediction takes from shardplan's configuration, because the file omits them."""


def lint_file(path: str, config: PlanConfig) -> LintedFile:
    """Lint the Levanter configuration `path`, for the model, slice and workload of `config` or of the file.

    Raises:
        ConfigError: the file cannot be read, or no model is known for it.
    """
    prepared = prepare_file(path, config)
    try:
        levanter_model = parse_model_section(prepared.sections)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    extras = parse_extras(prepared.sections, prepared.choice.program)
    target, assumed_model = file_target(prepared, levanter_model, extras)
    result = lint_trainer(prepared.sections["trainer"], target)
    return LintedFile(prepared, target, result, [*prepared.notes, *assumed_model, *assumptions(result, target)])
