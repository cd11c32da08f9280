"""Watches a running training: its phases, the times of its steps, and whether it continues."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from levanter.callbacks import Callback, ProgressEvent, StepInfo

from shardplan.config.sections import DeadlineConfig
from shardplan.monitoring.audit import check_like_parameters
from shardplan.monitoring.memory import COMPILED, LOADED, MemoryUse, measure_memory
from shardplan.monitoring.run_monitor import RunMonitor
from shardplan.monitoring.step_statistics import Count, LoopStatistics, StepTimer, step_deadline
from shardplan.plan.plan import Plan
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.processes.group import Advance, ProcessGroup
from shardplan.runtime.progress import Progress, print_note, show_progress
from shardplan.runtime.signals.preemption import is_preempted
from shardplan.train.adapted import with_frozen_parameters, without_adapter
from shardplan.train.selection import describe_methods, model_figures, selected_methods

STEP_FUNCTION = "train_step"
"""Part of the name of the function that JAX compiles for a step."""
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Name of JAX's event for a compiled program."""


class TrainingWatch:
    """Watches one training: its phases, the times of its steps, and whether it continues."""

    def __init__(
        self,
        plan: Plan,
        deadlines: DeadlineConfig,
        processes: ProcessGroup,
        monitor: RunMonitor,
        total: int,
        stops: threading.Event,
    ):
        """Start to watch a training.

        Args:
            total: steps of the whole training.
            stops: once this is set in any process, the training stops after the step under way.
        """
        self._plan, self._deadlines, self._processes = plan, deadlines, processes
        self._monitor, self._stops = monitor, stops
        self._total, self._progress = total, Progress("training", "steps")
        self.statistics = LoopStatistics()
        self._timer = StepTimer(self.statistics)
        self._advance: Advance | None = None
        self._has_compiled = False
        self._other_seconds = 0.0
        """Seconds of work other than steps: compiling, evaluating and saving."""
        self.is_stopped = False
        """Whether all processes have stopped the training before its end."""
        self.last_loss: float | None = None
        self.last_step = 0
        """Number of steps of the whole training that are done."""
        self.metrics: Mapping[str, jax.Array] = {}
        """Metrics that the loss function of the last step returned beside the loss, still on the devices."""
        self.selected_methods: dict[str, list[int]] = {}
        """How layers with Native Sparse Attention attend to selected blocks: method -> indices of layers."""

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Watch how the state is initialised, loaded or resumed, within the context."""
        with self._processes.phase("loading", self._deadlines.loading):
            yield

    def check_state(self, state: Any) -> None:
        """Check that the parameters and the optimizer's state agree with the plan, and record this and their memory.

        Raises:
            ConfigError: an array does not agree with the plan.
        """
        plan, model = self._plan, without_adapter(state.model)
        if model is not state.model:
            plan = with_frozen_parameters(plan)
        self.selected_methods = selected_methods(model, plan)
        methods_text = describe_methods(self.selected_methods, model.config.num_layers) if self.selected_methods else ""
        self._monitor.audit(model, plan, methods_text)
        check_like_parameters(state.opt_state, type(state.model), plan)
        self._monitor.record_memory(LOADED)

    @contextlib.contextmanager
    def training(self, first_step: int) -> Iterator[None]:
        """Watch the computation of steps, within the context."""
        self._progress = Progress("training", "steps", self._total - first_step)
        if first_step and is_first_process():
            print_note(f"going on after step {first_step}")
        deadline_s = self._deadlines.step or step_deadline(self._plan.cost.step_seconds)
        with (
            show_progress(self._progress, is_first_process()),
            self._processes.phase("training", deadline_s) as self._advance,
        ):
            yield
        self._advance = None

    @contextlib.contextmanager
    def other_work(self, phase: str) -> Iterator[None]:
        """Exclude compiling, evaluating, saving or exporting, within the context, from the time of steps."""
        started = time.perf_counter()
        try:
            with self._processes.phase(phase, self._deadlines.compiling):
                yield
        finally:
            self._other_seconds += time.perf_counter() - started

    def step_clock(self) -> float:
        """Return the seconds of a clock that stops during other work."""
        return time.perf_counter() - self._other_seconds

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Watch the first run of a step's program; the phase ends when JAX has compiled it."""
        measured: list[MemoryUse] = []
        with contextlib.ExitStack() as phase:
            phase.enter_context(self.other_work("compiling"))

            def on_duration(event: str, seconds: float, **values: Any) -> None:
                if event == COMPILE_EVENT and STEP_FUNCTION in str(values.get("fun_name")) and not measured:
                    measured.append(measure_memory())
                    phase.close()

            jax.monitoring.register_event_duration_secs_listener(on_duration)
            try:
                yield
            finally:
                jax.monitoring.unregister_event_duration_listener(on_duration)
        if not self._has_compiled:  # a step with statistics is another program
            self._has_compiled = True
            self._monitor.record_memory(COMPILED, measured[0] if measured else None)

    def finish_step(self, info: StepInfo[Any]) -> None:
        """Record a step, and decide whether the training continues, the same in all processes."""
        work = self._plan.workload
        self._timer.add(Count(work.batch, work.tokens), self.step_clock())
        self.last_loss, self.last_step = info.loss, info.next_step
        self._progress.update(1)
        self._progress.set_note(f"step {info.next_step} of {self._total}, loss {info.loss:.4f}")
        if self._advance is not None:
            self._advance(info.next_step, f"step {info.next_step}")
        self._monitor.record_figures(model_figures(self.metrics))
        self._monitor.record_step(self.statistics)
        self.is_stopped = not self._monitor.goes_on(f"step {info.next_step}", is_preempted() or self._stops.is_set())


class EventTimes(Callback[Any]):
    """Measures, from Levanter's events, how long devices compute and wait; watches evaluations."""

    def __init__(self, watch: TrainingWatch):
        """Add the measured times to the statistics of `watch`."""
        self._watch = watch
        self._began: float | None = None
        self._ended: float | None = None
        self._evaluation = contextlib.ExitStack()

    def on_step(self, info: StepInfo[Any], force: bool = False) -> None:
        """Do nothing; all times are measured at events instead."""

    def end_step(self) -> None:
        """Record that all hooks of a step have run, so that the wait for the next batch begins."""
        self._ended = self._watch.step_clock()

    def on_event(self, event: ProgressEvent) -> None:
        """Handle an event of Levanter's Trainer."""
        now, statistics = self._watch.step_clock(), self._watch.statistics
        match event:
            case ProgressEvent.TRAIN_STEP_STARTED:
                self._began = now
                statistics.steps += 1
                if self._ended is not None:
                    statistics.waiting_seconds += now - self._ended
            # the first step compiles
            case ProgressEvent.TRAIN_STEP_FINISHED if self._began is not None and statistics.steps > 1:
                statistics.blocked_seconds += now - self._began
            case ProgressEvent.EVALUATION_STARTED:
                self._evaluation.enter_context(self._watch.other_work("evaluating"))
            case ProgressEvent.EVALUATION_FINISHED:
                self._evaluation.close()
