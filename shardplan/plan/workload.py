"""What one step does."""

from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16

from shardplan.config import WorkloadConfig
from shardplan.plan.plan import BATCH_AXIS, WorkloadInfo


@dataclass(frozen=True)
class Workload:
    """What one step does."""

    batch_axis: str
    batch: int
    position: int
    param_dtype: str
    compute_dtype: str
    kind: str = "eval"
    """eval, train or prefill."""
    gradient_checkpointing: str = "default"
    microbatches: int = 1
    """Parts of the batch of a training step that are taken one after the other."""
    optimizer: str = "adamw"
    """Of optax."""

    @property
    def is_training(self) -> bool:
        """Whether gradients are computed and the parameters updated."""
        return self.kind == "train"

    @property
    def training(self) -> str:
        """How a training step is done, in words; empty for other kinds."""
        if not self.is_training:
            return ""
        parts = "one microbatch" if self.microbatches == 1 else f"{self.microbatches} microbatches"
        return f"{self.optimizer}, {parts}, gradient checkpointing {self.gradient_checkpointing}"

    @property
    def tokens(self) -> int:
        """Tokens per step, over all devices."""
        return self.batch * self.position


def workload_of(config: WorkloadConfig | WorkloadInfo) -> Workload:
    """What a configuration or a plan says; where it leaves something open, what Levanter does by itself."""
    checkpointing = config.gradient_checkpointing if config.gradient_checkpointing != "auto" else "default"
    chosen = {"gradient_checkpointing": checkpointing, "microbatches": config.microbatches or 1}
    return Workload(BATCH_AXIS, **{**vars(config), **chosen})


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    return np.dtype(bfloat16 if dtype == "bfloat16" else dtype).itemsize
