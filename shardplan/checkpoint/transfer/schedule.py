"""Who reads which bytes of a checkpoint. Pure arithmetic: no device, no file.

The devices of several processes need an array in parts that may be rows of a tensor, columns, or all of it. Where each
process can read its own parts in long ranges, it does (`moved` and `gathered` are empty). Elsewhere the devices that
share a box of the array read it once between them, each some of its rows, and exchange: an all-to-all turns rows into
the columns that each needs, an all-gather gives everybody everything. What costs less is taken, array by array.

An array is brought in boxes of bounded size, all devices the same one at a time: a `Transfer`.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from shardplan.checkpoint.mapping.views import Piece, Shape, View, boxes_of_range
from shardplan.plan.mapping import MeshAxes

Box = tuple[Shape, Shape]
"""First index, and one past the last, per dimension."""

GAP_BYTES = 64 * 1024
"""Ranges that are no further apart are read as one: the bytes between cost less than another request."""
MOST_READ_AGAIN = 256 * 1024
"""Bytes of an array that may be read more often than once, where that saves time."""
EVEN = 1.1
"""Times the mean, up to which processes read alike."""
MOST_RUNS = 4096
"""Ranges of one box, from which on they are only counted."""


@dataclass(frozen=True)
class Speeds:
    """What a choice between reading and exchanging goes by."""

    read: float = 2.5e10
    """Bytes per second that a process reads."""
    exchange: float = 4.5e10
    """Bytes per second that a device receives from others."""
    request: float = 0.05 / 64
    """Seconds that a request adds: the time to the first byte, divided by the requests that a process has in flight."""


DEFAULT_SPEEDS = Speeds()


@dataclass(frozen=True)
class Limits:
    """Most bytes of a transfer that one process has."""

    read: int
    """As its devices have read it."""
    placed: int
    """As it is put in place."""


@dataclass(frozen=True)
class Fleet:
    """A mesh of devices, and the processes that they belong to."""

    mesh: tuple[tuple[str, int], ...]
    """Mesh axis, size; major to minor."""
    processes: tuple[int, ...]
    """Process of the device at each place of the mesh, in row-major order."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size."""
        return dict(self.mesh)

    @cached_property
    def places(self) -> list[dict[str, int]]:
        """Index along every mesh axis, of each place."""
        names = [name for name, _ in self.mesh]
        return [dict(zip(names, index, strict=True)) for index in itertools.product(*(range(n) for _, n in self.mesh))]

    @cached_property
    def by_process(self) -> dict[int, list[int]]:
        """Process -> its places."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for place, process in enumerate(self.processes):
            found[process].append(place)
        return dict(sorted(found.items()))

    def count(self, axes: Iterable[str]) -> int:
        """Devices along `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, place: int, axes: Iterable[str]) -> int:
        """Where a place is along `axes`, major to minor."""
        found = 0
        for axis in axes:
            found = found * self.sizes[axis] + self.places[place][axis]
        return found


@dataclass(frozen=True)
class Sharing:
    """How devices read an array: cut as it will rest, or in rows that they exchange."""

    kept: tuple[MeshAxes, ...]
    """Mesh axes that cut each dimension while it is read."""
    moved: tuple[tuple[int, MeshAxes], ...] = ()
    """Dimensions that an all-to-all cuts afterwards, and by which mesh axes; all behind those that are kept cut."""
    gathered: MeshAxes = ()
    """Mesh axes along which everything read is gathered afterwards."""

    @cached_property
    def steps(self) -> list[tuple[str, int | None]]:
        """The exchanges in order: mesh axis, and the dimension that an all-to-all cuts, or None of an all-gather."""
        return [(a, d) for d, axes in self.moved for a in axes] + [(axis, None) for axis in self.gathered]

    @cached_property
    def shared(self) -> MeshAxes:
        """Mesh axes whose devices read different rows of the same box, major to minor: as the exchanges undo them."""
        return tuple(axis for axis, _ in reversed(self.steps))

    @property
    def first_moved(self) -> int:
        """The dimension where rows end: what is before it numbers them."""
        return self.moved[0][0] if self.moved else len(self.kept)


@dataclass(frozen=True)
class Transfer:
    """A box of an array that all devices read and place at once; of each the same part of what it keeps cut."""

    path: str
    itemsize: int
    """Bytes of an element on its way."""
    sharing: Sharing
    extents: Shape
    """Of what one device has of the array while reading, per dimension."""
    start: Shape
    """First index of the box in that."""
    shape: Shape

    @property
    def rows(self) -> int:
        """Rows of the box."""
        return math.prod(self.shape[: self.sharing.first_moved])

    @property
    def row(self) -> Shape:
        """Shape of one row, before the exchange."""
        return self.shape[self.sharing.first_moved :]

    def rows_each(self, fleet: Fleet) -> int:
        """Rows that a device reads at most."""
        return -(-self.rows // fleet.count(self.sharing.shared))

    def boxes(self, fleet: Fleet, place: int) -> list[tuple[Box, int]]:
        """What the device at `place` reads: boxes of the array, and the element of its rows where each goes."""
        each, tail = self.rows_each(fleet), math.prod(self.row)
        first = min(self.rows, each * fleet.index(place, self.sharing.shared))
        count = min(self.rows, first + each) - first
        origin = [
            fleet.index(place, axes) * extent + start
            for axes, extent, start in zip(self.sharing.kept, self.extents, self.start, strict=True)
        ]
        found = []
        for start, shape, skipped in boxes_of_range(first * tail, count * tail, self.shape):
            low = tuple(map(sum, zip(origin, start, strict=True)))
            found.append(((low, tuple(map(sum, zip(low, shape, strict=True)))), skipped))
        return found


@dataclass(frozen=True)
class Source:
    """Where a checkpoint tensor lies, and how wide its elements are."""

    file: str
    offset: int
    """Byte of the file where it starts."""
    itemsize: int


@dataclass(frozen=True)
class Ranges:
    """What a process reads for something."""

    bytes: int = 0
    count: int = 0

    def __add__(self, other: "Ranges") -> "Ranges":
        return Ranges(self.bytes + other.bytes, self.count + other.count)


@dataclass(frozen=True)
class Schedule:
    """How a checkpoint is brought to a fleet: transfers in order, arrays whole one after the other."""

    fleet: Fleet
    transfers: tuple[Transfer, ...]


def make_schedule(
    views: Mapping[str, View],
    sources: Mapping[str, Source],
    specs: Mapping[str, Sequence[MeshAxes]],
    itemsizes: Mapping[str, int],
    fleet: Fleet,
    most: Limits,
    speeds: Speeds = DEFAULT_SPEEDS,
) -> Schedule:
    """The schedule that costs least, array by array.

    Args:
        views: array path -> the tensor elements it is made of, as by `in_stored_order`.
        sources: tensor name -> where it lies.
        specs: array path -> mesh axes that cut each dimension at rest.
        itemsizes: array path -> bytes of an element on its way.
        most: how large a transfer may be.
    """
    transfers: list[Transfer] = []
    for path, view in views.items():
        ways = [Sharing(tuple(specs[path]))]
        if len(fleet.by_process) > 1:
            ways += sharings(view.shape, specs[path], fleet)
        choices = [list(transfers_of(path, view.shape, way, itemsizes[path], fleet, most)) for way in ways]
        if len(choices) > 1:
            choices.sort(key=partial(_cost, view=view, sources=sources, fleet=fleet, speeds=speeds))
        transfers += choices[0]
    return Schedule(fleet, tuple(transfers))


def in_stored_order(
    views: Mapping[str, View], specs: Mapping[str, Sequence[MeshAxes]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, View], dict[str, tuple[MeshAxes, ...]]]:
    """Order of the dimensions of every array as its elements are stored, and views and specs in that order.

    Rows are then rows of what is stored, also where the model has it transposed.
    """
    orders = {path: view.stored_order for path, view in views.items()}
    stored = {path: view.transposed(orders[path]) for path, view in views.items()}
    return orders, stored, {path: tuple(specs[path][d] for d in order) for path, order in orders.items()}


def sharings(shape: Shape, spec: Sequence[MeshAxes], fleet: Fleet) -> Iterator[Sharing]:
    """The ways to share the reading of an array of `shape` that rests cut by `spec`: from each of its cuts on."""
    used = {axis for axes in spec for axis in axes}
    gathered = tuple(axis for axis, n in fleet.mesh if axis not in used and n > 1)
    cut = [d for d, axes in enumerate(spec) if fleet.count(axes) > 1]
    for first in (*(d for d in cut if any(n > 1 for n in shape[:d])), len(shape)):
        moved = tuple((d, tuple(a for a in spec[d] if fleet.sizes[a] > 1)) for d in cut if d >= first)
        if moved or gathered:
            kept = tuple(axes if d < first else () for d, axes in enumerate(spec))
            yield Sharing(kept, moved, gathered)


def process_ranges(
    transfer: Transfer, view: View, sources: Mapping[str, Source], fleet: Fleet, process: int
) -> list[tuple[str, int, int]]:
    """File, first byte, and one past the last, of what a process reads for a transfer; ranges that touch are one."""
    runs = sorted(run for piece in _pieces(transfer, view, fleet, process) for run in _runs(piece, sources))
    joined: list[tuple[str, int, int]] = []
    for file, low, high in runs:
        if joined and joined[-1][0] == file and low <= joined[-1][2]:
            joined[-1] = (file, joined[-1][1], max(high, joined[-1][2]))
        else:
            joined.append((file, low, high))
    return joined


def merged(boxes: Iterable[Box]) -> list[Box]:
    """The same elements in fewer boxes: those that are alike but for one dimension, and touch there, are one."""
    found = sorted(set(boxes))
    for d in range(len(found[0][0]) if found else 0):
        found.sort(key=lambda box: (box[0][:d], box[0][d + 1 :], box[1][:d], box[1][d + 1 :], box[0][d]))
        joined = found[:1]
        for start, stop in found[1:]:
            last_start, last_stop = joined[-1]
            touch = start[d] == last_stop[d]
            alike = _without(start, d) == _without(last_start, d) and _without(stop, d) == _without(last_stop, d)
            if alike and touch:
                joined[-1] = (last_start, stop)
            else:
                joined.append((start, stop))
        found = joined
    return found


def read_by_process(schedule: Schedule, views: Mapping[str, View], sources: Mapping[str, Source]) -> dict[int, Ranges]:
    """Process -> what it reads in all."""
    total = dict.fromkeys(schedule.fleet.by_process, Ranges())
    for transfer in schedule.transfers:
        for process in total:
            total[process] += _sum(process_ranges(transfer, views[transfer.path], sources, schedule.fleet, process))
    return total


@dataclass(frozen=True)
class Runs:
    """The ranges of a tensor that a box takes; short gaps count as a part of them."""

    elements: int
    """Of each, from its first to its last."""
    dimensions: tuple[tuple[int, int], ...]
    """Those that number the runs: elements between two of them, and how many there are."""

    @property
    def count(self) -> int:
        """How many there are."""
        return math.prod(count for _, count in self.dimensions)


def runs_of(piece: Piece, itemsize: int) -> Runs:
    """The runs of a piece of a tensor with elements of `itemsize` bytes."""
    dimensions = sorted((k, n) for n, k in zip(piece.shape, piece.strides, strict=True) if n > 1 and k)
    run = 1
    while dimensions and (dimensions[0][0] - run) * itemsize <= GAP_BYTES:
        stride, count = dimensions.pop(0)
        run += stride * (count - 1)
    return Runs(run, tuple(dimensions))


def exchanged_bytes(transfer: Transfer, fleet: Fleet) -> float:
    """Bytes that a device receives in the exchanges of a transfer."""
    held = transfer.rows_each(fleet) * math.prod(transfer.row) * transfer.itemsize
    received = 0.0
    for axis, dimension in transfer.sharing.steps:
        n = fleet.sizes[axis]
        received += held * (n - 1) / n if dimension is not None else held * (n - 1)
        held *= 1 if dimension is not None else n
    return received


def transfers_of(
    path: str,
    shape: Shape,
    sharing: Sharing,
    itemsize: int,
    fleet: Fleet,
    most: Limits,
) -> Iterator[Transfer]:
    """All of an array, in boxes within `most`."""
    extents = tuple(n // fleet.count(axes) for n, axes in zip(shape, sharing.kept, strict=True))
    on_process = itemsize * max(map(len, fleet.by_process.values()))
    read = most.read // on_process * fleet.count(sharing.shared)
    placed = most.placed // on_process * math.prod(fleet.count(axes) for _, axes in sharing.moved)
    shares = fleet.count(sharing.shared)
    for start, size in _split(extents, sharing.first_moved, max(1, min(read, placed)), shares):
        yield Transfer(path, itemsize, sharing, extents, start, size)


def _split(extents: Shape, whole_from: int, most: int, shares: int) -> Iterator[tuple[Shape, Shape]]:
    """Start and shape of boxes of at most `most` elements, or the least without a cut in dimensions `whole_from` on.

    Their rows divide among `shares` devices where that can be.
    """
    several = [d for d in range(whole_from) if extents[d] > 1]
    if math.prod(extents) <= most or not several:
        yield (0,) * len(extents), extents
        return
    outer = several[0]
    step = max(1, most // max(1, math.prod(extents[outer + 1 :])))
    even = shares // math.gcd(shares, math.prod(extents[outer + 1 : whole_from]))
    step = step // even * even or 1
    for first in range(0, extents[outer], step):
        part = (*extents[:outer], min(step, extents[outer] - first), *extents[outer + 1 :])
        for start, shape in _split(part, whole_from, most, shares) if step == 1 else [((0,) * len(part), part)]:
            yield (*start[:outer], start[outer] + first, *start[outer + 1 :]), shape


def _cost(
    transfers: Sequence[Transfer], view: View, sources: Mapping[str, Source], fleet: Fleet, speeds: Speeds
) -> tuple[float, bool, float, int]:
    """Of all transfers of an array, by the first: bytes that should not be read again, whether some process reads far
    more than others, seconds, exchanges."""
    first = transfers[0]
    times = math.prod(first.extents) / max(1, math.prod(first.shape))
    found = [_roughly(first, view, sources, fleet, process) for process in fleet.by_process]
    once = sum(piece.size * sources[piece.tensor].itemsize for piece in view.pieces)
    read = sum(ranges.bytes for ranges in found)
    again = read * times - once
    uneven = max(ranges.bytes for ranges in found) > EVEN * read / len(found)
    reading = max(ranges.bytes / speeds.read + ranges.count * speeds.request for ranges in found)
    exchanging = exchanged_bytes(first, fleet) / speeds.exchange
    return max(0.0, again - MOST_READ_AGAIN), uneven, (reading + exchanging) * times, len(first.sharing.steps)


def _roughly(transfer: Transfer, view: View, sources: Mapping[str, Source], fleet: Fleet, process: int) -> Ranges:
    """What `process_ranges` come to; where they are very many, without what joins them."""
    pieces = _pieces(transfer, view, fleet, process)
    itemsizes = [sources[piece.tensor].itemsize for piece in pieces]
    runs = [runs_of(piece, itemsize) for piece, itemsize in zip(pieces, itemsizes, strict=True)]
    if all(run.count <= MOST_RUNS for run in runs):
        return _sum(process_ranges(transfer, view, sources, fleet, process))
    size = sum(run.count * run.elements * itemsize for run, itemsize in zip(runs, itemsizes, strict=True))
    return Ranges(size, sum(run.count for run in runs))


def _pieces(transfer: Transfer, view: View, fleet: Fleet, process: int) -> list[Piece]:
    boxes = merged(box for place in fleet.by_process[process] for box, _ in transfer.boxes(fleet, place))
    return [piece for start, stop in boxes for piece in view.inside(start, stop)]


def _runs(piece: Piece, sources: Mapping[str, Source]) -> Iterator[tuple[str, int, int]]:
    """File, first byte, and one past the last, of what a piece takes; short gaps are read over."""
    source = sources[piece.tensor]
    runs = runs_of(piece, source.itemsize)
    for index in itertools.product(*(range(count) for _, count in runs.dimensions)):
        low = piece.offset + sum(i * stride for i, (stride, _) in zip(index, runs.dimensions, strict=True))
        yield (
            source.file,
            source.offset + low * source.itemsize,
            source.offset + (low + runs.elements) * source.itemsize,
        )


def _without(values: Shape, index: int) -> Shape:
    return (*values[:index], *values[index + 1 :])


def _sum(ranges: Sequence[tuple[str, int, int]]) -> Ranges:
    return Ranges(sum(high - low for _, low, high in ranges), len(ranges))
