"""Watches a run: keeps its records, and compares memory, arrays and speed with the plan."""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from shardplan.config.command_flags import WatchConfig
from shardplan.hardware import parse_slice
from shardplan.monitoring.audit import audit, format_audit
from shardplan.monitoring.environment_record import describe_process, describe_run
from shardplan.monitoring.gate import WARM_UP_STEPS, describe_slowness, least_ratio
from shardplan.monitoring.goodput import ATTEMPTS, Attempt, describe_goodput, now_text
from shardplan.monitoring.heartbeat import write_heartbeats
from shardplan.monitoring.memory import (
    STARTED,
    STEPPED,
    MemoryUse,
    describe_memory,
    largest,
    measure_memory,
    warn_of_excess,
)
from shardplan.monitoring.profile import StepProfile
from shardplan.monitoring.records import AUDIT, ENVIRONMENT, GOODPUT, MEMORY, STACKS, RunRecords
from shardplan.monitoring.step_statistics import LoopStatistics
from shardplan.plan.plan import Plan
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.processes.group import ProcessGroup
from shardplan.runtime.processes.watch.stacks import process_stacks

logger = logging.getLogger(__name__)

TOO_SLOW = 2
"""Answer of a process in `goes_on` if it finds the run too slow; 1 means that it was asked to stop, 0 neither."""
GOODPUT_S = 60.0
"""Seconds between two updates of goodput.json."""


class RunMonitor:
    """Keeps the records of one run, and compares its memory, arrays and speed with the plan."""

    def __init__(
        self, config: WatchConfig, plan: Plan, processes: ProcessGroup, records: RunRecords, figures: dict[str, float]
    ):
        """Start to record an attempt of the run; every process makes a monitor.

        Args:
            figures: mapping into which `record_figures` writes the statistics of the last step.
        """
        self._figures = figures
        self._plan, self._processes, self._records = plan, processes, records
        self._least_ratio = least_ratio(config.gate, parse_slice(plan.hardware.slice).is_cpu)
        self._stops, self._started = config.gate.stop, now_text()
        is_profiled = config.profile_all or is_first_process()
        self._profile = StepProfile(config.profile if is_profiled else None)
        self._earlier: list[dict[str, Any]] = []
        if is_first_process():
            self._earlier = json.loads(records.read(GOODPUT) or "{}").get(ATTEMPTS, [])
        self._stages: dict[str, MemoryUse] = {}
        self._written = time.monotonic()
        self._slowness: str | None = None
        """Why the run is too slow and must stop: process 0 judges this, the other processes receive it in `goes_on`."""
        self.is_stopped = False
        """Whether all processes have stopped the run before its end."""
        self.too_slow: str | None = None
        """Why the run was stopped, if it was too slow."""

    def start(self) -> None:
        """Record the software and hardware of all processes."""
        described = self._processes.exchange("environment", {0: describe_process()})
        if is_first_process():
            self._records.write(ENVIRONMENT, describe_run(self._plan, described))
        self.record_memory(STARTED)

    def audit(self, module: Any, plan: Plan | None = None, more: str = "") -> None:
        """Check that the arrays of a model agree with the plan, and record it.

        Args:
            plan: plan to compare with; default: the plan of the run.
            more: further lines for the record, about other things that agree with the plan.

        Raises:
            ConfigError: an array does not agree with the plan.
        """
        audited = audit(module, plan or self._plan)
        if is_first_process():
            self._records.write(AUDIT, format_audit(audited.arrays) + more)

    def record_figures(self, figures: Mapping[str, float]) -> None:
        """Show statistics of the last step in heartbeats."""
        self._figures.update(figures)

    def record_memory(self, stage: str, measured: MemoryUse | None = None) -> None:
        """Record the memory in use after a stage of the run; every process calls this.

        Args:
            measured: memory of this process at the end of the stage; default: measure now.
        """
        uses = self._processes.exchange(f"memory {stage}", {0: vars(measured or measure_memory())})
        if is_first_process():
            use = self._stages[stage] = largest(MemoryUse(**each) for each in uses.values())
            warn_of_excess(self._plan, stage, use)
            self._records.write(MEMORY, describe_memory(self._plan, self._stages))

    def record_step(self, statistics: LoopStatistics) -> None:
        """Record a finished step, and judge the speed after the warm-up; every process calls this."""
        self._profile.on_step(statistics.timed_steps)
        if statistics.timed_steps == 0:
            self.record_memory(STEPPED)
        if not is_first_process():
            return
        if statistics.timed_steps == WARM_UP_STEPS and self._least_ratio is not None:
            self._judge(statistics, self._least_ratio)
        if time.monotonic() - self._written > GOODPUT_S:
            self.record_time(statistics, is_completed=False)

    def goes_on(self, part: str, is_stopped: bool) -> bool:
        """Return whether the run continues; all processes call this, and all get the same answer.

        Args:
            part: name of the part of the run, such as `shard 3`.
            is_stopped: whether this process has been asked to stop.
        """
        answer = self._processes.maximum(f"before {part}", TOO_SLOW if self._slowness is not None else int(is_stopped))
        if answer == TOO_SLOW:
            self.too_slow = self._processes.broadcast("too slow", lambda: self._slowness)
        self.is_stopped = answer != 0
        return not self.is_stopped

    def record_time(self, statistics: LoopStatistics, is_completed: bool) -> None:
        """Record how the run spent its time."""
        self._written = time.monotonic()
        self._records.write(GOODPUT, describe_goodput(self._earlier, self._attempt(statistics, is_completed)))

    def stop_profile(self) -> None:
        """End a trace that has fewer steps than intended."""
        self._profile.stop()

    def _judge(self, statistics: LoopStatistics, least: float) -> None:
        assert statistics.step_seconds is not None
        problem = describe_slowness(statistics.step_seconds, self._plan, least, self._attempt(statistics, False))
        if problem is None:
            return
        logger.warning("%s", problem)
        if self._stops:
            self._slowness = problem

    def _attempt(self, statistics: LoopStatistics, is_completed: bool) -> Attempt:
        return Attempt(
            self._started, self._processes.watch.seconds(), statistics.seconds, statistics.waiting_seconds,
            statistics.blocked_seconds, statistics.stalled_seconds, statistics.windows, is_completed,
        )  # fmt: skip


@contextlib.contextmanager
def open_monitor(config: WatchConfig, output: str, plan: Plan, processes: ProcessGroup) -> Iterator[RunMonitor]:
    """Watch a run until the context ends; every process enters it.

    Args:
        output: the results folder.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        records = RunRecords(output, jax.process_index())
        stack.callback(records.close)
        if records.is_local:  # a process that is stuck cannot upload them
            stack.enter_context(process_stacks().in_file(records.own_file(STACKS)))
        figures: dict[str, float] = {}
        stack.enter_context(write_heartbeats(processes.watch, records, figures))
        monitor = RunMonitor(config, plan, processes, records, figures)
        stack.callback(monitor.stop_profile)
        monitor.start()
        yield monitor
