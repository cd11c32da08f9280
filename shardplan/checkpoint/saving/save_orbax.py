"""Writes a sharded model as an Orbax checkpoint, in the layout of MaxText's parameters.

Orbax has every process write the shards of its own devices; nothing is gathered. A host holds one copy of its shards,
from which tensorstore writes. They are not compressed: tensorstore would hold all of them in compressed form as well.

Orbax writes to a folder with a temporary name, which process 0 renames when all shards are there (on gs://, it writes a
mark of completeness instead): an interrupted run leaves no checkpoint that Orbax restores.
"""

import json
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.utils import TMP_DIR_SUFFIX

from shardplan.checkpoint.saving.orbax_tree import check_tree_written, make_tree
from shardplan.checkpoint.saving.save import saving_limit_s
from shardplan.checkpoint.saving.target import CONFIG, ORBAX_STEP, PLAN, claim_target, complete_target, write_file
from shardplan.checkpoint.saving.written_config import count_bytes_by_dtype, describe_written
from shardplan.config.command_flags import Format
from shardplan.errors import ConfigError, check_argument, one_line
from shardplan.plan.arguments import check_plan
from shardplan.plan.plan import Plan
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.processes.group import open_process_group

ITEM = "items"
"""Item of the step that holds the parameters, named as in MaxText."""


def save_orbax(model: Any, ref: str, config: Mapping[str, Any], plan: Plan | None = None) -> None:
    """Write `model` as step 0 of an Orbax checkpoint, which Orbax restores on any number of devices.

    `<ref>/0/items` has the model's arrays with their shapes and types, in nested dictionaries by the Plan's names,
    under `params` / `params` as in MaxText. Names and shapes differ from MaxText's own models.

    Args:
        model: a Levanter model, sharded in any way; every process calls this.
        ref: folder, local or gs://; the same folder for all processes.
        config: content of the config.json that is written beside the step.
        plan: the Plan that is written beside it as plan.json; default: none.

    Raises:
        ConfigError: the folder holds a checkpoint or a Plan already, or cannot be written to.
        CheckpointError: an array was not written as it should be.
    """
    check_argument("save_orbax", "model", model, eqx.Module, "a Levanter model with its arrays")
    check_argument("save_orbax", "config", config, Mapping, "the content of config.json, a mapping")
    if plan is not None:
        check_plan("save_orbax", plan)
    tree = make_tree(model)
    described = describe_written(config, model, count_bytes_by_dtype(model))
    small_files = {CONFIG: json.dumps(described, indent=2)}
    if plan is not None:
        small_files[PLAN] = json.dumps(plan.to_json(), indent=1)
    with open_process_group() as processes:
        names = (f"{ORBAX_STEP}/", f"{ORBAX_STEP}{TMP_DIR_SUFFIX}/", *small_files)
        claim = claim_target(ref, names, processes, Format.ORBAX)
        target = claim.folder
        if is_first_process():  # before the step, which is complete for Orbax as soon as it is seen
            for name, text in small_files.items():
                write_file(target, name, text.encode())
        with processes.phase("saving", saving_limit_s(tree)):
            try:
                _write_step(f"{target.ref}/{ORBAX_STEP}", tree)
            except (OSError, ValueError, ImportError) as error:
                raise ConfigError(f"{target.ref} cannot be written to: {one_line(error)}") from error
            processes.wait_for_all("saved")

        def check() -> None:
            if is_first_process():
                check_tree_written(f"{target.ref}/{ORBAX_STEP}/{ITEM}", tree)

        processes.agree("result", check, lambda _: {})
        complete_target(claim, processes)


def _write_step(folder: str, tree: Any) -> None:
    """Write the shards of this process, and wait until all processes have written theirs."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
    jax.block_until_ready(tree)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**{ITEM: handler})) as checkpointer:
        checkpointer.save(folder, args=ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(tree)}))
