"""Transfers: the boxes by which an array is read, and the rows of each box that each device reads. Pure arithmetic.

An array is transferred in boxes of bounded size, all devices working on one box at a time: a `Transfer`. Its
`ReadStrategy` says whether every device reads its own shard, or whether the devices that share a box each read some of
its rows and then exchange them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardplan.checkpoint.mapping.views import Shape, split_range
from shardplan.plan.mapping import MeshAxes

Box = tuple[Shape, Shape]
"""A box of an array: (first index, one past the last index), per dimension."""


@dataclass(frozen=True)
class TransferLimits:
    """The largest size of a transfer, in bytes per process."""

    read: int
    """Bytes that a process's devices read, before the exchange."""
    placed: int
    """Bytes that are written to a process's shards, after the exchange."""


@dataclass(frozen=True, eq=False)  # a key of caches, for which tens of thousands of devices are too many to compare
class DeviceMesh:
    """Mesh axes, and the process of every device; a device index counts mesh coordinates in row-major order."""

    axes: tuple[tuple[str, int], ...]
    """(Mesh axis, size), major to minor."""
    processes: tuple[int, ...]
    """Process of the device at each device index."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size."""
        return dict(self.axes)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Mesh axis -> difference of the device indices of neighbours along the axis."""
        sizes = [n for _, n in self.axes]
        return {axis: math.prod(sizes[i + 1 :]) for i, (axis, _) in enumerate(self.axes)}

    @cached_property
    def devices_by_process(self) -> dict[int, list[int]]:
        """Process -> its device indices."""
        devices: defaultdict[int, list[int]] = defaultdict(list)
        for device, process in enumerate(self.processes):
            devices[process].append(device)
        return dict(sorted(devices.items()))

    def count(self, axes: Iterable[str]) -> int:
        """Return the number of devices along `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    @cached_property
    def process_devices(self) -> np.ndarray:
        """Device indices of every process, int[process, device]; short rows are padded with their first device."""
        most = self.max_local_devices
        return np.array([[*each, *[each[0]] * (most - len(each))] for each in self.devices_by_process.values()])

    @cached_property
    def max_local_devices(self) -> int:
        """Number of devices of the process that has the most."""
        return max(map(len, self.devices_by_process.values()))

    def index(self, device: int, axes: Iterable[str]) -> int:
        """Return the index of a device along `axes` together, major to minor."""
        result = 0
        for axis in axes:
            result = result * self.sizes[axis] + device // self.strides[axis] % self.sizes[axis]
        return result

    def indices(self, axes: Iterable[str]) -> np.ndarray:
        """Return the indices along `axes` of all devices of all processes, in the order of `process_devices`."""
        result = np.zeros_like(self.process_devices)
        for axis in axes:
            result = result * self.sizes[axis] + self._process_coordinates[axis]
        return result

    @cached_property
    def _process_coordinates(self) -> dict[str, np.ndarray]:
        """Return mesh axis -> index along it of every device in `process_devices`."""
        return {axis: self.process_devices // self.strides[axis] % size for axis, size in self.axes}


@dataclass(frozen=True)
class ReadStrategy:
    """How devices read an array: each reads its own shard, or rows that collectives turn into shards."""

    local: tuple[MeshAxes, ...]
    """Mesh axes that shard each dimension while the array is read."""
    all_to_all: tuple[tuple[int, MeshAxes], ...] = ()
    """Dimension -> mesh axes by which an all-to-all shards it after the read, minor to its `local` axes."""
    all_gather: MeshAxes = ()
    """Mesh axes along which an all-gather replicates the rows after the read."""

    @cached_property
    def collectives(self) -> list[tuple[str, int | None]]:
        """The collectives in order, each (mesh axis, dimension that an all-to-all shards; None for an all-gather)."""
        return [(a, d) for d, axes in self.all_to_all for a in axes] + [(axis, None) for axis in self.all_gather]

    @cached_property
    def row_axes(self) -> MeshAxes:
        """Mesh axes whose devices read different rows of a box, major to minor, in reverse order of the collectives."""
        return tuple(axis for axis, _ in reversed(self.collectives))

    @property
    def row_rank(self) -> int:
        """Number of leading dimensions that index the rows; the dimensions after them make up a row."""
        return self.all_to_all[0][0] if self.all_to_all else len(self.local)


@dataclass(frozen=True)
class Transfer:
    """A box of an array that all devices read and write together, each at the same offset of its shard."""

    path: str
    itemsize: int
    """Bytes of an element in transit."""
    strategy: ReadStrategy
    local_shape: Shape
    """Shape of a device's part of the array while the array is read with the sharding `strategy.local`."""
    start: Shape
    """First index of the box in a device's part, per dimension."""
    shape: Shape
    """Extent of the box, per dimension."""

    @property
    def rows(self) -> int:
        """Number of rows of the box."""
        return math.prod(self.shape[: self.strategy.row_rank])

    @property
    def row_shape(self) -> Shape:
        """Shape of one row, before the exchange."""
        return self.shape[self.strategy.row_rank :]

    def placed_shape(self, sizes: Mapping[str, int]) -> Shape:
        """Return the shape of a device's part of the box after the exchange.

        Args:
            sizes: mesh axis -> size.
        """
        parts = {d: math.prod(sizes[axis] for axis in axes) for d, axes in self.strategy.all_to_all}
        return tuple(n // parts.get(d, 1) for d, n in enumerate(self.shape))

    def rows_per_device(self, mesh: DeviceMesh) -> int:
        """Return the largest number of rows that a device reads."""
        return -(-self.rows // mesh.count(self.strategy.row_axes))

    def boxes(self, mesh: DeviceMesh, device: int) -> list[tuple[Box, int]]:
        """Return the boxes that the device with index `device` reads.

        Returns:
            Each box of the array, with the position of its first element in the device's rows.
        """
        per_device, row_size = self.rows_per_device(mesh), math.prod(self.row_shape)
        first = min(self.rows, per_device * mesh.index(device, self.strategy.row_axes))
        count = min(self.rows, first + per_device) - first
        origin = [
            mesh.index(device, axes) * extent + start
            for axes, extent, start in zip(self.strategy.local, self.local_shape, self.start, strict=True)
        ]
        boxes = []
        for start, shape, skipped in split_range(first * row_size, count * row_size, self.shape):
            low = tuple(map(sum, zip(origin, start, strict=True)))
            boxes.append(((low, tuple(map(sum, zip(low, shape, strict=True)))), skipped))
        return boxes


def make_transfers(
    path: str,
    shape: Shape,
    strategy: ReadStrategy,
    itemsize: int,
    mesh: DeviceMesh,
    limits: TransferLimits,
    placed_bytes: int | None = None,
) -> Iterator[Transfer]:
    """Split an array of `shape` into transfers within `limits`.

    >>> mesh, strategy = DeviceMesh((("model", 2),), processes=(0, 1)), ReadStrategy((("model",), ()))
    >>> limits = TransferLimits(read=2048, placed=2048)
    >>> [(each.start, each.shape) for each in make_transfers("w", (64, 64), strategy, 2, mesh, limits)]
    [((0, 0), (16, 64)), ((16, 0), (16, 64))]

    Args:
        itemsize: bytes of an element in transit.
        placed_bytes: bytes of an element on its device; default: the same.
    """
    local_shape = tuple(n // mesh.count(axes) for n, axes in zip(shape, strategy.local, strict=True))
    devices = mesh.max_local_devices
    readers = mesh.count(strategy.row_axes)
    read = limits.read // (itemsize * devices) * readers
    placed = limits.placed // ((placed_bytes or itemsize) * devices)
    placed *= math.prod(mesh.count(axes) for _, axes in strategy.all_to_all)
    for start, size in _split_box(local_shape, strategy.row_rank, max(1, min(read, placed)), readers):
        yield Transfer(path, itemsize, strategy, local_shape, start, size)


def _split_box(shape: Shape, row_rank: int, max_elements: int, readers: int) -> Iterator[tuple[Shape, Shape]]:
    """Split an array of `shape` along its first `row_rank` dimensions into boxes of at most `max_elements`.

    A single row is a box even if it is larger. The rows of a box divide among `readers` devices where possible.

    Yields:
        Start and shape of each box.
    """
    several = [d for d in range(row_rank) if shape[d] > 1]
    if math.prod(shape) <= max_elements or not several:
        yield (0,) * len(shape), shape
        return
    outer = several[0]
    step = max(1, max_elements // max(1, math.prod(shape[outer + 1 :])))
    even = readers // math.gcd(readers, math.prod(shape[outer + 1 : row_rank]))
    step = step // even * even or 1
    for first in range(0, shape[outer], step):
        part = (*shape[:outer], min(step, shape[outer] - first), *shape[outer + 1 :])
        boxes = _split_box(part, row_rank, max_elements, readers) if step == 1 else [((0,) * len(part), part)]
        for start, size in boxes:
            yield (*start[:outer], start[outer] + first, *start[outer + 1 :]), size
