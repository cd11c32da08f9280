"""The Levanter configuration of a training: settings of the plan, settings of the user, and defaults.

`python scripts/levanter_main.py train_lm --config_path levanter.yaml` runs the same training without being watched.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import draccus
from draccus.utils import deflatten
from levanter.models.lm_model import LmConfig

import shardplan.decoder.section  # noqa: F401  # registers its type of `model` sections
from shardplan.config.command_flags import TrainCommand
from shardplan.config.sections import TrackerKind
from shardplan.errors import ConfigError, closest
from shardplan.hardware import parse_slice
from shardplan.levanter_config.programs import LevanterProgram
from shardplan.levanter_config.writer import trainer_section
from shardplan.lint.parser.problem import Problem, ProblemKind
from shardplan.lint.parser.worker import find_problems
from shardplan.model.registry import Model
from shardplan.plan.attention_plan import SparseKernel
from shardplan.plan.plan import Plan
from shardplan.plan.workload.checkpointing import CheckpointPolicy
from shardplan.synthetic_data import COMPONENT_TYPE

METRICS_LOGGER = "shardplan.training_metrics"
"""Logger of the metrics that go to metrics.jsonl."""
REMEDY_OF_VALUES = "correct it, or leave it out for Levanter's default"
POLICY = "gradient_checkpointing"
FLASH = "jax_flash"
"""Levanter's attention backend that is right under any sharding."""
DOCUMENTS = "block_cross_document_attention"
"""Levanter's key of data whose packed texts do not attend to each other."""


@dataclass(frozen=True)
class TrainingFiles:
    """Paths of the inputs and outputs of a training."""

    output: str
    """Absolute path or URL of the output folder."""
    folder: str
    """The folder with config.json and tokenizer, see `shardplan.train.reference_folder`."""
    reference: str
    """The checkpoint, or `folder`, from which Levanter makes its converter."""
    run_id: str


