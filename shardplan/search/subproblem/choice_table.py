"""Bounds over all components at once, which exclude most choices before their times are known.

How fast a step is depends on which activations it keeps, and so does how much memory it takes. The bounds are therefore
computed for every combination of options about activations (`shardplan.search.components.keeping`): a choice may be in
a plan only if some combination fits with it and is fast enough.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardplan.search.components.keeping import Keeping
from shardplan.search.reasons import Rejection
from shardplan.search.subproblem.mesh_costs import ComponentTimes


class ChoiceTable(NamedTuple):
    """All choices of one component, with their seconds and bytes as arrays."""

    seconds: np.ndarray
    """Time, or a lower bound of it, of each choice under each combination of options, without host copies in loops:
    [choice, combination]."""
    bytes: np.ndarray
    """Bytes of each choice at every point of the program, then in host memory, [choice, row]."""
    option_bytes: np.ndarray
    """Bytes that every option adds to each choice, [choice, option, row]."""

    @staticmethod
    def of(
        keeping: Keeping, times: Sequence[ComponentTimes], size: np.ndarray, option_bytes: np.ndarray
    ) -> "ChoiceTable":
        """Make the table of choices from their times; `size` and `option_bytes` become fields unchanged."""
        seconds, options = np.array([each.seconds for each in times]), np.array([each.options[:, 0] for each in times])
        return ChoiceTable(keeping.by_combination(seconds, options), size, option_bytes)


class Possible(NamedTuple):
    """The choices and combinations that the bounds do not exclude."""

    choices: list[np.ndarray]
    """Indices of the possible choices in each table, [table]."""
    combinations: np.ndarray
    """Indices of the possible combinations of options."""


def find_possible(
    tables: Sequence[ChoiceTable], keeping: Keeping, limit: float, available_bytes: np.ndarray
) -> Possible | Rejection:
    """Return the choices that may be part of a plan, or the reason why there are none.

    A plan has one choice of every table and one combination of options. Its time is the sum of the times of its choices
    under this combination, plus copies; its bytes are the sums of bytes of its choices and of its options. So its time
    is at least the sum of every table's least time under its combination, and its bytes are at least the sum of every
    table's least bytes. The bound for plans with a given choice has this choice's time and bytes in place of the least
    of its own table.

    >>> keeping = Keeping.of([], (), np.zeros(0), np.zeros((0, 0)), np.zeros(0, bool))
    >>> attention = ChoiceTable(np.array([[1.0], [2.0]]), np.array([[8.0], [2.0]]), np.zeros((2, 0, 1)))
    >>> mlp = ChoiceTable(np.array([[3.0], [5.0]]), np.array([[9.0], [3.0]]), np.zeros((2, 0, 1)))
    >>> find_possible([attention, mlp], keeping, limit=5.5, available_bytes=np.array([12.0])).choices
    [array([0, 1]), array([0])]

    Args:
        limit: step time in seconds above which a plan is of no interest.
        available_bytes: [row], bytes that a plan may use.
    """
    # no combination adds less than the least option of every activation does
    smallest = [table.bytes + keeping.least(table.option_bytes) for table in tables]
    least_bytes = [each.min(axis=0) for each in smallest]
    left = available_bytes - np.sum(least_bytes, axis=0)
    if (left < 0).any():
        return Rejection.MEMORY
    fastest = [table.seconds.min(axis=0) for table in tables]
    seconds = np.sum(fastest, axis=0)
    combinations = np.flatnonzero(seconds <= limit)
    if not len(combinations):
        return Rejection.SLOWER
    no_plan = Rejection.MEMORY if limit == np.inf else Rejection.SLOWER
    size = np.sum([table.bytes.min(axis=0) for table in tables], axis=0)
    options = np.sum([table.option_bytes.min(axis=0) for table in tables], axis=0)
    rows = np.flatnonzero(size - keeping.least(-options) > available_bytes)  # elsewhere every combination fits
    added = keeping.combinations[combinations] @ options[:, rows]
    combinations = combinations[(size[rows] + added <= available_bytes[rows]).all(axis=1)]
    if not len(combinations):
        return no_plan
    choices = []
    for table, own_fastest, sizes, own_least in zip(tables, fastest, smallest, least_bytes, strict=True):
        others = (seconds - own_fastest)[combinations]
        is_fast = (others + table.seconds[:, combinations] <= limit).any(axis=1)
        fits = (sizes - own_least <= left).all(axis=1)
        choices.append(np.flatnonzero(is_fast & fits))
    return Possible(choices, combinations) if all(map(len, choices)) else no_plan
