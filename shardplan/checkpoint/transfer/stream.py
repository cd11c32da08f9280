"""Bring a checkpoint into sharded arrays, transfer by transfer: read, exchange where devices share a box, put in place.

Nothing is assembled: no array exists whole unless its sharding says so. Host memory beside the arrays is bounded, and
reads go on while what was read before is on its way to the devices.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.views import View
from shardplan.checkpoint.transfer.destination import Destination, DeviceDestination, HostDestination, Rest
from shardplan.checkpoint.transfer.exchange import exchange
from shardplan.checkpoint.transfer.reading import Target, fill, reads
from shardplan.checkpoint.transfer.schedule import (
    Box,
    Fleet,
    Limits,
    MeshAxes,
    Source,
    Transfer,
    in_stored_order,
    make_schedule,
    read_by_process,
)
from shardplan.runtime.process_group import ProcessGroup
from shardplan.runtime.progress import load_progress

BUDGET = 2 * 2**30
"""Default of the host memory that a load may use beside the arrays, bytes."""
TRANSFER_BYTES = 64 * 2**20
"""Most bytes of a transfer that one process reads."""
PLACED_BYTES = 256 * 2**20
"""Most bytes of a transfer in the accelerators of one process, beside the arrays."""
NO_MESH = Mesh(np.empty((), dtype=object), ())
IN_FLIGHT = 64
"""Transfers whose reads are under way at once."""


def stream_arrays(
    views: Mapping[str, View],
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    specs: Mapping[str, Sequence[MeshAxes]],
    dtypes: Mapping[str, np.dtype],
    processes: ProcessGroup,
    budget: int = BUDGET,
    adopts: bool | None = None,
) -> dict[str, jax.Array]:
    """The arrays that `views` describe, read from `tensors`, sharded over `mesh` and cast.

    Every process of the mesh calls this at once, with the same arguments.

    Args:
        views: array path -> the tensor elements it is made of.
        tensors: tensor name -> where it lies.
        specs: array path -> the mesh axes that cut each dimension.
        dtypes: array path -> type.
        processes: the processes of the mesh.
        budget: most bytes of host memory beside the arrays.
        adopts: whether the devices take over host memory that was read into; default: whether they are CPU devices.

    Raises:
        CheckpointError: a file is cut short or cannot be read.
    """
    loading = _Loading(views, tensors, mesh, specs, dtypes, budget, adopts)
    # where the caller has a mesh, jax would have every operation on one device be on all of them
    with jax.set_mesh(NO_MESH), load_progress(loading.nbytes, processes) as report:
        return loading.run(report)


@dataclass(frozen=True)
class _Flight:
    """A transfer whose reads are under way."""

    transfer: Transfer
    reads: list[Future[int]]
    staged: dict[int, np.ndarray]
    """Place -> what its device has read; nothing where it is read in place."""
    nbytes: int
    """Host memory that it needs beside the arrays."""


class _Loading:
    """One load: its schedule, and what is under way."""

    def __init__(
        self,
        views: Mapping[str, View],
        tensors: Mapping[str, Tensor],
        mesh: Mesh,
        specs: Mapping[str, Sequence[MeshAxes]],
        dtypes: Mapping[str, np.dtype],
        budget: int,
        adopts: bool | None,
    ) -> None:
        self.tensors, self.mesh, self.dtypes = tensors, mesh, dtypes
        self.shapes = {path: view.shape for path, view in views.items()}
        self.shardings = {
            path: NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec))) for path, spec in specs.items()
        }
        self.orders, self.views, stored_specs = in_stored_order(views, specs)
        devices = list(mesh.devices.flat)
        self.fleet = Fleet(tuple(mesh.shape.items()), tuple(device.process_index for device in devices))
        self.places = {place: devices[place] for place in self.fleet.by_process[jax.process_index()]}
        self.adopts = devices[0].platform == "cpu" if adopts is None else adopts
        stored = {name: tensor.dtype for name, tensor in tensors.items()}
        self.travelling = {path: travelling(view, stored, dtypes[path]) for path, view in views.items()}
        paces = {tensor.file.pace for tensor in tensors.values()}
        self.threads = max(pace.at_once for pace in paces)
        self.read_bytes = min(budget // (4 * self.threads), *(pace.nbytes for pace in paces))
        self.flight_bytes = budget - self.threads * self.read_bytes
        self.sources = {
            name: Source(tensor.file.name, tensor.offset, tensor.dtype.itemsize) for name, tensor in tensors.items()
        }
        self.schedule = make_schedule(
            self.views,
            self.sources,
            stored_specs,
            {path: dtype.itemsize for path, dtype in self.travelling.items()},
            self.fleet,
            transfer_limits(self.flight_bytes, self.adopts),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that all processes read together."""
        read = read_by_process(self.schedule, self.views, self.sources)
        return sum(ranges.bytes for ranges in read.values())

    def run(self, report: Callable[[int], object]) -> dict[str, jax.Array]:
        """Every array by its path; `report` is called with the bytes of each read."""
        left = Counter(transfer.path for transfer in self.schedule.transfers)
        destinations: dict[str, Destination] = {}
        arrays: dict[str, jax.Array] = {}
        flights: deque[_Flight] = deque()

        def land() -> None:
            flight = flights.popleft()
            for each in flight.reads:
                report(each.result())
            path = flight.transfer.path
            self._put(flight, destinations[path])
            left[path] -= 1
            if not left[path]:
                arrays[path] = destinations.pop(path).finish()

        with ThreadPoolExecutor(self.threads) as pool:
            try:
                for transfer in self.schedule.transfers:
                    needed = self._staging_bytes(transfer)
                    while len(flights) == IN_FLIGHT or (
                        flights and needed + sum(flight.nbytes for flight in flights) > self.flight_bytes
                    ):
                        land()
                    if transfer.path not in destinations:
                        destinations[transfer.path] = self._destination(transfer.path)
                    flights.append(self._start(transfer, destinations[transfer.path], pool))
                while flights:
                    land()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return arrays

    def _destination(self, path: str) -> Destination:
        kind = HostDestination if self.adopts else DeviceDestination
        sharding = self.shardings[path]
        return kind(Rest(self.shapes[path], self.dtypes[path], sharding, self.places, self.orders[path]))

    def _staging_bytes(self, transfer: Transfer) -> int:
        if transfer.sharing.steps:
            # and what comes of the exchange
            rows = transfer.rows_each(self.fleet) * math.prod(transfer.row)
            return 2 * len(self.places) * rows * transfer.itemsize
        return 0 if self.adopts else len(self._boxes(transfer)) * math.prod(transfer.shape) * transfer.itemsize

    def _start(self, transfer: Transfer, destination: Destination, pool: ThreadPoolExecutor) -> _Flight:
        """Begin to read a transfer: in place where that can be, else into memory of its own."""
        dtype = self.travelling[transfer.path]
        staged: dict[int, np.ndarray] = {}
        targets = []
        if transfer.sharing.steps:
            for place in self.places:
                staged[place] = np.empty((transfer.rows_each(self.fleet), *transfer.row), dtype)
                rows = staged[place].reshape(-1)
                for (start, stop), first in transfer.boxes(self.fleet, place):
                    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
                    targets.append(Target(start, rows[first : first + math.prod(shape)].reshape(shape)))
        else:
            for (start, _), places in self._boxes(transfer).items():
                window = destination.window(places[0], transfer.start, transfer.shape)
                if window is None:
                    window = np.empty(transfer.shape, dtype)
                    staged |= dict.fromkeys(places, window)
                targets.append(Target(start, window))
        view = self.views[transfer.path]
        futures = [pool.submit(fill, read) for read in reads(view, self.tensors, targets, self.read_bytes)]
        return _Flight(transfer, futures, staged, self._staging_bytes(transfer))

    def _boxes(self, transfer: Transfer) -> dict[Box, list[int]]:
        """The distinct boxes that local devices read by themselves, and their places."""
        found: dict[Box, list[int]] = {}
        for place in self.places:
            for box, _ in transfer.boxes(self.fleet, place):
                found.setdefault(box, []).append(place)
        return found

    def _put(self, flight: _Flight, destination: Destination) -> None:
        transfer = flight.transfer
        parts: Mapping[int, np.ndarray | jax.Array] = flight.staged
        if transfer.sharing.steps:
            parts = exchange(self.mesh, transfer, flight.staged, self.travelling[transfer.path])
        for place, part in parts.items():
            destination.put(place, transfer.start, part)
        destination.settle()


def transfer_limits(budget: int, adopts: bool) -> Limits:
    """How large a transfer may be, of several that share `budget` bytes of host memory."""
    read = min(TRANSFER_BYTES, budget // 4)
    return Limits(read, read if adopts else PLACED_BYTES)


def travelling(view: View, stored_as: Mapping[str, np.dtype], wanted: np.dtype) -> np.dtype:
    """The type of an array on its way: of what is stored and what is wanted the narrower, so that less is moved.

    Args:
        stored_as: tensor name -> its type.
    """
    kinds = {stored_as[piece.tensor] for piece in view.pieces}
    is_plain = len(kinds) == 1 and all(piece.scale == 1 for piece in view.pieces)
    stored = next(iter(kinds)) if is_plain else wanted
    return stored if stored.itemsize < wanted.itemsize else wanted
