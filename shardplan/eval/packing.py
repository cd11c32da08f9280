"""How windows of several lengths are packed into sequences of one length. Pure."""

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put windows into as few sequences as best-fit decreasing finds: at most 11/9 of the fewest, and one more.

    Args:
        lengths: int[window], from 1 to `capacity`.

    Returns:
        int64[window], the sequence of each window, and int64[window], the index at which it begins there.
    """
    sequence, offset = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    by_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # those of `by_room` with a sequence, in order
    count = 0
    for window in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[window])
        fitting = bisect_left(rooms, length)
        if fitting == len(rooms):
            room, own, count = capacity, count, count + 1
        else:
            room = rooms[fitting]
            own = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(fitting)
        sequence[window], offset[window] = own, capacity - room
        if left := room - length:
            if not by_room[left]:
                insort(rooms, left)
            by_room[left].append(own)
    return sequence, offset
