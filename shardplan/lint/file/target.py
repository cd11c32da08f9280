"""The model, slice and workload for the lint of a file: the user's, or else the file's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardplan.errors import ConfigError
from shardplan.levanter_config.model_section import ModelSection
from shardplan.levanter_config.training_extras import TrainingExtras
from shardplan.lint.file.prepare import PreparedFile
from shardplan.lint.lint import LintTarget, target_of
from shardplan.model.bundled_configs import bundled_name
from shardplan.model.registry import Model
from shardplan.model.section_model import (
    ASSUMED_VOCABULARY,
    DEFAULT_TOKENIZER,
    SECTION_TYPES,
    build_section_model,
    vocabulary_of,
)


def file_target(
    prepared: PreparedFile, model_section: ModelSection, extras: TrainingExtras
) -> tuple[LintTarget, list[str]]:
    """Return the model, slice and workload of a file, and the assumptions made about the model.

    The model is taken from the user's configuration. If that names none, it is the checkpoint that the file starts
    from, if its config.json is part of the package, or else the model of the `model` section.

    Raises:
        ConfigError: there is no model, it is not supported, or the user's model differs from the file's.
    """
    config, sections = prepared.config, prepared.sections
    section = dataclasses.replace(model_section, position=prepared.choice.position(sections) or model_section.position)
    uses_hf_model = sections.get("use_hf_model_config") is True or "model" not in prepared.choice.program.keys
    if not config.model.ref and not config.model.config:
        name = bundled_name(str(sections.get("initialize_from_hf"))) if uses_hf_model else None
        if name is None and uses_hf_model and sections.get("initialize_from_hf"):
            raise ConfigError(
                f"no model: {prepared.file.path} takes that of {sections['initialize_from_hf']}, whose config.json is "
                "not part of the package; name it with --model"
            )
        if name is None:
            return _section_target(prepared, section, extras)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, config=name))
    if uses_hf_model:  # Levanter replaces the section by what it makes of the checkpoint's config.json
        section = ModelSection(position=prepared.choice.position(sections))
    target = target_of(config, section, extras)
    if not uses_hf_model:
        _check_type(sections.get("model"), target.model)
    return target, []


def _section_target(
    prepared: PreparedFile, section: ModelSection, extras: TrainingExtras
) -> tuple[LintTarget, list[str]]:
    """Return the target with the model that the `model` section describes."""
    config, values = prepared.config, prepared.sections.get("model")
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"no model: {prepared.file.path} has no section model; name one with --model, or set model.ref to a "
            "Hugging Face folder, or model.config to a config.json"
        )
    vocabulary, assumed = _vocabulary(prepared.sections)
    position = section.position or (config.workload.position if "workload.position" in config.given else None)
    model = build_section_model(values, vocabulary, position)
    section = dataclasses.replace(section, position=position or model.config.max_Pos.size)
    return target_of(config, section, extras, model), assumed


def _vocabulary(sections: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the number of tokens of the file's tokenizer, and the assumption about it."""
    data = sections.get("data")
    data = data if isinstance(data, Mapping) else {}
    tokenizer = data.get("tokenizer", sections.get("tokenizer"))
    if type(data.get("vocab_size")) is int:
        return data["vocab_size"], []
    if tokenizer is None:
        size = vocabulary_of(DEFAULT_TOKENIZER) or ASSUMED_VOCABULARY
        return size, [f"vocabulary {size} (tokenizer {DEFAULT_TOKENIZER}, Levanter's default)"]
    size = vocabulary_of(str(tokenizer)) or ASSUMED_VOCABULARY
    is_known = vocabulary_of(str(tokenizer)) is not None
    return size, [] if is_known else [f"vocabulary {size} (that of tokenizer {tokenizer} is not known here)"]


def _check_type(section: Any, model: Model) -> None:
    """Check that the `model` section is of the user's model type.

    Raises:
        ConfigError: the section is of another type.
    """
    name = section.get("type") if isinstance(section, Mapping) else None
    if name in SECTION_TYPES and SECTION_TYPES[name] != model.type and model.type in SECTION_TYPES.values():
        raise ConfigError(
            f"model.type is {name} in the file, and the model that is named is a {model.type}; lint the file with the "
            "model that it is for"
        )
