"""Windows of several lengths in rows of tokens: nothing overlaps, and few rows are needed."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardplan.eval.packing import pack


def fewest_rows(lengths, capacity):
    """The fewest rows, by trying all ways to place a few windows."""
    for count in itertools.count(1):

        def fits(rest, room):
            return not rest or any(
                fits(rest[1:], (*room[:i], room[i] - rest[0], *room[i + 1 :]))
                for i in range(len(room))
                if room[i] >= rest[0] and room[i] not in room[:i]
            )

        if fits(tuple(sorted(lengths, reverse=True)), (capacity,) * count):
            return count


def check_packing(lengths, capacity):
    rows, offsets = pack(np.array(lengths, np.int64), capacity)
    assert set(rows.tolist()) == set(range(rows.max() + 1))
    for row in range(rows.max() + 1):
        ends = 0
        for window in sorted(np.flatnonzero(rows == row), key=lambda window: offsets[window]):
            assert offsets[window] >= ends
            ends = offsets[window] + lengths[window]
        assert ends <= capacity
    return int(rows.max()) + 1


def best_fit_rows(lengths, capacity):
    room = []
    for length in sorted(lengths, reverse=True):
        best = min((i for i in range(len(room)) if room[i] >= length), key=room.__getitem__, default=None)
        if best is None:
            room.append(capacity - length)
        else:
            room[best] -= length
    return len(room)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.lists(st.integers(1, n), min_size=1), st.just(n))))
def test_windows_are_packed_by_best_fit(case):
    assert check_packing(*case) == best_fit_rows(*case)


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.lists(st.integers(1, n), min_size=1, max_size=8), st.just(n))))
def test_packing_needs_few_rows(case):
    assert 9 * check_packing(*case) <= 11 * fewest_rows(*case) + 9
