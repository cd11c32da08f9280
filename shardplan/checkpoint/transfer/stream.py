"""Stream a checkpoint into sharded arrays, transfer by transfer: read, exchange rows, decode, write into the shards.

No array exists unsharded unless its sharding is replicated. Host memory beyond the arrays is bounded, and reads
continue while what was read before is on its way to the devices.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.transfer.devices.decoding import make_decoder
from shardplan.checkpoint.transfer.devices.destination import (
    ArrayPlacement,
    Destination,
    DeviceDestination,
    HostDestination,
)
from shardplan.checkpoint.transfer.devices.exchange import Decoding, exchange_rows
from shardplan.checkpoint.transfer.load_plan import plan_load
from shardplan.checkpoint.transfer.reads.reading import ReadTarget, plan_reads, run_read
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.checkpoint.transfer.schedule import read_by_process
from shardplan.checkpoint.transfer.transfer import Box, DeviceMesh, Transfer
from shardplan.errors import ConfigError
from shardplan.runtime.garbage import without_garbage_collection
from shardplan.runtime.process_progress import load_progress
from shardplan.runtime.processes.group import ProcessGroup, short_text
from shardplan.runtime.processes.watch.activity import DEADLINE_S

DEFAULT_BUDGET = 2 * 2**30
"""Host memory, in bytes, that a load may use beyond the arrays."""
EMPTY_MESH = Mesh(np.empty((), dtype=object), ())
MAX_IN_FLIGHT = 64
"""Maximum number of transfers whose reads are in flight at the same time."""


def stream_arrays(
    requests: Mapping[str, ArrayRequest],
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    processes: ProcessGroup,
    budget: int = DEFAULT_BUDGET,
    zero_copy: bool | None = None,
    deadline_s: float = DEADLINE_S,
) -> dict[str, jax.Array]:
    """Read arrays from `tensors`, sharded over `mesh` and cast to the requested types.

    Every process of the mesh calls this at once, with the same arguments.

    Args:
        requests: array path -> the array to load.
        tensors: tensor name -> tensor and its location.
        processes: the processes of the mesh.
        budget: most host memory to use beyond the arrays, bytes.
        zero_copy: whether devices adopt the host memory that was read into; default: whether they are CPU devices.
        deadline_s: most seconds without progress.

    Raises:
        CheckpointError: a file is truncated or cannot be read.
        ConfigError: processes have other arguments, or another schedule.
    """

    @without_garbage_collection()
    def plan() -> _ArrayStream:
        return _ArrayStream(requests, tensors, mesh, budget, zero_copy)

    stream = processes.agree("schedule", plan, _ArrayStream.describe, _other_schedule)
    # under a mesh of the caller, jax would run every operation on one device on all devices of that mesh
    with jax.set_mesh(EMPTY_MESH), load_progress(stream.nbytes, processes, deadline_s) as report:
        return stream.run(report)


def _other_schedule(part: str, process: int, value: str | None, expected: str | None) -> ConfigError:
    return ConfigError(
        f"{part} is {value} in process {process} and {expected} in process 0; load with the same arguments, and the "
        "same versions of Python and its packages, in all processes"
    )


@dataclass(frozen=True)
class _PendingTransfer:
    """A transfer whose reads are in flight."""

    transfer: Transfer
    reads: list[Future[int]]
    staged: dict[int, np.ndarray]
    """Device index -> host memory that receives the device's part; empty if reads go directly to the shards."""
    nbytes: int
    """Bytes of host memory that the transfer needs beyond the arrays."""


