"""Records the measured memory of a run at each of its stages, beside the planned memory, in memory.json."""

import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import jax

from shardplan.hardware import GIB
from shardplan.plan.plan import Plan
from shardplan.runtime.device_memory import device_memory, peak_host_bytes
from shardplan.runtime.progress import size_text

logger = logging.getLogger(__name__)

EXCESS = 1.1
"""Ratio of measured to planned memory above which a warning is logged."""
STARTED, LOADED, COMPILED, STEPPED = "started", "loaded", "compiled", "first step"
"""Stages of a run."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one process, or the maximum over several, in bytes."""

    arrays: int
    """Bytes of JAX arrays, on the device with the most."""
    in_use: int | None
    """Bytes in use, on the device with the most; None if devices do not report it."""
    peak: int | None
    """Largest bytes in use so far, on the device with the most; None if devices do not report it."""
    host: int
    """Largest bytes of the process in host memory so far."""


def measure_memory() -> MemoryUse:
    """Measure the memory that this process uses."""
    by_device: Counter[Any] = Counter()
    for array in jax.live_arrays():
        nbytes = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        by_device.update(dict.fromkeys(array.sharding.addressable_devices, nbytes))
    devices = device_memory().values()
    return MemoryUse(
        max(by_device.values(), default=0),
        max((each.in_use for each in devices), default=None),
        max((each.peak for each in devices), default=None),
        peak_host_bytes(),
    )


def largest(uses: Iterable[MemoryUse]) -> MemoryUse:
    """Return the maximum of each quantity over several processes."""
    columns = zip(*(vars(each).values() for each in uses), strict=True)
    return MemoryUse(*(max((each for each in column if each is not None), default=None) for column in columns))  # type: ignore[arg-type]


def describe_memory(plan: Plan, stages: dict[str, MemoryUse]) -> dict[str, Any]:
    """Return the planned memory, and the memory measured at each stage."""
    return {"planned": asdict(plan.memory), "measured": {stage: asdict(use) for stage, use in stages.items()}}


def warn_of_excess(plan: Plan, stage: str, use: MemoryUse) -> None:
    """Log a warning if a stage uses clearly more device memory than planned."""
    planned = {LOADED: plan.memory.parameters + plan.memory.optimizer, STEPPED: plan.memory.peak}.get(stage)
    measured = use.in_use if stage == LOADED else use.peak
    if planned is not None and measured is not None and measured > EXCESS * planned and measured - planned > GIB / 10:
        logger.warning(
            "memory after stage '%s': %s per device, planned are %s; memory.json has the parts",
            stage, size_text(measured), size_text(planned),
        )  # fmt: skip
