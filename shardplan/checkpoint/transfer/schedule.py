"""The read schedule: which process reads which bytes of a checkpoint, and which collectives follow. Pure arithmetic.

The devices of several processes need shards of an array that may be rows of a tensor, columns, or all of it. Where the
shards of each process are long ranges of bytes, each process reads its own (`all_to_all` and `all_gather` are empty).
Elsewhere the devices that need parts of one box of the array read it once between them, each some of its rows, and
exchange: an all-to-all turns rows into the columns that each device needs, an all-gather gives every device all rows.
The cheaper strategy is chosen, array by array.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.checkpoint.mapping.views import Shape, View
from shardplan.checkpoint.transfer.reads.byte_ranges import (
    ReadVolume,
    TensorSource,
    find_byte_ranges,
    sum_ranges,
)
from shardplan.checkpoint.transfer.reads.process_kinds import find_volumes
from shardplan.checkpoint.transfer.reads.view_grid import (
    ViewGrid,
    estimate_grid_volume,
    estimate_read_volume,
    find_grid,
)
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.checkpoint.transfer.transfer import DeviceMesh, ReadStrategy, Transfer, TransferLimits, make_transfers
from shardplan.plan.mapping import MeshAxes

MAX_REREAD_BYTES = 256 * 1024
"""Bytes of an array that may be read more than once if that saves time."""
MAX_IMBALANCE = 1.1
"""Largest ratio, most bytes of a process / mean bytes, at which reads count as even."""

MAX_SAMPLES = 32
"""Maximum number of processes that are examined to estimate the reads of all processes with a strategy."""
SMALL_SAMPLES = 4
"""Number of processes that are examined for a small array, in place of all."""
ROUNDING = 1e-6
"""Relative tolerance by which a sum may exceed its bound, because terms are added in another order."""
SMALL_PART = 0.01
"""Fraction of all bytes that the small arrays have together."""


@dataclass(frozen=True)
class Speeds:
    """Speeds that decide between reading and exchanging bytes."""

    read: float = 2.5e10
    """Bytes per second that a process reads from storage."""
    exchange: float = 4.5e10
    """Bytes per second that a device receives from others."""
    request: float = 0.05 / 64
    """Seconds added by a request: time to the first byte / number of requests that a process has in flight."""


DEFAULT_SPEEDS = Speeds()


@dataclass(frozen=True)
class Schedule:
    """The transfers that bring a checkpoint to a mesh, in order; each array is completed before the next begins."""

    mesh: DeviceMesh
    transfers: tuple[Transfer, ...]


def make_schedule(
    requests: Mapping[str, ArrayRequest],
    sources: Mapping[str, TensorSource],
    mesh: DeviceMesh,
    limits: TransferLimits,
    speeds: Speeds = DEFAULT_SPEEDS,
) -> Schedule:
    """Choose the cheapest read strategy for every array.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> mesh = DeviceMesh((("data", 2),), processes=(0, 1))
    >>> requests = {"up_proj": ArrayRequest(tensor_view("w", (8, 8)), (("data",), ()), np.dtype(np.float16))}
    >>> sources = {"w": TensorSource("model.safetensors", 64, bits=16)}
    >>> schedule = make_schedule(requests, sources, mesh, TransferLimits(read=2**20, placed=2**20))
    >>> [(each.path, each.local_shape, each.strategy.collectives) for each in schedule.transfers]
    [('up_proj', (4, 8), [])]

    Args:
        requests: array path -> the array as it is in transit, see `ArrayRequest.in_transit`.
        sources: tensor name -> its location.
        limits: how large a transfer may be.
    """
    transfers: list[Transfer] = []
    grids = {path: find_grid(request.view, sources) for path, request in requests.items()}
    sizes = {path: _stored_bytes(request.view, grids[path], sources) for path, request in requests.items()}
    small = _smallest(sizes)
    for path, request in requests.items():
        view = request.view
        strategies = [ReadStrategy(request.spec)]
        if len(mesh.devices_by_process) > 1:
            strategies += exchange_strategies(view.shape, request.spec, mesh)
        choices = []
        for strategy in strategies:
            transfers_of = make_transfers(
                path, view.shape, strategy, request.dtype.itemsize, mesh, limits, request.placed_bytes
            )
            choices.append(list(transfers_of))
        array = _StoredArray(view, sources, grids[path], sizes[path], path in small)
        transfers += _cheapest(choices, array, mesh, speeds) if len(choices) > 1 else choices[0]
    return Schedule(mesh, tuple(transfers))


def _smallest(sizes: Mapping[str, float]) -> set[str]:
    """Return the smallest arrays, whose bytes together are at most `SMALL_PART` of all bytes."""
    limit, total, found = SMALL_PART * sum(sizes.values()), 0.0, set()
    for path in sorted(sizes, key=lambda path: sizes[path]):
        total += sizes[path]
        if total > limit:
            break
        found.add(path)
    return found


def exchange_strategies(shape: Shape, spec: Sequence[MeshAxes], mesh: DeviceMesh) -> Iterator[ReadStrategy]:
    """Yield the strategies with collectives for an array of `shape` with the parameter sharding `spec`.

    Each strategy reads shards up to some sharded dimension, and uses an all-to-all to shard this and all later
    dimensions. The last strategy has no all-to-all.

    >>> from shardplan.checkpoint.transfer.transfer import DeviceMesh
    >>> mesh = DeviceMesh((("data", 2), ("model", 4)), processes=(0, 0, 0, 0, 1, 1, 1, 1))
    >>> for strategy in exchange_strategies((4096, 1024), [(), ("model",)], mesh):
    ...     print(strategy.local, strategy.all_to_all, strategy.all_gather)
    ((), ()) ((1, ('model',)),) ('data',)
    ((), ('model',)) () ('data',)
    """
    used = {axis for axes in spec for axis in axes}
    gathered = tuple(axis for axis, n in mesh.axes if axis not in used and n > 1)
    sharded = [d for d, axes in enumerate(spec) if mesh.count(axes) > 1]
    for first in (*(d for d in sharded if any(n > 1 for n in shape[:d])), len(shape)):
        resharded = tuple((d, tuple(a for a in spec[d] if mesh.sizes[a] > 1)) for d in sharded if d >= first)
        if resharded or gathered:
            local = tuple(axes if d < first else () for d, axes in enumerate(spec))
            yield ReadStrategy(local, resharded, gathered)


def read_by_process(
    schedule: Schedule, requests: Mapping[str, ArrayRequest], sources: Mapping[str, TensorSource]
) -> dict[int, ReadVolume]:
    """Return the bytes and the number of byte ranges that each process reads in all transfers.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> mesh = DeviceMesh((("data", 2),), processes=(0, 1))
    >>> requests = {"up_proj": ArrayRequest(tensor_view("w", (8, 8)), (("data",), ()), np.dtype(np.float16))}
    >>> sources = {"w": TensorSource("model.safetensors", 64, bits=16)}
    >>> schedule = make_schedule(requests, sources, mesh, TransferLimits(read=2**20, placed=2**20))
    >>> read_by_process(schedule, requests, sources)
    {0: ReadVolume(bytes=64, count=1), 1: ReadVolume(bytes=64, count=1)}

    Args:
        requests, sources: the arguments that the schedule was made from.
    """
    mesh = schedule.mesh
    total = np.zeros((len(mesh.devices_by_process), 2), np.int64)
    known: dict[object, np.ndarray] = {}
    grids: dict[str, ViewGrid | None] = {}
    for transfer in schedule.transfers:
        view = requests[transfer.path].view
        if transfer.path not in grids:
            grids[transfer.path] = find_grid(view, sources)
        key = (
            transfer.strategy,
            transfer.local_shape,
            transfer.shape,
            _relative_pieces(transfer, view, sources, mesh),
        )
        if key not in known:  # layers are alike

            def volume_of(process: int, transfer: Transfer = transfer, view: View = view) -> ReadVolume:
                return sum_ranges(find_byte_ranges(transfer, view, sources, mesh, process))

            volumes = find_volumes(transfer, grids[transfer.path], view.shape, mesh, volume_of)
            known[key] = np.stack(volumes, axis=1)
        total += known[key]
    return {
        process: ReadVolume(*volume) for process, volume in zip(mesh.devices_by_process, total.tolist(), strict=True)
    }


def _relative_pieces(
    transfer: Transfer, view: View, sources: Mapping[str, TensorSource], mesh: DeviceMesh
) -> tuple[object, ...]:
    """Describe the pieces that all devices read in a transfer by their relative positions in the array and in files.

    Transfers with equal descriptions, strategies and shapes read equally many bytes and ranges.
    """
    start = transfer.start
    stop = tuple(
        (mesh.count(axes) - 1) * local + first + extent
        for axes, local, first, extent in zip(
            transfer.strategy.local, transfer.local_shape, start, transfer.shape, strict=True
        )
    )
    first_bits: dict[str, int] = {}
    pieces = []
    for piece in view.slice(start, stop).pieces:
        source = sources[piece.tensor]
        position = source.bit(piece.offset)
        distance = position - first_bits.setdefault(source.file, position)
        file = list(first_bits).index(source.file)
        pieces.append((piece.start, piece.shape, piece.strides, source.bits, file, distance, position % 8))
    return tuple(pieces)


def exchanged_bytes(transfer: Transfer, mesh: DeviceMesh) -> float:
    """Return the bytes that a device receives in the collectives of a transfer.

    >>> from shardplan.checkpoint.transfer.transfer import DeviceMesh, ReadStrategy, Transfer
    >>> mesh, strategy = DeviceMesh((("data", 4),), (0, 0, 1, 1)), ReadStrategy(((), ()), (), ("data",))
    >>> exchanged_bytes(Transfer("w", 2, strategy, (64, 8), (0, 0), (64, 8)), mesh)
    768.0
    """
    held = transfer.rows_per_device(mesh) * math.prod(transfer.row_shape) * transfer.itemsize
    received = 0.0
    for axis, dimension in transfer.strategy.collectives:
        n = mesh.sizes[axis]
        # an all-to-all leaves a device as much as it had; an all-gather leaves it the shards of all n devices
        received += held * (n - 1) / n if dimension is not None else held * (n - 1)
        held *= 1 if dimension is not None else n
    return received


@dataclass(frozen=True)
class _StoredArray:
    """An array of the model, and its location in a checkpoint."""

    view: View
    sources: Mapping[str, TensorSource]
    """Tensor name -> location of the tensor."""
    grid: ViewGrid | None
    nbytes: float
    """Stored bytes of the array."""
    is_small: bool


def _stored_bytes(view: View, grid: ViewGrid | None, sources: Mapping[str, TensorSource]) -> float:
    """Return the bytes that a view's elements take in files."""
    if grid is not None:
        return grid.nbytes
    bits = 0
    for part in view.parts:
        bits += math.prod(part.shape) * sum(sources[tensor].bits for tensor in part.tensors)
    return bits / 8