class _ArrayStream:
    """The state of one load: its schedule, and the transfers in flight."""

    def __init__(
        self,
        requests: Mapping[str, ArrayRequest],
        tensors: Mapping[str, Tensor],
        mesh: Mesh,
        budget: int,
        zero_copy: bool | None,
    ) -> None:
        """Divide the budget, and plan all transfers; takes the arguments of `stream_arrays`."""
        devices = list(mesh.devices.flat)
        self.device_mesh = DeviceMesh(tuple(mesh.shape.items()), tuple(device.process_index for device in devices))
        local_devices = self.device_mesh.devices_by_process[jax.process_index()]
        self.devices = {index: devices[index] for index in local_devices}
        self.zero_copy = devices[0].platform == "cpu" if zero_copy is None else zero_copy
        self.mesh = mesh
        tunings = {tensor.file.tuning for tensor in tensors.values()}
        # of this host alone: another may have more processors, or a file in its cache that this one streams
        self.threads = max(tuning.concurrent_reads for tuning in tunings)
        self.read_bytes = min(budget // (4 * self.threads), *(tuning.bytes_per_read for tuning in tunings))
        self.pending_bytes = budget - self.threads * self.read_bytes
        self.plan = plan_load(requests, tensors, self.device_mesh, budget, self.zero_copy)

    def describe(self) -> dict[str, str]:
        """Return name -> text or digest of each setting that must be equal in all processes for their collectives."""
        plan = self.plan
        values = {
            "the mesh": [self.device_mesh.axes, self.device_mesh.processes],
            "the most bytes of a transfer": vars(plan.limits),
            **{f"the type of {path}": f"{request.dtype}" for path, request in plan.requests.items()},
            **{f"the sharding of {path}": f"{tuple(_pspec(request))}" for path, request in plan.requests.items()},
            "the location of the tensors": plan.sources,
            "the type of values in transit": {path: request.dtype for path, request in plan.in_transit.items()},
            "the schedule": plan.schedule.transfers,
        }
        return {name: short_text(value if isinstance(value, str) else repr(value)) for name, value in values.items()}

    @property
    def nbytes(self) -> int:
        """Bytes that all processes read together."""
        volumes = read_by_process(self.plan.schedule, self.plan.in_transit, self.plan.sources)
        return sum(volume.bytes for volume in volumes.values())

    def run(self, report: Callable[[int, str], object]) -> dict[str, jax.Array]:
        """Run all transfers and return every array by its path; `report` takes the bytes and the array of each read."""
        remaining = Counter(transfer.path for transfer in self.plan.schedule.transfers)
        destinations: dict[str, Destination] = {}
        decodings: dict[str, Decoding] = {}
        arrays: dict[str, jax.Array] = {}
        pending: deque[_PendingTransfer] = deque()

        def complete_oldest() -> None:
            """Wait for the reads of the oldest transfer, write it, and finish its array after the last one."""
            oldest = pending.popleft()
            path = oldest.transfer.path
            for read in oldest.reads:
                report(read.result(), path)
            codes = self.plan.requests[path].codes
            if codes is not None and path not in decodings:  # its scales were loaded before
                decodings[path] = self._make_decoding(path, arrays.pop(codes.scales))
            self._write(oldest, destinations[path], decodings.get(path))
            remaining[path] -= 1
            if not remaining[path]:
                arrays[path] = destinations.pop(path).finish()
                decodings.pop(path, None)

        with ThreadPoolExecutor(self.threads) as pool:
            try:
                for transfer in self.plan.schedule.transfers:
                    required = self._staging_bytes(transfer)
                    while len(pending) == MAX_IN_FLIGHT or (
                        pending and required + sum(each.nbytes for each in pending) > self.pending_bytes
                    ):
                        complete_oldest()
                    if transfer.path not in destinations:
                        destinations[transfer.path] = self._make_destination(transfer.path)
                    pending.append(self._start_reads(transfer, destinations[transfer.path], pool))
                while pending:
                    complete_oldest()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return arrays

    def _make_destination(self, path: str) -> Destination:
        """Allocate the shards that an array is loaded into: in host memory if devices adopt it."""
        kind = HostDestination if self.zero_copy else DeviceDestination
        request = self.plan.requests[path]
        sharding, order = NamedSharding(self.mesh, _pspec(request)), request.view.stored_order
        return kind(ArrayPlacement(request.view.shape, request.dtype, sharding, self.devices, order))

    def _make_decoding(self, path: str, scales: jax.Array) -> Decoding:
        """Return the decoder and the scales of an array that is sent as codes."""
        return Decoding(make_decoder(self.plan.requests[path], self.device_mesh.sizes), scales)

    def _staging_bytes(self, transfer: Transfer) -> int:
        """Return the bytes of host memory that a transfer needs beyond the arrays; 0 if it is read into the shards."""
        if self._is_read_into_shards(transfer):
            return 0
        placed = len(self.devices) * math.prod(transfer.placed_shape(self.device_mesh.sizes))
        codes = self.plan.requests[transfer.path].codes
        # devices whose memory is the host's make numbers of codes there
        numbers = placed * codes.value_bytes if codes is not None and self.zero_copy else 0
        if transfer.strategy.collectives:
            rows = transfer.rows_per_device(self.device_mesh) * math.prod(transfer.row_shape)
            # twice: the rows, and what the exchange returns
            return 2 * len(self.devices) * rows * transfer.itemsize + numbers
        return len(self._local_boxes(transfer)) * math.prod(transfer.shape) * transfer.itemsize + numbers

    def _is_read_into_shards(self, transfer: Transfer) -> bool:
        """Return whether a transfer is read directly into shards in host memory, without exchange and decoding."""
        return self.zero_copy and not transfer.strategy.collectives and self.plan.requests[transfer.path].codes is None

    def _start_reads(self, transfer: Transfer, destination: Destination, pool: ThreadPoolExecutor) -> _PendingTransfer:
        """Start the reads of a transfer.

        If the transfer has no collectives and its shards are in host memory, reads go directly into the shards.
        Otherwise they go into staging memory, from which `_write` moves them on.
        """
        request = self.plan.in_transit[transfer.path]
        staged: dict[int, np.ndarray] = {}
        targets = []
        if transfer.strategy.collectives:
            for device in self.devices:
                staged[device] = np.empty(
                    (transfer.rows_per_device(self.device_mesh), *transfer.row_shape), request.dtype
                )
                rows = staged[device].reshape(-1)
                for (start, stop), row_offset in transfer.boxes(self.device_mesh, device):
                    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
                    targets.append(ReadTarget(start, rows[row_offset : row_offset + math.prod(shape)].reshape(shape)))
        else:
            for (start, _), devices in self._local_boxes(transfer).items():
                # `start` counts from the origin of the array, `transfer.start` from that of each shard; devices with
                # equal boxes share one host buffer, so that the first of them stands for all
                if isinstance(destination, HostDestination) and self._is_read_into_shards(transfer):
                    shard_box = destination.window(devices[0], transfer.start, transfer.shape)
                else:
                    shard_box = np.empty(transfer.shape, request.dtype)
                    staged |= dict.fromkeys(devices, shard_box)
                targets.append(ReadTarget(start, shard_box))
        reads = plan_reads(request.view, self.plan.tensors, targets, self.read_bytes)
        futures = [pool.submit(run_read, read) for read in reads]
        return _PendingTransfer(transfer, futures, staged, self._staging_bytes(transfer))

    def _local_boxes(self, transfer: Transfer) -> dict[Box, list[int]]:
        """Return the distinct boxes that devices of this process read, each with the indices of its devices."""
        boxes: dict[Box, list[int]] = {}
        for device in self.devices:
            for box, _ in transfer.boxes(self.device_mesh, device):
                boxes.setdefault(box, []).append(device)
        return boxes

    def _write(self, pending: _PendingTransfer, destination: Destination, decoding: Decoding | None) -> None:
        """Exchange the rows that were read, if devices share them, and write the parts into their shards.

        Args:
            decoding: decoder and scales, for an array that is sent as codes.
        """
        transfer = pending.transfer
        parts: Mapping[int, np.ndarray | jax.Array] = pending.staged
        if transfer.strategy.collectives or decoding is not None:
            shape = (transfer.rows_per_device(self.device_mesh), *transfer.row_shape)
            rows = {device: part.reshape(shape) for device, part in pending.staged.items()}
            parts = exchange_rows(self.mesh, transfer, rows, self.plan.in_transit[transfer.path].dtype, decoding)
        for device, part in parts.items():
            destination.put(device, transfer.start, part)
        destination.wait()


def _pspec(request: ArrayRequest) -> PartitionSpec:
    """Return the sharding of an array as a JAX `PartitionSpec`."""
    return PartitionSpec(*(axes or None for axes in request.spec))
