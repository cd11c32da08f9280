"""The verdict of the TPU compiler on one program of a plan. JSON values."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from shardplan.plan.plan import Collective, WorkloadInfo

FITS, DOES_NOT_FIT, REFUSED, UNDECIDED = "fits", "does not fit", "refused", "undecided"
"""Outcomes; undecided where a limit of time or memory of this machine was reached first."""


@dataclass(frozen=True)
class Buffer:
    """An array that is alive when most memory is in use."""

    bytes: int
    shape: str
    op: str
    """Path of the argument, or the operation of the traced program that made it."""


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes per device of HBM, as the compiler assigned them."""

    peak: int
    arguments: int
    temporaries: int
    output: int
    """Without what takes the place of a donated argument."""
    available: int
    buffers: list[Buffer]
    """The largest of those that are alive at the peak."""


@dataclass(frozen=True)
class CompiledCollective(Collective):
    """Collectives of one cause that the compiler put into the program; `cause` is the operation they serve."""

    form: str
    """sync, async, or windowed: the permutes of a product that was decomposed into a loop."""


@dataclass(frozen=True)
class CompiledTime:
    """The modelled time of one step."""

    step_seconds: float
    compute_seconds: float
    """Of which the core works; for the rest it waits for transfers."""
    kernel_seconds: float
    """The part of `compute_seconds` modelled from FLOPs: kernels for which the compiler gives no cycles."""
    model_flops: float
    """FLOPs of one step over all devices that the model needs, recomputation and masked attention not counted."""
    mfu: float
    """Model FLOP/s utilisation: `model_flops` against the peak of all devices over the step."""
    ops: dict[str, float]
    """Operation of the traced program -> seconds of the core, the longest."""


@dataclass(frozen=True)
class Verdict:
    """What the compiler says of one program."""

    outcome: str
    """`fits`, `does not fit`, `refused` or `undecided`."""
    reason: str
    """Why not; empty where it fits."""
    program: str
    """eval, train, prefill or load."""
    slice: str
    mesh: dict[str, int]
    options: dict[str, str]
    """Compiler options."""
    attention: str
    """Levanter's attention backend."""
    compile_seconds: float
    versions: dict[str, str]
    memory: CompiledMemory | None = None
    time: CompiledTime | None = None
    collectives: list[CompiledCollective] = field(default_factory=list)
    not_understood: dict[str, int] = field(default_factory=dict)
    """What the reader of the compiled module left out -> how many times it stands there."""

    @property
    def fits(self) -> bool:
        """Whether it compiled, and into the memory there is."""
        return self.outcome == FITS

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    def rank(self, workload: WorkloadInfo) -> tuple[int, float]:
        """Sort key: what fits by time per token, then what does not by memory, then the rest."""
        order = [FITS, DOES_NOT_FIT, REFUSED, UNDECIDED].index(self.outcome)
        if self.time is not None:
            return order, self.time.step_seconds / (workload.batch * workload.position)
        return order, self.memory.peak if self.memory is not None else 0.0
