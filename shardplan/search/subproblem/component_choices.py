"""Choices of mesh axes for single components, and the best combinations of one choice per component.

The times of components add up, and so do their bytes at every point of the program. To combine them is a
multiple-choice knapsack problem with one capacity per point; a branch and bound over the components solves it exactly.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.plan.mapping import MeshAxes
from shardplan.search.ranking import TIME_RESOLUTION
from shardplan.search.space import ComputeSharding


@dataclass(frozen=True)
class ComponentChoice:
    """Mesh axes for the logical axes of one component, with their cost."""

    compute: ComputeSharding
    params: dict[str, MeshAxes]
    seconds: float
    bytes: np.ndarray
    """Bytes per device at every point of the program, then in the memory of its host; or of every buffer."""

    def uses(self, mesh_axis: str) -> bool:
        """Whether `mesh_axis` shards a computation."""
        return any(mesh_axis in mesh_axes for mesh_axes in self.compute.mapping.values())


class Choices(NamedTuple):
    """The cost that no component changes, and the choices of every component."""

    base: ComponentChoice
    components: list[list[ComponentChoice]]
    """[component][choice]"""
    device_points: int
    """Number of points of the program, which come first in the bytes of a choice."""
    required: MeshAxes = ()
    """Mesh axes that at least one component must use in its computations."""

    def peak(self, size: np.ndarray) -> float:
        """Return the peak memory of a device, of bytes at every point."""
        return float(size[: self.device_points].max())

    def is_allowed(self, chosen: Iterable[ComponentChoice]) -> bool:
        """Whether `required` is met by one choice per component."""
        return all(any(choice.uses(mesh_axis) for choice in chosen) for mesh_axis in self.required)


@dataclass(frozen=True)
class Combination:
    """The base and one choice for each component, with their cost."""

    parts: tuple[ComponentChoice, ...]
    seconds: float
    """Time of a step."""
    peak_bytes: float
    """Peak memory of a device."""


def pareto_optimal(choices: list[ComponentChoice], required: MeshAxes = ()) -> list[ComponentChoice]:
    """The choices, fastest first, that no faster choice matches or undercuts in bytes at every point.

    Args:
        required: mesh axes that a combination must use; a choice that uses one is undercut only by others that do.
    """
    kept: list[ComponentChoice] = []
    for choice in sorted(choices, key=lambda choice: (choice.seconds, choice.bytes.sum())):
        needed = [mesh_axis for mesh_axis in required if choice.uses(mesh_axis)]
        if not any((other.bytes <= choice.bytes).all() and all(map(other.uses, needed)) for other in kept):
            kept.append(choice)
    return kept


def fastest_combinations(choices: Choices, limit: float, available_bytes: np.ndarray) -> list[Combination]:
    """The Pareto-optimal combinations (time against peak memory) among those that fit and tie with the fastest.

    Args:
        limit: step time in seconds above which no combination is returned.
        available_bytes: bytes per device that a combination may have at every point.
    """
    base, components = choices.base, choices.components
    seconds_left = np.cumsum([0.0, *(min(c.seconds for c in each) for each in reversed(components))])[::-1]
    bytes_left = _min_bytes_left(choices)
    best: list[Combination] = []
    stack: list[tuple[int, float, np.ndarray, tuple[ComponentChoice, ...]]] = [(0, base.seconds, base.bytes, ())]
    while stack:
        depth, seconds, size, chosen = stack.pop()
        if seconds + seconds_left[depth] > limit or (size + bytes_left[depth] > available_bytes).any():
            continue
        if depth < len(components):
            # the fastest choice is pushed last, so that it is popped first
            for choice in sorted(components[depth], key=lambda choice: -choice.seconds):
                stack.append((depth + 1, seconds + choice.seconds, size + choice.bytes, (*chosen, choice)))
            continue
        if not choices.is_allowed(chosen):
            continue
        new = _combine(choices, chosen)
        limit = min(limit, new.seconds * (1 + TIME_RESOLUTION))
        if not any(_dominates(old, new) for old in best):
            best = [old for old in best if old.seconds <= limit and not _dominates(new, old)] + [new]
    return best


def smallest_combination(choices: Choices, limit_bytes: float) -> Combination | None:
    """The combination with the smallest peak memory, or None if no peak is below `limit_bytes` per device.

    How much memory of hosts it takes does not matter.
    """
    base, components = choices.base, choices.components
    bytes_left = _min_bytes_left(choices)
    best: Combination | None = None
    stack: list[tuple[int, np.ndarray, tuple[ComponentChoice, ...]]] = [(0, base.bytes, ())]
    while stack:
        depth, size, chosen = stack.pop()
        if choices.peak(size + bytes_left[depth]) >= limit_bytes:
            continue
        if depth == len(components) and not choices.is_allowed(chosen):
            continue
        if depth == len(components):
            best = _combine(choices, chosen)
            limit_bytes = best.peak_bytes
            continue
        for choice in sorted(components[depth], key=lambda choice: -choices.peak(choice.bytes)):
            stack.append((depth + 1, size + choice.bytes, (*chosen, choice)))
    return best


def _combine(choices: Choices, chosen: tuple[ComponentChoice, ...]) -> Combination:
    base = choices.base
    size = base.bytes + sum(choice.bytes for choice in chosen)
    seconds = base.seconds + sum(choice.seconds for choice in chosen)
    return Combination((base, *chosen), float(seconds), choices.peak(size))


def _dominates(one: Combination, other: Combination) -> bool:
    """Whether `one` is at least as fast and at most as large as `other`."""
    return one.seconds <= other.seconds and one.peak_bytes <= other.peak_bytes


def _min_bytes_left(choices: Choices) -> list[np.ndarray]:
    """For every number of components chosen so far, a lower bound of the bytes of the others at every point."""
    lower_bounds = [np.zeros_like(choices.base.bytes)]
    for component in reversed(choices.components):
        lower_bounds.insert(0, lower_bounds[0] + np.min([choice.bytes for choice in component], axis=0))
    return lower_bounds
