"""Computes the gain and the cost of keeping an activation between forward pass and gradients.

Under the default policy of gradient checkpointing, layers keep their carries alone. Here every other thing that can
become of an activation (kept on the device, or copied to the host and back) is an `Option`: the tasks that it adds and
removes, and the buffers that it adds and removes at every point of the program. Each is the difference between two
steps: under a policy that has this option alone (`shardplan.program.variants.checkpointed`), and under the default one.

The options of several activations add up: what is computed again for one is hardly ever needed for another. The search
combines them so, and its results are priced anew by the step of their policy. Only copies to and from the host do not
add up: those of one loop run one after the other and hide behind the same matmuls, so that an option lists its copies
by the matmuls that they hide behind.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardplan.plan.workload.checkpointing import CheckpointPolicy
from shardplan.program.layer_flops import MATMULS, CopyWindow
from shardplan.program.live_buffers import LiveBuffer, ProgramPoint
from shardplan.program.operations import REMATERIALIZED_SCOPE, Operation, all_operations
from shardplan.program.tasks import Task, TaskKind
from shardplan.program.trace import Trace
from shardplan.program.variants.checkpointed import always_kept, with_policy
from shardplan.program.walk import Walk, walk

TOGETHER = (("key_proj", "value_proj"),)
"""Groups of activations that share an option: both are small, and gradients of attention need both."""

MAX_ACTIVATIONS = 8
"""Maximum number of activations, besides the carries of layers, that have options."""
Place = tuple[int, bool]
"""The place of a program point, see `PlacedPoint.place`."""
Buffers = Mapping[LiveBuffer, int]


class HostCopies(NamedTuple):
    """The copies between device and host that one loop makes for an activation."""

    window: int
    """Index in `KeptActivations.windows`."""
    task: Task
    """The task of the copy, without the FLOPs that can hide it."""
    number: int


@dataclass(frozen=True)
class Option:
    """How a step changes if one activation is kept or offloaded, in place of being recomputed for the gradients."""

    policy: CheckpointPolicy
    """The policy that differs from the default in this option only."""
    added: tuple[tuple[Task, int], ...]
    """Tasks that the default policy does not have, each with its count; host copies are in `copies`."""
    removed: tuple[tuple[Task, int], ...]
    copies: tuple[HostCopies, ...]
    saved_flops: tuple[float, ...]
    """For each window: FLOPs per step, over all devices, of its matmuls that the option makes unnecessary."""
    buffers: tuple[Buffers, ...]
    """Buffers that the option adds to the default policy's, each with its count, at every point of the program."""


@dataclass(frozen=True)
class KeptActivations:
    """For each activation of a step, the options to keep or offload it, and the program points that they change."""

    points: tuple[ProgramPoint, ...]
    """Live buffers under the default policy, at every point that the program has under any single option."""
    activations: tuple[tuple[Option, ...], ...]
    """For each activation, its options other than the default, which computes it again for the gradients."""
    windows: tuple[CopyWindow, ...]
    """Windows of the copies under any option; windows of one loop are adjacent, with ascending FLOPs."""

    def policy(self, chosen: Iterable[Option]) -> CheckpointPolicy:
        """Return the checkpointing policy that combines the chosen options, which are for different activations."""
        kind, kept, offloaded = "default", list[str](), list[str]()
        for option in chosen:
            kept += option.policy.kept
            offloaded += option.policy.offloaded
            if option.policy.kind != "default":
                kind = option.policy.kind
        return CheckpointPolicy(kind, tuple(kept), tuple(offloaded))


def kept_activations(
    trace: Trace, with_host: bool, finish: Callable[[Iterable[Task]], tuple[Task, ...]]
) -> KeptActivations:
    """Find the options (keep or offload) of all activations of a step.

    Args:
        trace: trace of the step under the default policy.
        with_host: whether activations can be copied to the host.
        finish: function that completes the tasks of a step after the walk.
    """
    base = _Walked(walk(with_policy(trace, CheckpointPolicy())), finish)
    variants: list[list[_Variant]] = []
    for policies in _policies(trace, with_host):
        of_activation = [_Variant(policy, _Walked(walk(with_policy(trace, policy)), finish)) for policy in policies]
        # an activation that no gradient needs is never kept
        of_activation = [each for each in of_activation if each.walked.tasks != base.tasks]
        if of_activation:
            variants.append(of_activation)
    variants = _most_saving(variants, base)
    every = [walked for of_activation in variants for _, walked in of_activation]
    places = _merge_places([base.places, *(walked.places for walked in every)])
    windows = sorted({_window(base, loop, flops) for walked in every for loop, flops, _ in walked.copies})
    of_base = base.at(places)
    activations = []
    for of_activation in variants:
        options = []
        for policy, walked in of_activation:
            changes = tuple(_difference(here, there) for here, there in zip(walked.at(places), of_base, strict=True))
            copies = []
            for (loop, flops, task), number in walked.copies.items():
                copies.append(HostCopies(windows.index(_window(base, loop, flops)), task, number))
            options.append(
                Option(
                    policy,
                    tuple((walked.tasks - base.tasks).items()),
                    tuple((base.tasks - walked.tasks).items()),
                    tuple(copies),
                    # no policy changes the matmuls of the forward pass, which the shorter windows consist of
                    tuple(base.flops[window.loop] - walked.flops[window.loop] for window in windows),
                    changes,
                )
            )
        activations.append(tuple(options))
    kept = KeptActivations(
        tuple(tuple(buffers.items()) for buffers in of_base),
        tuple(activations),
        tuple(windows),
    )
    return _without_repeated_points(kept)


