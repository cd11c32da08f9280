"""The plan of a load: each array's transfers, the bytes of its tensors, and the processes that read them."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.checkpoint.format.codecs.stored_codes import TensorsWithParts
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.transfer.coded_requests import with_codes
from shardplan.checkpoint.transfer.reads.byte_ranges import TensorSource, locate
from shardplan.checkpoint.transfer.request import ArrayRequest, stored_dtypes
from shardplan.checkpoint.transfer.schedule import DEFAULT_SPEEDS, Schedule, Speeds, make_schedule
from shardplan.checkpoint.transfer.transfer import DeviceMesh, TransferLimits
from shardplan.runtime.garbage import without_garbage_collection

MAX_READ_BYTES = 64 * 2**20
"""Maximum bytes of a transfer that one process reads."""
MAX_PLACED_BYTES = 256 * 2**20
"""Maximum bytes of a transfer in the accelerators of one process, beyond the arrays."""


@dataclass(frozen=True)
class LoadPlan:
    """The requests, sources and schedule of a load, the same in all processes."""

    requests: Mapping[str, ArrayRequest]
    """Array path -> the array to load; includes arrays of scales, each before the array of its codes."""
    in_transit: Mapping[str, ArrayRequest]
    """Array path -> the array as it is read and exchanged."""
    tensors: TensorsWithParts
    sources: Mapping[str, TensorSource]
    """Name of each tensor that is read -> its location."""
    limits: TransferLimits
    schedule: Schedule


@without_garbage_collection()
def plan_load(
    requests: Mapping[str, ArrayRequest],
    tensors: Mapping[str, Tensor],
    mesh: DeviceMesh,
    budget: int,
    zero_copy: bool,
    speeds: Speeds = DEFAULT_SPEEDS,
) -> LoadPlan:
    """Choose the types in transit, and plan all transfers.

    >>> import numpy as np
    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> mesh = DeviceMesh((("data", 2),), processes=(0, 1))
    >>> request = ArrayRequest(tensor_view("w", (8, 8)), (("data",), ()), np.dtype(np.float32))
    >>> tensor = Tensor(None, 64, (8, 8), np.dtype(np.float16), "model.safetensors")
    >>> plan = plan_load({"up_proj": request}, {"w": tensor}, mesh, 2**30, zero_copy=True)
    >>> plan.in_transit["up_proj"].dtype, [each.local_shape for each in plan.schedule.transfers]
    (dtype('float16'), [(4, 8)])

    Args:
        requests: array path -> the array to load.
        tensors: tensor name -> tensor and its location.
        budget: most host memory to use beyond the arrays, bytes.
        zero_copy: whether devices adopt the host memory that was read into.
    """
    sources: dict[str, TensorSource] = {}
    if sends_codes(mesh, zero_copy):
        requests, sources = with_codes(requests, tensors, mesh.sizes)
    else:
        for request in requests.values():
            sources |= locate(request.view, tensors)
    dtypes = stored_dtypes(tensors)
    with_parts = TensorsWithParts(tensors)
    in_transit = {path: request.in_transit(dtypes) for path, request in requests.items()}
    limits = transfer_limits(budget, zero_copy)
    schedule = make_schedule(in_transit, sources, mesh, limits, speeds)
    return LoadPlan(requests, in_transit, with_parts, sources, limits, schedule)


def sends_codes(mesh: DeviceMesh, zero_copy: bool) -> bool:
    """Return whether devices decode the codes; False if a single process reads directly into shards in host memory.

    >>> one, two = (DeviceMesh((("data", 2),), processes) for processes in ((0, 0), (0, 1)))
    >>> sends_codes(one, zero_copy=True), sends_codes(two, zero_copy=True), sends_codes(one, zero_copy=False)
    (False, True, True)
    """
    return not zero_copy or len(mesh.devices_by_process) > 1


def transfer_limits(budget: int, zero_copy: bool) -> TransferLimits:
    """Return the largest size of a transfer, such that several share three quarters of `budget` bytes of host memory.

    The last quarter is for reads. All hosts get the same limits, because they follow the same schedule.

    >>> transfer_limits(2**30, zero_copy=True)
    TransferLimits(read=67108864, placed=67108864)
    """
    read = min(MAX_READ_BYTES, budget * 3 // 16)
    return TransferLimits(read, read if zero_copy else MAX_PLACED_BYTES)
