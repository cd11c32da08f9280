"""Choices of mesh axes for single components, and the best combinations of one choice per component.

The times of components add up, and so do their bytes at every point of the program. To combine them is a
multiple-choice knapsack problem with one capacity per point; a branch and bound over the components solves it exactly.
What becomes of activations (`shardplan.search.components.keeping`) is chosen last, after the shardings of components.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.plan.mapping import MeshAxes
from shardplan.search.components.compute_sharding import ComputeSharding
from shardplan.search.components.keeping import Amount, Keeping, Kept
from shardplan.search.tolerances import TIME_RESOLUTION


@dataclass(frozen=True)
class ComponentChoice:
    """Mesh axes for the logical axes of one component, with their cost."""

    compute: ComputeSharding
    params: dict[str, MeshAxes]
    amount: Amount

    def uses(self, mesh_axis: str) -> bool:
        """Return whether `mesh_axis` shards a computation."""
        return any(mesh_axis in mesh_axes for mesh_axes in self.compute.mapping.values())


class Choices(NamedTuple):
    """The cost outside of all components, and the choices of every component."""

    base: ComponentChoice
    components: list[list[ComponentChoice]]
    """Choices of every component, [component][choice]."""
    device_points: int
    """Number of program points; a choice's bytes list these first, then the points in host memory."""
    keeping: Keeping
    """The combinations of options for activations."""
    required: MeshAxes = ()
    """Mesh axes that at least one component must use in its computations."""

    def peak(self, size: np.ndarray) -> float:
        """Return a device's peak memory, the maximum of its bytes over all program points."""
        return float(size[: self.device_points].max())

    def is_allowed(self, chosen: Iterable[ComponentChoice]) -> bool:
        """Return whether one choice per component satisfies `required`."""
        return all(any(choice.uses(mesh_axis) for choice in chosen) for mesh_axis in self.required)

    def least_left(self) -> list[Amount]:
        """Return a list whose entry n has lower bounds of the cost of all components after the first n."""
        base = self.base.amount
        left = [Amount(0.0, *(np.zeros_like(each) for each in base[1:]))]
        for component in reversed(self.components):
            amounts = zip(*(choice.amount for choice in component), strict=True)
            seconds, *others = amounts
            left.insert(0, left[0].plus(Amount(min(seconds), *(np.min(each, axis=0) for each in others))))
        return left

    def least(self, amount: Amount) -> tuple[float, np.ndarray]:
        """Return lower bounds of the seconds and bytes of an amount under any options for activations."""
        gained = self.keeping.least(amount.options)
        return amount.seconds + float(gained[0]), amount.bytes + gained[1 + self.keeping.windows :]


@dataclass(frozen=True)
class Combination:
    """The base and one choice for each component, with their total cost."""

    parts: tuple[ComponentChoice, ...]
    options: tuple[int, ...]
    """Options for activations, as indices into `Space.options`."""
    seconds: float
    """Seconds of a step."""
    handicapped_seconds: float
    """See `shardplan.search.components.keeping.Kept`."""
    copies: int
    peak_bytes: float
    """Peak bytes per device."""


def pareto_optimal(choices: list[ComponentChoice], required: MeshAxes = ()) -> list[ComponentChoice]:
    """Return the Pareto-optimal choices, fastest first: no faster choice has as little memory under any options.

    >>> def choice(seconds, size):
    ...     amount = Amount(seconds, np.array([size]), np.zeros(0), np.zeros((0, 2)))
    ...     return ComponentChoice(ComputeSharding({}), {}, amount)
    >>> [each.amount.seconds for each in pareto_optimal([choice(1.0, 8.0), choice(2.0, 4.0), choice(3.0, 6.0)])]
    [1.0, 2.0]

    Args:
        required: mesh axes that a combination must use; a choice that uses one is undercut only by others that do.
    """
    kept: list[ComponentChoice] = []
    for choice in sorted(choices, key=lambda choice: (choice.amount.seconds, choice.amount.bytes.sum())):
        # those kept before are no slower, so that only what else they take is compared
        needed = [mesh_axis for mesh_axis in required if choice.uses(mesh_axis)]
        if not any(_undercuts(other.amount, choice.amount) and all(map(other.uses, needed)) for other in kept):
            kept.append(choice)
    return kept


def _undercuts(one: Amount, other: Amount) -> bool:
    """Return whether `one` is at most as large as `other` in everything but seconds."""
    return all((mine <= others).all() for mine, others in zip(one[1:], other[1:], strict=True))


