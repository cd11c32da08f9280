"""Prepares a run with weights: devices, a checkpoint, its model, and a plan for it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from shardplan.checkpoint.load import stream_checkpoint
from shardplan.checkpoint.mapping.state_dict_program import StateDictProgram
from shardplan.checkpoint.match import is_tied
from shardplan.checkpoint.output_head import UNTIED, check_head, has_own_head
from shardplan.config.plan_config import LoadingConfig
from shardplan.errors import ConfigError
from shardplan.execution.device_mesh import make_mesh
from shardplan.hardware import GIB, parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.runtime.devices import start_devices
from shardplan.runtime.generation import check_generation
from shardplan.runtime.processes.group import ProcessGroup, open_process_group, short_text
from shardplan.runtime.processes.watch.activity import DEADLINE_S
from shardplan.search.given_plan import check_model
from shardplan.search.make_plan import build_configured, make_plan
from shardplan.storage import Folder, open_adapter, open_folder


@dataclass(frozen=True)
class Session:
    """A checkpoint, and its plan for the devices of this run."""

    config: LoadingConfig
    folder: Folder
    adapter: Folder | None
    """Folder of the adapter that changes the weights; None without one."""
    model: Model
    plan: Plan
    mesh: Mesh

    def load(
        self, template: Any, deadline_s: float = DEADLINE_S, is_copy: bool = False
    ) -> tuple[Any, StateDictProgram]:
        """Load the weights of a Levanter module, sharded and cast as planned.

        Args:
            template: `model.template`, or the template of `specialize(model, plan)`, with shapes in place of arrays.
            deadline_s: most seconds without progress.
            is_copy: whether the module is going to be written again; see `stream_checkpoint`.

        Returns:
            The module, and the program that maps the checkpoint's tensors to its arrays.

        Raises:
            CheckpointError: the checkpoint does not hold the model, or is damaged.
        """
        config, dtype = self.config, self.plan.workload.param_dtype
        mapping, budget = self.plan.param_mapping, int(config.load.gib * GIB)
        return stream_checkpoint(
            template, self.folder, self.mesh, mapping, dtype, budget, config.checksum, deadline_s, config.load.strict,
            is_copy, self.adapter,
        )  # fmt: skip


def prepare(config: LoadingConfig, plan: Plan | None, deadline_s: float = DEADLINE_S) -> Session:
    """Start JAX on the configured slice, open the checkpoint, and make a plan if `plan` is None.

    Args:
        deadline_s: most seconds for reading the model's configuration, and for a plan.

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
    check_generation(hardware)
    with open_process_group() as processes, processes.phase("planning", deadline_s):

        def open_model() -> tuple[Folder, Folder | None, dict[str, Any], Model]:
            folder, adapter = open_folder(config.model.ref), open_adapter(config.model.adapter)
            hf_config = read_config(config.model.config, folder, config.model_class, config.load.keep_dtype)
            return folder, adapter, hf_config, build_configured(config, hf_config)

        folder, adapter, hf_config, model = processes.agree("model", open_model, lambda _: {})
        if is_tied(model.template) and has_own_head(model.template, folder, processes, adapter):
            model = build_configured(config, {**hf_config, **UNTIED})

        def check(plan: Plan) -> None:
            check_model(plan, model)
            check_head(plan, model.template)

        plan = agree_on_plan(processes, plan, lambda: make_plan(config, model), check)
    return Session(config, folder, adapter, model, plan, make_mesh(plan))


PLAN_PARTS = ("mesh", "compute_mapping", "param_mapping", "workload", "attention", "experts", "compiler_options")
"""Elements of a Plan file that determine which programs run."""


def agree_on_plan(
    processes: ProcessGroup, given: Plan | None, make: Callable[[], Plan], check: Callable[[Plan], None]
) -> Plan:
    """Check that all processes have the same plan, because different plans would deadlock; return the plan.

    Process 0 makes the plan for all processes, because on CPU devices the host's memory decides which plan fits.

    Args:
        given: the plan that this process was started with.
        check: function that raises an error if a plan is not for the model.

    Raises:
        ConfigError: two processes were started with different plans, or the plan is for another model.
        InfeasibleError: no plan fits.
    """
    first = processes.broadcast("plan", lambda: (given or make()).to_json())

    def describe(plan: Plan) -> dict[str, str]:
        values = plan.to_json()
        return {name: short_text(json.dumps(values.get(name), sort_keys=True)) for name in PLAN_PARTS}

    def take() -> Plan:
        plan = given or Plan.from_json(first)
        check(plan)
        return plan

    return processes.agree("own plan", take, describe, _other_plan)


def _other_plan(part: str, process: int, value: str | None, expected: str | None) -> ConfigError:
    return ConfigError(
        f"{part} of the plan is {value} in process {process} and {expected} in process 0; give all processes the same "
        "--plan, or none"
    )
