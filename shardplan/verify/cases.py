"""What a configuration asks the compiler: which plans, which programs, which options."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from shardplan import config as configuration
from shardplan.config import Config
from shardplan.errors import ConfigError, one_line
from shardplan.hardware import parse_slice
from shardplan.levanter_config.model_section import model_section
from shardplan.levanter_config.trainer_section import is_levanter_config, read_file, read_levanter_config
from shardplan.model import build_model, read_config
from shardplan.plan.compiler_options import CURATED
from shardplan.plan.plan import SCHEMA_VERSION, Plan
from shardplan.search.make_plan import check_model, make_plan, plan_layout, with_plan
from shardplan.storage import open_folder
from shardplan.verify.run import Case


def cases_of(config: Config) -> list[Case]:
    """The configuration's own plan, with every set of options that it asks for, and what it is to be compared with."""
    own = _case(config, "this plan")
    others = [_other(path, config) for path in config.against]
    if config.options != "auto":
        return [own, *others]
    known = list(CURATED.values())
    return [
        *([own] if own.options not in known else []),
        *(dataclasses.replace(own, label=f"this plan, {name}", options=options) for name, options in CURATED.items()),
        *others,
    ]


def plan_case(config: Config, plan: Plan, label: str = "this plan") -> Case:
    """The case of `plan`, whose model is the one that `config` names.

    Raises:
        ConfigError: the plan is for another model.
    """
    hf_config = _hf_config(config)
    model = build_model(hf_config, plan.workload.position)
    check_model(plan, model)
    return Case(label, plan, model, hf_config, config.compiler.program, dict(plan.compiler_options))


def _case(config: Config, label: str) -> Case:
    config, plan = with_plan(config)
    if plan is None:
        # an estimate that nothing fits is no verdict: the compiler judges what comes closest
        plan = make_plan(config, nearest_miss=True)
    return plan_case(config, plan, label)


def _other(path: str, config: Config) -> Case:
    values = _read(path)
    if values.get("schema_version") == SCHEMA_VERSION:
        # the plan says slice and workload; the model is the same, for else there is nothing to compare
        return _case(Config(model=config.model, plan=path, compiler=config.compiler), path)
    if is_levanter_config(values):
        return _levanter_case(path, config)
    loaded = configuration.load(["--config", path], "verify")
    return _case(dataclasses.replace(loaded, compiler=config.compiler), path)


def _levanter_case(path: str, config: Config) -> Case:
    """A hand-written mesh and mappings, for the model, the slice and the positions of `config`."""
    hardware = parse_slice(config.hardware.slice)
    layout = read_levanter_config(path, hardware.devices, hardware.slices)
    workload = model_section(read_file(path)).workload(layout.workload(config.workload))
    config = dataclasses.replace(config, workload=workload)
    model = build_model(_hf_config(config), config.workload.position)
    plan = plan_layout(config, model, layout.mesh, layout.compute_mapping, layout.param_mapping)
    return plan_case(config, plan, path)


def _hf_config(config: Config) -> dict[str, Any]:
    """config.json of the model."""
    return read_config(config.model.config, open_folder(config.model.ref) if config.model.config is None else None)


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"against: {path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"against: {path} is neither YAML nor JSON: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"against: {path} holds {type(values).__name__}, not a configuration or a plan")
    return values
