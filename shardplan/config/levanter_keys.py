"""Levanter's own sections and keys in a configuration of `shardplan train`, which are passed through to Levanter.

They have Levanter's names, those of `levanter.main.train_lm`, and stand beside shardplan's sections in the same file.
Levanter's parser checks what is in them; here it is only decided which keys are Levanter's, and which of them a plan
decides, so that a file must not set them. Imports no JAX.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import yaml

from shardplan.config.sections import DataConfig
from shardplan.errors import ConfigError, closest
from shardplan.plan.serialization import flatten

DATA = "data"
"""Section with two meanings: Levanter's keys in training, the texts in an evaluation."""
SECTIONS = ("trainer", "optimizer", DATA, "adapter", "eval_harness", "labeled_eval")
"""Names of Levanter's sections."""
VALUES = (
    "data_seed", "eval_harness_steps", "hf_generation_eos_token_ids", "hf_save_dtype", "hf_save_path", "hf_save_steps",
    "hf_upload", "initialize_from_checkpoint_path", "initialize_from_hf", "initialize_model_from_checkpoint_path",
    "log_entropy", "merged_hf_save_path", "merged_hf_upload", "pad_tokenizer_to_match_model", "peft_hf_upload",
    "peft_save_path", "z_loss_weight",
)  # fmt: skip
"""Names of Levanter's keys outside of sections."""
GOES_ON = "a run goes on in its output folder; start from another one with trainer.initialize_from"
DECIDED = {
    "train_seq_len": "set workload.position",
    "use_hf_model_config": "name the model with model.ref or model.config",
    "trainer.mesh": "the plan decides the mesh and its mappings; set sizes with mesh, or pin",
    "trainer.train_batch_size": "set workload.batch",
    "trainer.per_device_parallelism": "set workload.microbatches",
    "trainer.mp": "set workload.param_dtype and workload.compute_dtype",
    "trainer.use_explicit_mesh_axes": "plans are for meshes without explicit axes",
    "trainer.distributed": "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID",
    "trainer.load_checkpoint": GOES_ON,
    "trainer.load_checkpoint_path": GOES_ON,
    "trainer.allow_partial_checkpoint": "a run goes on from whole checkpoints",
    "trainer.checkpointer.append_run_id_to_base_path": "every output folder holds one run",
    "trainer.wandb": "set trainer.tracker",
    "trainer.progress_watchdog": "set deadline",
    "trainer.profiler": "set profile",
}
"""Levanter's key -> why a file must not set it, or what to set instead."""
TEXT_KEYS = tuple(f"{DATA}.{item.name}" for item in fields(DataConfig))
"""Evaluation keys of `data`; a file shared with an evaluation may have them, and training ignores them."""
Dotted = dict[str, Any]
"""Dotted name of a key -> its value."""


def split_sections(loaded: Mapping[str, Any], is_training: bool) -> tuple[dict[str, Any], Dotted]:
    """Split the content of a YAML file into shardplan's keys and Levanter's keys.

    Args:
        is_training: whether the command trains, so that a section `data` is Levanter's.
    """
    workload = loaded.get("workload")
    kind = workload.get("kind") if isinstance(workload, Mapping) else None
    own = [name for name in loaded if name in (*SECTIONS, *VALUES, *DECIDED) and name != DATA]
    if DATA in loaded and (is_training or kind == "train" or own):
        own.append(DATA)
    others = {name: value for name, value in loaded.items() if name not in own}
    return others, flatten({name: loaded[name] for name in own if loaded[name] is not None})


def split_arguments(arguments: Sequence[str]) -> tuple[Dotted, list[str]]:
    """Split command-line arguments into the values of Levanter's keys and the other arguments.

    >>> split_arguments(["--trainer.num_train_steps", "50", "--data_seed=3", "--other", "1"])
    ({'trainer.num_train_steps': 50, 'data_seed': 3}, ['--other', '1'])
    """
    values: Dotted = {}
    others: list[str] = []
    waiting = list(arguments)
    while waiting:
        token = waiting.pop(0)
        name, separator, text = token.removeprefix("--").partition("=")
        if not token.startswith("--") or not is_levanters(name):
            others.append(token)
            continue
        if not separator:
            if not waiting or waiting[0].startswith("--"):
                raise ConfigError(f"command line: {name} has no value; write --{name} VALUE")
            text = waiting.pop(0)
        values[name] = _parse(text)
    return values, others


def is_levanters(name: str) -> bool:
    """Return whether the dotted name of a key is one of Levanter's."""
    section, dot, _ = name.partition(".")
    if name in TEXT_KEYS:
        return False
    return section in SECTIONS if dot else name in (*VALUES, *DECIDED)


def closest_value(name: str) -> str | None:
    """Return the top-level key of Levanter that a misspelt name probably means; None if none is similar."""
    return closest(name, (*SECTIONS, *VALUES), cutoff=0.8)


def check_undecided(values: Collection[str], where: str) -> None:
    """Check that the file sets none of Levanter's keys that the plan or the output folder decides.

    Raises:
        ConfigError: such a key is set.
    """
    for name in values:
        for decided, remedy in DECIDED.items():
            if name == decided or name.startswith(f"{decided}."):
                raise ConfigError(f"{where}: {name} is not for a file of train: {remedy}")


def _parse(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
