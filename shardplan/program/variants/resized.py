"""Derives the step for one batch from the traced step of another batch.

How many sequences a training step has, and in how many microbatches, changes sizes of arrays and iterations of loops,
and nothing else. So a step is traced once with prime numbers of sequences and of microbatches that divide no other size
of the model: whatever is a multiple of one of them comes from it. Tests compare the result with traces of the batch.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from shardplan.program.live_buffers import LiveBuffer, ProgramPoint
from shardplan.program.named_arrays import Dim, TracedArray
from shardplan.program.tasks import Step, Task
from shardplan.program.variants.kept_activations import HostCopies, KeptActivations, Option

SEQUENCES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)
"""Primes for the number of sequences per microbatch in traces."""
MICROBATCHES = (509, 521, 523, 541, 547, 557, 563, 569)
"""Primes for the number of microbatches in traces."""


class TracedBatch(NamedTuple):
    """The batch numbers with which a step is traced."""

    sequences: int
    """Number of sequences per microbatch."""
    microbatches: int


def traced_batch(sizes: Iterable[int], has_microbatches: bool) -> TracedBatch:
    """Choose a batch to trace a step with: numbers that divide no other size, so that they can be replaced afterwards.

    Args:
        sizes: all other sizes in the step: sizes of the model's axes, and the number of positions.
        has_microbatches: whether the step has a loop over microbatches; otherwise it has one microbatch.
    """
    sizes = set(sizes)

    def indivisible(primes: Iterable[int]) -> int:
        return next(prime for prime in primes if all(size % prime for size in sizes))

    return TracedBatch(indivisible(SEQUENCES), indivisible(MICROBATCHES) if has_microbatches else 1)


class Resizer:
    """Changes the number of sequences and microbatches in a traced step, and in the options for its activations."""

    def __init__(self, traced: TracedBatch, wanted: TracedBatch) -> None:
        self.traced, self.wanted = traced, wanted
        self.per_execution = wanted.sequences / traced.sequences
        self.per_step = self.per_execution * wanted.microbatches / traced.microbatches
        self._arrays: dict[TracedArray, TracedArray] = {}
        self._buffers: dict[LiveBuffer, LiveBuffer] = {}
        self._tasks: dict[Task, Task] = {}

    def step(self, step: Step) -> Step:
        """Return the step with the requested batch."""
        return replace(
            step,
            tasks=tuple(map(self._task, step.tasks)),
            points=tuple(map(self._point, step.points)),
            point_labels=tuple(
                label._replace(executions=self._executions(label.executions)) for label in step.point_labels
            ),
        )

    def kept(self, kept: KeptActivations) -> KeptActivations:
        """Return the options for activations with the requested batch."""
        return KeptActivations(
            tuple(map(self._point, kept.points)),
            tuple(tuple(map(self._option, options)) for options in kept.activations),
            tuple(window._replace(flops=self.per_step * window.flops) for window in kept.windows),
        )

    def _option(self, option: Option) -> Option:
        buffers = [{self._buffer(buffer): n for buffer, n in each.items()} for each in option.buffers]
        return Option(
            option.policy,
            tuple((self._task(task), n) for task, n in option.added),
            tuple((self._task(task), n) for task, n in option.removed),
            tuple(HostCopies(window, self._task(task), n) for window, task, n in option.copies),
            tuple(self.per_step * flops for flops in option.saved_flops),
            tuple(buffers),
        )

    def _point(self, point: ProgramPoint) -> ProgramPoint:
        return tuple((self._buffer(buffer), n) for buffer, n in point)

    def _buffer(self, buffer: LiveBuffer) -> LiveBuffer:
        if buffer not in self._buffers:
            related = tuple(map(self._array, buffer.related_arrays))
            self._buffers[buffer] = replace(buffer, array=self._array(buffer.array), related_arrays=related)
        return self._buffers[buffer]

    def _task(self, task: Task) -> Task:
        if task not in self._tasks:
            self._tasks[task] = replace(
                task,
                operands=tuple(map(self._array, task.operands)),
                results=tuple(map(self._array, task.results)),
                contracted=self._dim(task.contracted),
                batched=self._dim(task.batched),
                executions=self._executions(task.executions),
                routed=frozenset(map(self._array, task.routed)),
                layer_flops=self.per_execution * task.layer_flops,
            )
        return self._tasks[task]

    def _array(self, array: TracedArray) -> TracedArray:
        if array not in self._arrays:
            self._arrays[array] = replace(array, dims=tuple(map(self._dim, array.dims)))
        return self._arrays[array]

    def _dim(self, dim: Dim) -> Dim:
        return tuple((name, self._size(size)) for name, size in dim)

    def _size(self, size: int) -> int:
        for traced, wanted in zip(self.traced, self.wanted, strict=True):
            if traced > 1 and size % traced == 0:
                size = size // traced * wanted
        return size

    def _executions(self, executions: int) -> int:
        traced = self.traced.microbatches
        return executions // traced * self.wanted.microbatches if executions % traced == 0 else executions
