"""The configuration and environment of a host, which all checks share."""

import contextlib
from dataclasses import dataclass

from shardplan.config.command_flags import DoctorCommand
from shardplan.config.given_plan import load_given_plan
from shardplan.errors import ConfigError
from shardplan.hardware import Slice, parse_slice
from shardplan.plan.plan import Plan
from shardplan.runtime.environment import ProcessVariables, read_process_variables


@dataclass(frozen=True)
class HostSubject:
    """A configuration and the environment of this process, and the facts that follow from them."""

    config: DoctorCommand
    """The configuration, with the model, slice and workload of the Plan that it names."""
    plan: Plan | None
    """The Plan; None if none is named or it cannot be used, which the check of the plan reports."""
    hardware: Slice | None
    """The slice that this host should be part of; None without a model and without a slice."""
    processes: ProcessVariables | None
    """The processes of the run; None if the variables contradict each other, as the environment's check reports."""

    @property
    def tpu_slice(self) -> Slice | None:
        """The slice; None if its devices are virtual CPU devices."""
        return None if self.hardware is None or self.hardware.is_cpu else self.hardware


def read_subject(config: DoctorCommand) -> HostSubject:
    """Read the Plan and the environment variables."""
    plan, processes = None, None
    with contextlib.suppress(ConfigError):
        config, plan = load_given_plan(config)
    with contextlib.suppress(ConfigError):
        processes = read_process_variables()
    is_for_slice = config.model.ref or config.model.config or "hardware.slice" in config.given
    return HostSubject(config, plan, parse_slice(config.hardware.slice) if is_for_slice else None, processes)
