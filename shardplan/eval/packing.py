"""Packing of windows of several lengths into rows of tokens. Pure."""

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Place windows in rows of `capacity` tokens by best fit, the longest first.

    Every window goes to the row with the least room that it fits in, or to a new row. This needs at most 11/9 of the
    optimal number of rows, plus one (D. S. Johnson, "Near-optimal bin packing algorithms", 1973). Windows of equal
    length are placed together, so that a million of them take seconds.

    >>> rows, offsets = pack(np.array([3, 5, 2, 6]), capacity=8)
    >>> rows.tolist(), offsets.tolist()
    ([1, 1, 0, 0], [5, 0, 6, 0])

    Args:
        lengths: int[window], tokens of each window, 1 to `capacity`.

    Returns:
        int64[window] row and int64[window] offset of each window; rows are numbered from 0 on without gaps.
    """
    rows, offsets = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    order = np.argsort(-np.asarray(lengths), kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    room_left: dict[int, list[np.ndarray]] = {}
    """Free tokens -> the rows with so many free; no list is empty."""
    rooms: list[int] = []
    """The keys of `room_left`, in ascending order."""
    row_count = 0

    def release(released: np.ndarray, room: int) -> None:
        """Record that the rows have `room` free tokens."""
        if room and len(released):
            if room not in room_left:
                insort(rooms, room)
            room_left.setdefault(room, []).append(released)

    first = 0
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        windows, first = order[first : first + count], first + count
        while len(windows):
            at = bisect_left(rooms, size)
            room = rooms[at] if at < len(rooms) else capacity
            per_row = room // size
            needed = -(-len(windows) // per_row)
            if at < len(rooms):
                del rooms[at]
                available = np.concatenate(room_left.pop(room))
                used, unused = available[:needed], available[needed:]
                release(unused, room)
            else:
                used = np.arange(row_count, row_count + needed)
                row_count += needed
            placed, windows = windows[: len(used) * per_row], windows[len(used) * per_row :]
            each = np.arange(len(placed))
            rows[placed], offsets[placed] = used[each // per_row], capacity - room + each % per_row * size
            release(used[:-1], room - per_row * size)
            release(used[-1:], room - (len(placed) - (len(used) - 1) * per_row) * size)
    return rows, offsets
