"""Builds the cases that a configuration selects, each a plan, a program and compiler options."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from shardplan.config import parse_config
from shardplan.config.command_flags import OptionSets
from shardplan.config.given_plan import load_given_plan
from shardplan.config.plan_config import CompilingConfig
from shardplan.errors import ConfigError, one_line
from shardplan.levanter_config.levanter_file import is_levanter_config
from shardplan.lint.findings import FindingKind
from shardplan.model.huggingface.hf_config import read_config
from shardplan.plan.plan import SCHEMA_VERSION, Plan
from shardplan.plan.serialization import value_kind
from shardplan.search.result.compiler_options import CURATED
from shardplan.storage import open_folder
from shardplan.verify.case import Case

ASSUMED_MEANING = {
    FindingKind.LIST, FindingKind.MESH_SIZE, FindingKind.UNKNOWN_KEY, FindingKind.UNKNOWN_MESH_AXIS, FindingKind.VALUE,
}  # fmt: skip
"""Kinds of findings on keys whose intended meaning the lint assumes."""


def build_cases(
    config: CompilingConfig, options: OptionSets = OptionSets.PLAN, against: Sequence[str] = ()
) -> list[Case]:
    """Return the cases of the configuration's own plan, one per set of compiler options, then cases of other plans.

    Args:
        against: paths of plans, configurations or Levanter configurations.

    Raises:
        ConfigError: a file of `against` cannot be read, or its plan is for another model.
    """
    own = _own_case(config, "this plan")
    others = [_other_case(path, config) for path in against]
    if options is OptionSets.PLAN:
        return [own, *others]
    known = list(CURATED.values())
    return [
        *([own] if own.options not in known else []),
        *(dataclasses.replace(own, label=f"this plan, {name}", options=options) for name, options in CURATED.items()),
        *others,
    ]


def build_case(config: CompilingConfig, plan: Plan, label: str = "this plan") -> Case:
    """Return the case of `plan`, with the model that `config` names."""
    return Case(label, plan, _hf_config(config, plan), config.compiler.program, dict(plan.compiler_options))


def _own_case(config: CompilingConfig, label: str) -> Case:
    config, plan = load_given_plan(config)
    if plan is None:
        from shardplan.search.make_plan import make_plan  # imports JAX and Levanter, which takes seconds

        # an estimate that nothing fits is no verdict: the compiler judges the plan that comes closest
        plan = make_plan(config, nearest_miss=True)
    return build_case(config, plan, label)


def _other_case(path: str, config: CompilingConfig) -> Case:
    """Return the case of a plan, a Levanter configuration or a shardplan configuration, by the file's content."""
    values = _read(path)
    if values.get("schema_version") == SCHEMA_VERSION:
        # slice and workload come from the plan; the model must be the same for a comparison
        return _own_case(CompilingConfig(model=config.model, plan=path, compiler=config.compiler), path)
    if is_levanter_config(values):
        return _levanter_case(path, config)
    loaded = parse_config(["--config", path], CompilingConfig)
    return _own_case(dataclasses.replace(loaded, compiler=config.compiler), path)


def _levanter_case(path: str, config: CompilingConfig) -> Case:
    """Return the case of a Levanter configuration's mesh and mappings, as the lint estimates them.

    Raises:
        ConfigError: the configuration trains in a way that no Plan describes, or the lint had to guess its layout.
    """
    from shardplan.lint.file.lint_file import lint_file
    from shardplan.lint.lint import plan_section

    linted = lint_file(path, config)
    if linted.target.extras.is_other_step:
        raise ConfigError(
            f"against: {path} does not train all parameters on single sequences, and only that is compiled; lint "
            "estimates it (shardplan plan --lint)"
        )
    for finding in (*linted.prepared.findings, *linted.result.findings):
        if finding.kind in ASSUMED_MEANING and any(key.startswith("trainer.") for key in finding.where):
            raise ConfigError(f"against: {path} has no layout to compile: {finding.text}; {finding.remedy}")
    return build_case(config, plan_section(linted.result.subject, linted.target), path)


def _hf_config(config: CompilingConfig, plan: Plan) -> dict[str, Any]:
    """Return the content of the model's config.json, with the class that computes it and how its weights are stored."""
    folder = open_folder(config.model.ref) if config.model.config is None else None
    return read_config(config.model.config, folder, plan.model.class_name, plan.model.kept_dtype is not None)


def _read(path: str) -> dict[str, Any]:
    """Read a file of YAML or JSON; ConfigError if it cannot be read, or holds no mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"against: {path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"against: {path} is neither YAML nor JSON: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"against: {path} contains {value_kind(values)}, not a configuration or a plan")
    return values