class _ReadCost(NamedTuple):
    """Cost of a read strategy; costs are compared lexicographically."""

    excess: float
    """Bytes that are read more than once, beyond `MAX_REREAD_BYTES`."""
    is_uneven: bool
    """Whether some process reads far more than the mean."""
    seconds: float
    collectives: int


def _cheapest(
    choices: Sequence[Sequence[Transfer]], array: _StoredArray, mesh: DeviceMesh, speeds: Speeds
) -> Sequence[Transfer]:
    """Return the transfers with the lowest cost among `choices`; the first of them if costs are equal."""
    # a cost looks at the reads of a fleet's processes, a bound does not: most choices are excluded by their bound
    bounds = [_lower_bound(transfers, array, mesh, speeds) for transfers in choices]
    best: tuple[_ReadCost, int] | None = None
    for bound, number in sorted(zip(bounds, range(len(choices)), strict=True)):
        if best is not None and bound > best[0]:
            break
        cost = _cost(choices[number], array, mesh, speeds), number
        best = cost if best is None else min(best, cost)
    assert best is not None
    return choices[best[1]]


def _lower_bound(transfers: Sequence[Transfer], array: _StoredArray, mesh: DeviceMesh, speeds: Speeds) -> _ReadCost:
    """Return a lower bound of the cost, without examining the reads of processes.

    A process reads no less than each of its devices. `ROUNDING` keeps a bound below the cost that it is a bound of.
    """
    first = transfers[0]
    processes = len(mesh.devices_by_process)
    elements = max(1, math.prod(array.view.shape))
    of_device = first.rows * math.prod(first.row_shape) / mesh.count(first.strategy.row_axes)
    read_bytes = array.nbytes / elements * of_device * _repetitions(first)
    excess = (1 - ROUNDING) * read_bytes * processes - array.nbytes - MAX_REREAD_BYTES
    exchanging_s = (1 - ROUNDING) * exchanged_bytes(first, mesh) / speeds.exchange * _repetitions(first)
    return _ReadCost(max(0.0, excess), False, exchanging_s, len(first.strategy.collectives))


