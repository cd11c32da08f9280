"""A stage of Native Sparse Attention: its time is the maximum of matmuls, memory traffic and kernel cycles. Pure."""

from typing import NamedTuple

from shardplan.hardware import GENERATIONS, Generation

SCHEDULED = GENERATIONS["v5p"]
"""The TPU generation whose compiler schedules gave the kernels' cycles."""
SCHEDULED_CORES = 2
"""Number of cores that share a kernel's tiles in a device of the generation `SCHEDULED`."""


class Stage(NamedTuple):
    """A stage of a kernel's work, within which matmuls, memory traffic and cycles overlap."""

    flops: float
    bytes: float
    """Bytes through HBM."""
    cycles: float = 0.0
    """Cycles of a kernel on v5p, added over its cores."""

    def times(self, factor: float) -> "Stage":
        """Return the stage repeated `factor` times."""
        return Stage(factor * self.flops, factor * self.bytes, factor * self.cycles)

    def seconds(self, generation: Generation) -> float:
        """Return the seconds of the stage on one device.

        The cycles of other generations are unknown: they are assumed to be in the ratio of peak FLOP/s.
        """
        scheduled = self.cycles / (SCHEDULED_CORES * SCHEDULED.clock) * SCHEDULED.flops / generation.flops
        return max(self.flops / generation.flops, self.bytes / generation.hbm_bandwidth, scheduled)
