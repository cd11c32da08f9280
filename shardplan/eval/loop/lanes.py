"""The lanes of a batch: equal numbers of its rows, each lane computed by different devices."""

from dataclasses import dataclass

import jax

from shardplan.execution.aot_program import Program


@dataclass(frozen=True)
class Lanes:
    """The lanes of a batch (parts with equally many rows), and which lanes this process computes and writes."""

    count: int
    sequences: int
    """Sequences of one lane in one step."""
    own: tuple[int, ...]
    """Lanes that the devices of this process compute, in order."""
    written: tuple[int, ...]
    """Lanes whose results this process writes, because it is the first process that computes them."""


def find_lanes(program: Program) -> Lanes:
    """Return the lanes of a program's batch; the program's second argument must be an array [batch, position]."""
    array = program.arguments[1].array
    first_process: dict[int, int] = {}
    own_rows = set[int]()
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        row = index[0].start or 0  # None where one lane has all rows
        first_process[row] = min(device.process_index, first_process.get(row, device.process_index))
        if device.process_index == jax.process_index():
            own_rows.add(row)
    lane_of_row = {row: lane for lane, row in enumerate(sorted(first_process))}
    own = sorted(lane_of_row[row] for row in own_rows)
    written = sorted(lane_of_row[row] for row in own_rows if first_process[row] == jax.process_index())
    return Lanes(len(lane_of_row), array.shape[0] // len(lane_of_row), tuple(own), tuple(written))