def _repetitions(first: Transfer) -> float:
    """Return how many transfers of the shape of `first` the array needs."""
    return math.prod(first.local_shape) / max(1, math.prod(first.shape))


def _cost(transfers: Sequence[Transfer], array: _StoredArray, mesh: DeviceMesh, speeds: Speeds) -> _ReadCost:
    """Estimate the cost of all transfers of an array, extrapolated from the first transfer."""
    first = transfers[0]
    times = _repetitions(first)

    def volume_of(process: int) -> ReadVolume:
        if array.grid is not None:
            return estimate_grid_volume(first, array.grid, mesh, process)
        return estimate_read_volume(first, array.view, array.sources, mesh, process)

    processes = [*mesh.devices_by_process]
    if array.is_small and len(processes) > SMALL_SAMPLES:
        samples = [volume_of(processes[i * len(processes) // SMALL_SAMPLES]) for i in range(SMALL_SAMPLES)]
        read_bytes, ranges = np.array([(volume.bytes, volume.count) for volume in samples]).T
    else:
        read_bytes, ranges = find_volumes(first, array.grid, array.view.shape, mesh, volume_of, MAX_SAMPLES)
    reread_bytes = float(read_bytes.mean()) * len(processes) * times - array.nbytes
    is_uneven = bool(read_bytes.max() > MAX_IMBALANCE * read_bytes.mean())
    reading_s = float((read_bytes / speeds.read + ranges * speeds.request).max())
    exchanging_s = exchanged_bytes(first, mesh) / speeds.exchange
    excess = max(0.0, reread_bytes - MAX_REREAD_BYTES)
    return _ReadCost(excess, is_uneven, (reading_s + exchanging_s) * times, len(first.strategy.collectives))
