"""Prepares a training: devices, the configuration of a model, and a plan for it."""

import json
from dataclasses import dataclass, replace
from typing import Any

from shardplan.checkpoint.session import agree_on_plan
from shardplan.config.command_flags import TrainCommand
from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.levanter_config.programs import PROGRAMS
from shardplan.levanter_config.training_extras import DEFAULT_OPTIMIZER, OPTIMIZERS, TrainingExtras, parse_extras
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import CLASS_KEY
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.runtime.devices import start_devices
from shardplan.runtime.generation import check_generation
from shardplan.runtime.processes.group import open_process_group
from shardplan.search.given_plan import check_model
from shardplan.search.make_plan import build_configured, make_plan
from shardplan.storage import open_folder
from shardplan.train.levanter_file import nested_sections

TRAIN_LM = next(program for program in PROGRAMS if program.name == "train_lm")


@dataclass(frozen=True)
class TrainingModel:
    """A model to train, without weights, and its config.json."""

    model: Model
    hf_config: dict[str, Any]

    @property
    def digest_text(self) -> str:
        """Content of the model's config.json, and the class that computes it, as text for comparisons."""
        return json.dumps({"class": self.model.class_name, **self.hf_config}, sort_keys=True, default=str)


def build_training_model(config: TrainCommand) -> TrainingModel:
    """Build the model of the configuration, without weights."""
    folder = open_folder(config.model.ref) if config.model.config is None else None
    hf_config = read_config(config.model.config, folder, config.model_class)
    model = build_configured(config, hf_config)
    # the class is a key of shardplan's own: what is left is a config.json that transformers reads
    return TrainingModel(model, {name: value for name, value in hf_config.items() if name != CLASS_KEY})


def make_training_plan(config: TrainCommand, model: Model) -> Plan:
    """Make the plan of a training; Levanter's Trainer runs the model's own attention."""
    return make_plan(config, model, own_attention=True)


def prepare_training(config: TrainCommand, plan: Plan | None, deadline_s: float) -> tuple[TrainingModel, Plan]:
    """Start JAX on the configured slice, build the model, and make a plan if `plan` is None.

    Args:
        deadline_s: most seconds for reading the model's configuration, and for a plan.

    Raises:
        ConfigError: JAX has other devices, or processes have different configurations or plans.
        InfeasibleError: no plan fits.
        PeerError: another process of the run is missing, was lost, or failed.
    """
    hardware = parse_slice(config.hardware.slice)
    start_devices(hardware.name, hardware.devices, hardware.is_cpu, config.facts)
    check_generation(hardware)
    with open_process_group() as processes, processes.phase("planning", deadline_s):
        training = processes.agree(
            "model", lambda: build_training_model(config), lambda built: {"model": built.digest_text}, _other_model
        )
        model = training.model
        plan = agree_on_plan(
            processes, plan, lambda: make_training_plan(config, model), lambda plan: check_training_plan(plan, model)
        )
    return training, plan


def check_training_plan(plan: Plan, model: Model) -> None:
    """Check that a plan can be used for training.

    Raises:
        ConfigError: the plan is for another model, is not for training, or has attention that Levanter's Trainer lacks.
    """
    check_model(plan, model)
    if not plan.workload.is_training:
        raise ConfigError(f"the plan is for workload.kind {plan.workload.kind}; plan with --workload.kind train")
    if not plan.attention.runs_in_levanter:
        raise ConfigError(
            f"the plan has {plan.attention.strategy} attention in {plan.attention.layout} order, and Levanter's "
            f"Trainer computes its own, in the order of the sequence; leave plan out, or plan with --pin "
            f"{plan.model.position}="
        )


def with_planned_optimizer(config: TrainCommand) -> TrainCommand:
    """Return the configuration with the optimizer of Levanter's section in its workload.

    Raises:
        ConfigError: workload.optimizer names another optimizer.
    """
    extras = training_extras(config)
    meant = OPTIMIZERS.get(extras.optimizer)
    work = config.workload
    if meant is None:
        return config
    name, _, options = work.optimizer.partition("+")
    if "workload.optimizer" in config.given and name != meant:
        raise ConfigError(
            f"workload.optimizer is {name}, and optimizer.type is {extras.optimizer} (as {meant} of optax); leave "
            "workload.optimizer out"
        )
    if extras.averages and "ema" not in options.split("+"):
        options = "+".join(["ema", *options.split("+")] if options else ["ema"])
    return replace(config, workload=replace(work, optimizer=f"{meant}+{options}" if options else meant))


def training_extras(config: TrainCommand) -> TrainingExtras:
    """Return how the configured training differs from training all parameters with Adam."""
    return parse_extras(nested_sections(config.levanter), TRAIN_LM)


def unplanned_notes(config: TrainCommand) -> list[str]:
    """Return lines on parts of a training that its plan ignores."""
    extras = training_extras(config)
    notes = []
    if extras.optimizer != DEFAULT_OPTIMIZER and extras.optimizer not in OPTIMIZERS:
        planned = config.workload.optimizer
        notes.append(f"the plan has the memory of {planned}, not that of optimizer.type {extras.optimizer}")
    if extras.adapter_key is not None:
        notes.append("the plan is that of training all parameters; an adapter needs less memory and time")
    if extras.quantization:
        notes.append("the plan knows nothing of trainer.quantization")
    return notes


def _other_model(part: str, process: int, value: str | None, expected: str | None) -> ConfigError:
    return ConfigError(f"process {process} and process 0 differ in the {part}; give all processes the same config.json")
