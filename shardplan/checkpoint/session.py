"""What a run with weights begins with: devices, a checkpoint, its model, and a plan for it."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from shardplan.checkpoint.load import stream_checkpoint
from shardplan.checkpoint.mapping.program import StateDictProgram
from shardplan.config import Config
from shardplan.errors import ConfigError
from shardplan.hardware import GIB, parse_slice
from shardplan.model import Model, build_model, read_config
from shardplan.plan.plan import Plan
from shardplan.runtime.devices import make_mesh, start_devices
from shardplan.search.make_plan import check_model, make_plan
from shardplan.storage import Folder, open_folder


@dataclass(frozen=True)
class Session:
    """A checkpoint, and how it is to rest on the devices of this run."""

    config: Config
    folder: Folder
    model: Model
    plan: Plan
    mesh: Mesh

    def load(self, template: Any) -> tuple[Any, StateDictProgram]:
        """The Levanter module `template` (of `model`, or specialized) with its weights, sharded and cast as planned.

        And how it was made of tensors.
        """
        config, dtype = self.config, self.plan.workload.param_dtype
        mapping, budget = self.plan.param_mapping, int(config.load.gib * GIB)
        return stream_checkpoint(template, self.folder, self.mesh, mapping, dtype, budget, config.checksum)


def prepare(config: Config, given: Plan | None) -> Session:
    """Start JAX on the configured slice, and plan; `given` is used instead of a new plan.

    Raises:
        ConfigError: JAX has other devices, or the checkpoint is not named or does not exist.
        InfeasibleError: no plan fits.
    """
    if not config.model.ref:
        raise ConfigError("model.ref is not set; name a checkpoint, for this needs its weights")
    hardware = parse_slice(config.hardware.slice)
    start_devices(hardware.name, hardware.devices, hardware.is_cpu)
    folder = open_folder(config.model.ref)
    model = build_model(read_config(config.model.config, folder), config.workload.position)
    plan = given or make_plan(config, model)
    check_model(plan, model)
    return Session(config, folder, model, plan, make_mesh(hardware, plan.mesh))