def fastest_combinations(choices: Choices, limit: float, available_bytes: np.ndarray) -> list[Combination]:
    """Return the Pareto-optimal combinations (time, peak memory) that fit and tie with the fastest.

    >>> def choice(seconds, size):
    ...     amount = Amount(seconds, np.array([size]), np.zeros(0), np.zeros((0, 2)))
    ...     return ComponentChoice(ComputeSharding({}), {}, amount)
    >>> keeping = Keeping.of([], (), np.zeros(0), np.zeros((0, 0)), np.zeros(0, bool))
    >>> choices = Choices(choice(1.0, 1.0), [[choice(1.0, 8.0), choice(2.0, 4.0)]], 1, keeping)
    >>> [(each.seconds, each.peak_bytes) for each in fastest_combinations(choices, math.inf, np.array([6.0]))]
    [(3.0, 5.0)]

    Args:
        limit: step time in seconds above which no combination is returned.
        available_bytes: bytes per device that a combination may have at every point.
    """
    components, left = choices.components, choices.least_left()
    handicapped_limit = math.inf
    best: list[Combination] = []
    stack: list[tuple[int, Amount, tuple[ComponentChoice, ...]]] = [(0, choices.base.amount, ())]
    while stack:
        depth, amount, chosen = stack.pop()
        seconds, size = choices.least(amount.plus(left[depth]))
        if seconds > min(limit, handicapped_limit) or (size > available_bytes).any():
            continue
        if depth < len(components):
            # the fastest choice is pushed last, so that it is popped first
            for choice in sorted(components[depth], key=lambda choice: -choice.amount.seconds):
                stack.append((depth + 1, amount.plus(choice.amount), (*chosen, choice)))
            continue
        if not choices.is_allowed(chosen):
            continue
        for kept in choices.keeping.fastest(amount, limit, handicapped_limit, available_bytes):
            new = _combine(choices, chosen, kept)
            handicapped_limit = min(handicapped_limit, new.handicapped_seconds * (1 + TIME_RESOLUTION))
            if not any(_dominates(old, new) for old in best):
                best = [old for old in best if not _dominates(new, old)] + [new]
    # the limit was higher when the first ones were found
    return [each for each in best if each.handicapped_seconds <= handicapped_limit]


def smallest_combination(choices: Choices, limit_bytes: float) -> Combination | None:
    """Return the combination with the smallest peak memory; None if none is below `limit_bytes` per device.

    Host memory is not limited.

    >>> def choice(seconds, size):
    ...     amount = Amount(seconds, np.array([size]), np.zeros(0), np.zeros((0, 2)))
    ...     return ComponentChoice(ComputeSharding({}), {}, amount)
    >>> keeping = Keeping.of([], (), np.zeros(0), np.zeros((0, 0)), np.zeros(0, bool))
    >>> choices = Choices(choice(1.0, 1.0), [[choice(1.0, 8.0), choice(2.0, 4.0)]], 1, keeping)
    >>> smallest_combination(choices, limit_bytes=6.0).peak_bytes, smallest_combination(choices, limit_bytes=5.0)
    (5.0, None)
    """
    components, left = choices.components, choices.least_left()
    best: Combination | None = None
    stack: list[tuple[int, Amount, tuple[ComponentChoice, ...]]] = [(0, choices.base.amount, ())]
    while stack:
        depth, amount, chosen = stack.pop()
        _, size = choices.least(amount.plus(left[depth]))
        if choices.peak(size) >= limit_bytes:
            continue
        if depth == len(components):
            if choices.is_allowed(chosen):
                smallest = _combine(choices, chosen, choices.keeping.smallest(amount, choices.device_points))
                if smallest.peak_bytes < limit_bytes:
                    best, limit_bytes = smallest, smallest.peak_bytes
            continue
        # the smallest choice is pushed last, so that it is popped first
        for choice in sorted(components[depth], key=lambda choice: -choices.peak(choice.amount.bytes)):
            stack.append((depth + 1, amount.plus(choice.amount), (*chosen, choice)))
    return best


def _combine(choices: Choices, chosen: tuple[ComponentChoice, ...], kept: Kept) -> Combination:
    parts = (choices.base, *chosen)
    return Combination(
        parts, kept.options, kept.seconds, kept.handicapped_seconds, kept.copies, choices.peak(kept.bytes)
    )


def _dominates(one: Combination, other: Combination) -> bool:
    """Return whether `one` is at least as fast as `other`, at most as large, and copies no more to the host."""
    return (
        one.handicapped_seconds <= other.handicapped_seconds
        and one.peak_bytes <= other.peak_bytes
        and one.copies <= other.copies
    )
