"""Levanter's Trainer with a plan: its methods are watched, and its computations are unchanged.

`levanter.main.train_lm` makes its Trainer by the name `Trainer` of its module. `planned_trainer` puts a subclass in
place of this name while a training runs. The subclass extends methods that are public, but for three: the two cached
properties with the compiled step, which get the compiler options of the plan, and the checkpointer, which is made to
save when the process is to stop.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any
from unittest import mock

from haliax import Axis
from haliax.partitioning import named_jit
from levanter.callbacks import StepInfo
from levanter.checkpoint import CheckpointRetention
from levanter.main import train_lm
from levanter.trainer import Trainer

from shardplan.train.readable_checkpoints import no_checkpoint
from shardplan.train.watch import EventTimes, TrainingWatch


class PlannedTrainer(Trainer):
    """Levanter's Trainer, with every phase reported to a `TrainingWatch` and steps compiled with the plan's options."""

    def __init__(self, watch: TrainingWatch, compiler_options: Mapping[str, Any], *arguments: Any, **settings: Any):
        """Make the Trainer; `arguments` and `settings` go to Levanter's constructor.

        Args:
            compiler_options: compiler options of the plan.
        """
        self._watch, self._compiler_options = watch, dict(compiler_options)
        super().__init__(*arguments, **settings)
        self._times = EventTimes(watch)
        self.add_hook(self._times)
        assert self._checkpointer is not None
        save = self._checkpointer.save_checkpoint

        def watched_save(*arguments: Any, **settings: Any) -> None:
            with watch.other_work("saving a checkpoint"):
                save(*arguments, **settings)

        self._checkpointer.save_checkpoint = watched_save

    def initial_state(self, *arguments: Any, **settings: Any) -> Any:
        """Initialise or load the state as Levanter does, and check that it agrees with the plan."""
        with self._watch.loading():
            state = super().initial_state(*arguments, **settings)
            self._watch.check_state(state)
            return state

    def checkpoint_load_plan(self) -> tuple[list[str], bool]:
        """Return the folders that may hold a checkpoint to load, and whether a checkpoint must be loaded."""
        source = self.config.initialize_from
        try:
            return super().checkpoint_load_plan()
        except ValueError as error:
            if source is None:
                raise
            raise no_checkpoint(source) from error

    def training_steps(self, state: Any, train_loader: Iterable[Any]) -> Iterator[StepInfo[Any]]:
        """Yield steps until the last one, or until the training must stop."""
        with self._watch.training(int(state.step)):
            for info in super().training_steps(state, train_loader):
                yield info
                if self._watch.is_stopped:
                    return

    def run_hooks(self, info: StepInfo[Any], force: bool = False) -> None:
        """Run all hooks after a step; final hooks are skipped if the training is stopped early."""
        if not force:
            super().run_hooks(info)
            self._watch.finish_step(info)
            if self._watch.is_stopped:
                self._save_and_wait(info)
            self._times.end_step()
        elif not self._watch.is_stopped:
            with self._watch.other_work("finishing"):
                super().run_hooks(info, force=True)

    def _save_and_wait(self, info: StepInfo[Any]) -> None:
        """Save a temporary checkpoint of this step, unless there is one."""
        assert self._checkpointer is not None
        self._checkpointer.request_checkpoint(CheckpointRetention.TEMPORARY)
        self._checkpointer.on_step(tree=info.state.saveable_state, step=info.step)
        with self._watch.other_work("saving a checkpoint"):
            self._checkpointer.wait_until_finished()

    @cached_property
    def _jit_train_step_fn(self) -> Callable[..., Any]:
        return self._compiled_step(self._train_step)

    @cached_property
    def _jit_train_step_fn_no_hook(self) -> Callable[..., Any]:
        return self._compiled_step(functools.partial(self._train_step, _no_hooks=True))

    def _compiled_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # as Levanter's own properties compile it, but for the options
        mapping = self.parameter_axis_mapping
        options = {"compiler_options": self._compiler_options} if self._compiler_options else {}
        program = named_jit(
            function, axis_resources=mapping, out_axis_resources=mapping, donate_args=(True,), **options
        )
        return _WatchedProgram(program, self._watch)


class _WatchedProgram:
    """A program whose first run is watched as a separate phase, because it compiles the program."""

    def __init__(self, program: Any, watch: TrainingWatch):
        self._program, self._watch = program, watch
        self._is_compiled = False

    def __call__(self, *arguments: Any) -> Any:
        if self._is_compiled:
            result = self._program(*arguments)
        else:
            self._is_compiled = True
            with self._watch.compiling():
                result = self._program(*arguments)
        self._watch.metrics = result.loss_metrics
        return result

    def lower(self, *arguments: Any) -> Any:
        return self._program.lower(*arguments)


@contextlib.contextmanager
def planned_trainer(watch: TrainingWatch, compiler_options: Mapping[str, Any], vocab_size: int) -> Iterator[None]:
    """Make `levanter.main.train_lm` use `PlannedTrainer` within the context.

    The model has `vocab_size` tokens, as planned. Levanter would use the length of the tokenizer, which is smaller for
    some checkpoints, such as Qwen's; such a training could not be resumed.
    """

    def planned_axis(axis: Axis, *_: Any) -> Axis:
        return axis.resize(vocab_size) if axis.name == "vocab" else axis

    make = functools.partial(PlannedTrainer, watch, compiler_options)
    with (
        mock.patch.object(train_lm, "Trainer", make),
        mock.patch.object(train_lm, "round_axis_for_partitioning", planned_axis),
    ):
        yield