def _window(base: "_Walked", loop: int, flops: float | None) -> CopyWindow:
    """Return the window of copies in a loop that hide behind the given FLOPs; None means all FLOPs of the loop."""
    return CopyWindow(loop, base.flops[loop] if flops is None else flops)


class _Walked:
    """The live buffers of a step by place, and its tasks and copies by loop, to compare policies."""

    def __init__(self, walked: Walk, finish: Callable[[Iterable[Task]], tuple[Task, ...]]) -> None:
        self.points = {point.place: point.buffers for point in walked.points}
        self.places = [point.place for point in walked.points]
        self.tasks: Counter[Task] = Counter()
        self.copies: Counter[tuple[int, float | None, Task]] = Counter()
        """(Loop, FLOPs that hide the copy, copy between device and host) -> its count; FLOPs are None for all matmuls
        of the loop. Copies outside of loops count as other tasks."""
        self.flops: defaultdict[int, float] = defaultdict(float)
        """Loop -> FLOPs of its matmuls in a step, over all devices."""
        finished = finish([each.task for each in walked.tasks])
        for (_, loop), task in zip(walked.tasks, finished, strict=True):
            if task.kind == TaskKind.HOST_COPY and loop is not None:
                flops = task.executions * task.layer_flops if task.is_to_host else None
                self.copies[loop, flops, replace(task.cost_key, layer_flops=0.0, loop=None)] += 1
            else:
                self.tasks[task.cost_key] += 1
            if task.kind in MATMULS and loop is not None:
                self.flops[loop] += task.executions * task.flops

    def at(self, places: Sequence[Place]) -> list[Counter[LiveBuffer]]:
        """Return the live buffers at each place; a place that the program lacks has the buffers of the next point."""
        found: list[Counter[LiveBuffer]] = []
        following = self.points[self.places[-1]]
        for place in reversed(places):
            following = self.points.get(place, following)
            found.append(following)
        return found[::-1]


class _Variant(NamedTuple):
    """A step under another checkpointing policy than the default."""

    policy: CheckpointPolicy
    walked: _Walked


def _most_saving(variants: list[list[_Variant]], base: _Walked) -> list[list[_Variant]]:
    """Select the carries, and at most `MAX_ACTIVATIONS` activations whose computation takes the most FLOPs.

    The limit exists because the search tries all combinations. Models of shardplan and of Levanter stay below it.
    """

    def saved_flops(of_activation: list[_Variant]) -> float:
        return sum(base.flops.values()) - sum(of_activation[0].walked.flops.values())

    named = [each for each in variants if each[0].policy.names]
    most = sorted(named, key=saved_flops, reverse=True)[:MAX_ACTIVATIONS]
    return [each for each in variants if each in most or not each[0].policy.names]


def _policies(trace: Trace, with_host: bool) -> Iterator[list[CheckpointPolicy]]:
    """Yield, for each activation, the policies that differ from the default in this activation only."""
    if with_host:
        yield [CheckpointPolicy("offload_carries")]
    always = always_kept(trace.operations)
    names = dict.fromkeys(name for name in _names(trace.operations) if name not in always)
    together = {name: group for group in TOGETHER for name in group}
    for group in dict.fromkeys(together.get(name, (name,)) for name in names):
        present = tuple(name for name in group if name in names)
        yield [CheckpointPolicy(kept=present), *([CheckpointPolicy(offloaded=present)] if with_host else [])]


def _names(operations: Iterable[Operation]) -> Iterator[str]:
    """Yield the names of the activations that gradients recompute, except inputs of layers."""
    for operation in all_operations(operations):
        is_computed_again = REMATERIALIZED_SCOPE in operation.label
        if operation.activation and is_computed_again and not operation.activation.startswith(LOOP_VALUES):
            yield operation.activation


LOOP_VALUES = "scan("
"""Prefix of the names by which Haliax names the carry and inputs of a loop over layers."""


def _merge_places(programs: Sequence[Sequence[Place]]) -> list[Place]:
    """Merge the places of all programs into one list that keeps each program's order."""
    merged = list(programs[0])
    known = set(merged)
    for places in programs[1:]:
        previous: Place | None = None
        for place in places:
            if place not in known:
                merged.insert(0 if previous is None else merged.index(previous) + 1, place)
                known.add(place)
            previous = place
    return merged


def _difference(one: Counter[LiveBuffer], other: Counter[LiveBuffer]) -> Buffers:
    """Return, for each buffer, its count in `one` minus its count in `other`, without zeros."""
    if one == other:
        return {}
    difference = Counter(one)
    difference.subtract(other)
    return {buffer: count for buffer, count in difference.items() if count}


def _without_repeated_points(kept: KeptActivations) -> KeptActivations:
    """Remove points that have the same buffers as an earlier point under every option."""
    options = [option for of_activation in kept.activations for option in of_activation]
    first: dict[object, int] = {}
    for i, point in enumerate(kept.points):
        key = frozenset(point), tuple(frozenset(option.buffers[i].items()) for option in options)
        first.setdefault(key, i)
    rows = sorted(first.values())
    activations = []
    for of_activation in kept.activations:
        at_rows = [replace(option, buffers=tuple(option.buffers[i] for i in rows)) for option in of_activation]
        activations.append(tuple(at_rows))
    return KeptActivations(tuple(kept.points[i] for i in rows), tuple(activations), kept.windows)
