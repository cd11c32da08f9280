"""What a run with weights starts from: devices, a checkpoint, its model, and a plan for it."""

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

    def load(self, template: Any) -> tuple[Any, StateDictProgram]:
        """Load the weights of a Levanter module, sharded and cast as planned.

        Args:
            template: `model.template`, or that of `specialize(model, plan)`, with shapes in place of arrays.

        Returns:
            The module, and the program that maps the checkpoint's tensors to its arrays.

        Raises:
            CheckpointError: the checkpoint does not hold the model, or is damaged.
        """
        config, dtype = self.config, self.plan.workload.param_dtype
        mapping, budget = self.plan.param_mapping, int(config.load.gib * GIB)
        return stream_checkpoint(template, self.folder, self.mesh, mapping, dtype, budget, config.checksum)


def prepare(config: LoadingConfig, plan: Plan | None) -> Session:
    """Start JAX on the configured slice, open the checkpoint, and make a plan if `plan` is None.

    Raises:
        ConfigError: JAX has other devices, or the checkpoint is not named or does not exist.
        InfeasibleError: no plan fits.
    """
    if not config.model.ref:
        raise ConfigError("model.ref is not set; name a checkpoint, because this command loads its weights")
    hardware = parse_slice(config.hardware.slice)
    start_devices(hardware.name, hardware.devices, hardware.is_cpu)
    folder = open_folder(config.model.ref)
    model = build_model(read_config(config.model.config, folder, config.model.levanter_class), config.workload.position)
    plan = plan or make_plan(config, model)
    check_model(plan, model)
    return Session(config, folder, model, plan, make_mesh(hardware, plan.mesh))