def nested_sections(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values by dotted name to nested sections."""
    nested: dict[str, Any] = deflatten(dict(dotted), sep=".")
    return nested


def levanter_sections(config: TrainCommand, plan: Plan, model: Model, files: TrainingFiles) -> dict[str, Any]:
    """Return the content of levanter.yaml."""
    given = nested_sections(config.levanter)
    trainer = {**_trainer_defaults(config, plan, files), **trainer_section(plan)}
    return {
        "model": _model_section(config, plan, model, files),
        "data": _data_section(config, plan, model, files),
        "initialize_from_hf": initial_checkpoint(config) or False,
        **{name: value for name, value in given.items() if name not in ("trainer", "data", "initialize_from_hf")},
        "train_seq_len": plan.workload.position,
        "trainer": _merge(trainer, given.get("trainer", {})),
    }


def initial_checkpoint(config: TrainCommand) -> str | None:
    """Return the checkpoint whose weights are trained; None to start with random weights.

    Raises:
        ConfigError: the training needs weights, and no checkpoint is named.
    """
    asked = config.levanter.get("initialize_from_hf", bool(config.model.ref) and not _other_start(config))
    if isinstance(asked, str):
        return asked
    if asked and not config.model.ref:
        raise ConfigError("initialize_from_hf is true, and model.ref is not set; name a checkpoint")
    return config.model.ref if asked else None


def is_synthetic(config: TrainCommand) -> bool:
    """Return whether the configuration names no data to train on."""
    return not any(name.startswith("data.") for name in config.levanter)


def check_sections(sections: Mapping[str, Any], program: LevanterProgram, target: type) -> None:
    """Check that Levanter's parser accepts the sections.

    Raises:
        ConfigError: the parser refuses a key or value; the message names the first one, and the nearest valid one.
    """
    problem = next(iter(find_problems(sections, target)), None)
    if problem is not None:
        raise ConfigError(f"{'.'.join(problem.path) or program.name}: {_describe(problem)}")


def _describe(problem: Problem) -> str:
    name = problem.path[-1] if problem.path else ""
    match problem.kind:
        case ProblemKind.UNKNOWN_KEY:
            similar = closest(name, problem.valid)
            remedy = f"did you mean {similar!r}?" if similar else "leave it out"
            return f"Levanter has no such key; {remedy}"
        case ProblemKind.MISSING_KEY | ProblemKind.UNKNOWN_TYPE:
            return f"{problem.text}; valid: {', '.join(problem.valid)}" if problem.valid else problem.text
        case _:
            return f"{problem.text}; {REMEDY_OF_VALUES}"


def _other_start(config: TrainCommand) -> bool:
    """Return whether the weights come from a checkpoint of Levanter."""
    starts = ("initialize_from_checkpoint_path", "initialize_model_from_checkpoint_path", "trainer.initialize_from")
    return any(config.levanter.get(name) is not None for name in starts)


def _trainer_defaults(config: TrainCommand, plan: Plan, files: TrainingFiles) -> dict[str, Any]:
    """Return shardplan's own defaults of the trainer section."""
    return {
        "id": files.run_id,
        "tracker": _tracker(config, files),
        "checkpointer": {"base_path": f"{files.output}/checkpoints", "append_run_id_to_base_path": False},
        **({} if "://" in files.output else {"log_dir": f"{files.output}/logs"}),
        # for these Levanter's Trainer would trace the step once more, and lower it once more
        "log_jaxprs": False,
        "log_xla_hlo": False,
        "require_accelerator": not parse_slice(plan.hardware.slice).is_cpu,
    }


def _tracker(config: TrainCommand, files: TrainingFiles) -> dict[str, Any]:
    """Return the section of Levanter's tracker that `tracker` names; by default, of the JSON lines tracker."""
    tracker = config.tracker
    match tracker.kind:
        case TrackerKind.WANDB:
            return {"type": "wandb", "project": tracker.project, "name": tracker.name, "save_code": False}
        case TrackerKind.TENSORBOARD:
            return {"type": "tensorboard", "logdir": f"{files.output}/tensorboard"}
        case TrackerKind.JSON | None:
            return {"type": "json_logger", "logger_name": METRICS_LOGGER}


def _model_section(config: TrainCommand, plan: Plan, model: Model, files: TrainingFiles) -> dict[str, Any]:
    """Return Levanter's section for the model, with the settings that the plan decides.

    Raises:
        ConfigError: the model's class has no `type` in Levanter's files, or statistics of selected blocks are requested
            and the model selects none.
    """
    section = _plain(draccus.encode(model.config, LmConfig))
    if "type" not in section:
        raise ConfigError(
            f"model.levanter_class is {model.class_name}, which is no type of Levanter's model section; register it "
            "with LmConfig.register_subclass"
        )
    defaults = _plain(draccus.encode(type(model.config)(), LmConfig)) if not model.is_decoder else {}
    kept = {name: value for name, value in section.items() if name == "type" or defaults.get(name, ...) != value}
    if "reference_checkpoint" in section:
        kept["reference_checkpoint"] = files.reference
    if "tokenizer" in section and is_synthetic(config):
        kept["tokenizer"] = files.folder  # or Levanter would read that of the checkpoint
    if POLICY in section:
        policy = plan.workload.checkpoint_policy
        kept[POLICY] = True if policy == CheckpointPolicy() else policy.levanter_value
    if "selected_method" in section:
        kept["selected_method"] = plan.attention.sparse_kernel.value
    if config.selection_statistics:
        if "selected_method" not in section:
            raise ConfigError(
                f"selection_statistics is true, and {plan.model.name} has no native sparse attention; leave it out"
            )
        kept["selection_statistics"] = True
    if "attn_backend" in section and _needs_flash(plan):
        kept["attn_backend"] = FLASH
    return kept


def _needs_flash(plan: Plan) -> bool:
    """Return whether Levanter's default attention on TPUs would be wrong, because an axis of its kernel is sharded."""
    if parse_slice(plan.hardware.slice).is_cpu:
        return False
    axes = [mesh_axis for axis in plan.model.unsharded_in_kernels for mesh_axis in plan.compute_mapping.get(axis, ())]
    return any(plan.mesh[axis] > 1 for axis in axes)


def _data_section(config: TrainCommand, plan: Plan, model: Model, files: TrainingFiles) -> dict[str, Any]:
    """Return the data to train on: the user's, or synthetic data.

    Raises:
        ConfigError: texts are named without a tokenizer, or are packed as documents that the model cannot separate.
    """
    if not is_synthetic(config):
        data = dict(nested_sections(config.levanter)["data"])
        if isinstance(plan.attention.kernel, SparseKernel) and data.get(DOCUMENTS, True):
            raise ConfigError(
                f"data.{DOCUMENTS} is true, as by default, and native sparse attention does not keep the texts of a "
                "sequence apart; set it to false, which lets tokens attend to the texts before theirs"
            )
        if "tokenizer" not in data and not config.model.ref:
            raise ConfigError("data.tokenizer is not set; name a tokenizer, whose tokens the model has")
        data.setdefault("tokenizer", config.model.ref)
        return data
    vocab = model.vocab.size
    component = {
        "type": COMPONENT_TYPE,
        "vocab_size": vocab,
        "position": plan.workload.position,
        "validation_sequences": plan.workload.batch,
        "seed": config.levanter.get("data_seed", config.levanter.get("trainer.seed", 0)),
    }
    return {
        "tokenizer": files.folder,
        "shuffle": False,  # every sequence is drawn by itself
        "components": {"synthetic": component},
    }


def _merge(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge given values into the defaults of a section; a given subsection with a `type` replaces the default one."""
    merged = dict(defaults)
    for name, value in given.items():
        before = merged.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and "type" not in value:
            merged[name] = {**before, **value}
        else:
            merged[name] = value
    return merged


def _plain(value: Any) -> Any:
    """Convert a value to one that YAML can hold."""
    match value:
        case enum.Enum():
            return value.value
        case Mapping():
            return {str(name): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case _:
            return value
