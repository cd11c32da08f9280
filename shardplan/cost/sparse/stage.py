"""A stage of Native Sparse Attention: its time is the maximum of matmuls, memory traffic and kernel cycles. Pure."""

from enum import StrEnum
from typing import NamedTuple

from shardplan.hardware import GENERATIONS, Generation

SCHEDULED = GENERATIONS["v5p"]
"""The TPU generation whose compiler schedules gave the kernels' cycles."""
SCHEDULED_CORES = 2
"""Number of cores that share a kernel's tiles in a device of the generation `SCHEDULED`."""


class StageName(StrEnum):
    """The names of the stages that Native Sparse Attention consists of."""

    COMPRESSION = "compression"
    COMPRESSED = "compressed branch"
    IMPORTANCE = "importance of blocks"
    """By a kernel, from scores that it computes again; XLA has it with the compressed branch and the choice."""
    CHOICE = "choice of blocks"
    TABLES = "tables of tiles"
    """For the kernel of the selected branch."""
    SELECTED = "selected branch"
    WINDOW = "window branch"
    MOVED = "operands and results"


class Stage(NamedTuple):
    """A stage of a kernel's work, within which matmuls, memory traffic and cycles overlap."""

    name: StageName
    flops: float
    bytes: float
    """Bytes through HBM."""
    cycles: float = 0.0
    """Cycles of a kernel on v5p, added over its cores."""

    def times(self, factor: float) -> "Stage":
        """Return the stage repeated `factor` times."""
        return Stage(self.name, factor * self.flops, factor * self.bytes, factor * self.cycles)

    def seconds(self, generation: Generation) -> float:
        """Return the seconds of the stage on one device.

        Cycles are known for one generation (`SCHEDULED`); for others, their seconds are scaled by peak FLOP/s.
        """
        scheduled = self.cycles / (SCHEDULED_CORES * SCHEDULED.clock) * SCHEDULED.flops / generation.flops
        return max(self.flops / generation.flops, self.bytes / generation.hbm_bandwidth, scheduled)
