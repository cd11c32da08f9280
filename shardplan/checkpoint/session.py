"""What a run with weights starts from: devices, a checkpoint, its model, and a plan for it."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from shardplan.checkpoint.load import stream_checkpoint
from shardplan.checkpoint.mapping.state_dict_program import StateDictProgram
from shardplan.config.command_flags import LoadingConfig
from shardplan.errors import ConfigError
from shardplan.hardware import GIB, parse_slice
from shardplan.model.hf_config import read_config
from shardplan.model.registry import Model, build_model
from shardplan.plan.plan import Plan
from shardplan.runtime.devices import make_mesh, start_devices
from shardplan.runtime.processes.activity import DEADLINE_S
from shardplan.runtime.processes.group import open_process_group
from shardplan.search.given_plan import check_model
from shardplan.search.make_plan import make_plan
from shardplan.storage import Folder, open_folder


@dataclass(frozen=True)
class Session:
    """A checkpoint, and the plan for it on the devices of this run."""

    config: LoadingConfig
    folder: Folder
    model: Model
    plan: Plan
    mesh: Mesh

    def load(self, template: Any, deadline_s: float = DEADLINE_S) -> tuple[Any, StateDictProgram]:
        """Load the weights of a Levanter module, sharded and cast as planned.

        Args:
            template: `model.template`, or that of `specialize(model, plan)`, with shapes in place of arrays.
            deadline_s: most seconds without progress.

        Returns:
            The module, and the program that maps the checkpoint's tensors to its arrays.

        Raises:
            CheckpointError: the checkpoint does not hold the model, or is damaged.
        """
        config, dtype = self.config, self.plan.workload.param_dtype
        mapping, budget = self.plan.param_mapping, int(config.load.gib * GIB)
        return stream_checkpoint(template, self.folder, self.mesh, mapping, dtype, budget, config.checksum, deadline_s)


def prepare(config: LoadingConfig, plan: Plan | None) -> Session:
    """Start JAX on the configured slice, open the checkpoint, and make a plan if `plan` is None.

    Raises:
        ConfigError: JAX has other devices, the checkpoint is not named or does not exist, or processes have different
            configurations or plans.
        InfeasibleError: no plan fits.
        PeerError: another process of the run is missing, was lost, or failed.
    """
    if not config.model.ref:
        raise ConfigError("model.ref is not set; name a checkpoint, because this command loads its weights")
    hardware = parse_slice(config.hardware.slice)
    start_devices(hardware.name, hardware.devices, hardware.is_cpu, config.facts)
    folder = open_folder(config.model.ref)
    model = build_model(read_config(config.model.config, folder, config.model.levanter_class), config.workload.position)
    plan = plan or make_plan(config, model)
    check_model(plan, model)
    _agree_on_plan(plan)
    return Session(config, folder, model, plan, make_mesh(hardware, plan.mesh))


PLAN_PARTS = ("mesh", "compute_mapping", "param_mapping", "workload", "compiler_options")
"""Elements of a Plan file that decide which programs run."""
SHOWN = 200
"""Characters of an element that are compared, and shown where they differ; of longer ones a digest is."""


def _agree_on_plan(plan: Plan) -> None:
    """Check that all processes have one plan: with another one, a process would wait for ever in a collective.

    Raises:
        ConfigError: two have different ones.
    """
    values = plan.to_json()
    parts = {name: json.dumps(values[name], sort_keys=True) for name in PLAN_PARTS}
    short = {
        name: text if len(text) < SHOWN else hashlib.sha256(text.encode()).hexdigest() for name, text in parts.items()
    }
    with open_process_group() as processes:
        processes.agree("plan", lambda: None, lambda _: short, _other_plan)


def _other_plan(part: str, process: int, value: str | None, expected: str | None) -> ConfigError:
    return ConfigError(
        f"{part} of the plan is {value} in process {process} and {expected} in process 0; give all processes the same "
        "--plan, or none"
    )
