"""The TPU compiler's verdict on one program of a plan: outcome, reason, memory, time and collectives."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from shardplan.plan.displayed import Displayed
from shardplan.plan.file.sections import Collective
from shardplan.plan.workload.workload import Workload


class Outcome(StrEnum):
    """The result of compiling a program, best first."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    REFUSED = "refused"
    UNDECIDED = "undecided"
    """A time or memory limit of this machine was reached first."""


class CollectiveForm(StrEnum):
    """The ways in which the compiler executes a collective."""

    SYNC = "sync"
    ASYNC = "async"
    WINDOWED = "windowed"
    """The collective runs as permutes in the loop of a decomposed matmul."""


@dataclass(frozen=True)
class Buffer:
    """An array that is live when most memory is in use."""

    bytes: int
    shape: str
    op: str
    """Path of the argument, or the operation of the traced program that made the array."""


@dataclass(frozen=True)
class LiveBytes:
    """The bytes in HBM while some instructions run."""

    op: str
    """Operation of the traced program from which the first instruction at this point comes."""
    bytes: int
    """Bytes per device, padding excluded."""


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes per device that the compiler assigned: HBM, and also host memory."""

    peak: int
    arguments: int
    temporaries: int
    output: int
    """Bytes of results that do not replace a donated argument."""
    available: int
    buffers: list[Buffer]
    """The largest buffers that are live at the peak."""
    live: list[LiveBytes] = field(default_factory=list)
    """Live bytes over the step, in scheduled order, for people; a loop's body appears once."""
    host: int = 0
    """Bytes of host memory per device, such as for activations kept there."""


@dataclass(frozen=True)
class CompiledCollective(Collective):
    """The collectives of one kind and cause in a compiled program; `cause` is the operation that they serve."""

    form: CollectiveForm


@dataclass(frozen=True)
class CompiledTime:
    """The modelled time of one step."""

    step_seconds: float
    compute_seconds: float
    """Seconds that the core computes; in the rest of the step it waits for transfers."""
    kernel_seconds: float
    """Part of `compute_seconds` modelled from FLOPs and HBM, for kernels without the compiler's cycles."""
    masked_dense_seconds: float
    """Part of `compute_seconds` for grouped matmuls that the compiler computes as dense ones over all experts."""
    model_flops: float
    """FLOPs that the model needs for one step over all devices, recomputation and masked attention excluded."""
    mfu: float
    """Model FLOP/s utilisation: `model_flops` / (step seconds * peak FLOP/s of all devices)."""
    ops: dict[str, float]
    """Operation of the traced program -> compute seconds, the longest first."""


@dataclass(frozen=True)
class OutOfMemory:
    """The program needs more HBM than a device has."""

    excess: int
    """Bytes per device beyond the available ones."""
    largest: list[Buffer]
    """The largest buffers that are live at the peak."""


@dataclass(frozen=True)
class CompileError:
    """JAX or the compiler raised an error."""

    message: str
    """The error's message, on one line."""


@dataclass(frozen=True)
class DuplicateMeshAxis:
    """Several logical axes of one parameter are mapped to the same mesh axis."""

    parameter: str
    axes: list[str]
    mesh_axis: str


@dataclass(frozen=True)
class TimeLimit:
    """Compilation took longer than `compiler.seconds`."""

    seconds: int


@dataclass(frozen=True)
class MemoryLimit:
    """Compilation used more memory of this machine than `compiler.gib`."""

    gib: float


@dataclass(frozen=True)
class CompilerCrash:
    """The compiling process ended without a result."""

    exit_code: int
    last_line: str
    """Last line of the process's output."""


@dataclass(frozen=True)
class Interrupted:
    """The compile was stopped because another case failed or the user interrupted."""


Reason = OutOfMemory | CompileError | DuplicateMeshAxis | TimeLimit | MemoryLimit | CompilerCrash | Interrupted
"""Why a program does not fit, or has not been compiled."""


class OmissionKind(StrEnum):
    """Parts of compiled modules that the reader does not understand, and ignores or approximates."""

    MODULE_TEXT = "module text"
    """The module's text could not be parsed; `detail` is the error."""
    MODULE_STRUCTURE = "module structure"
    """The module's schedule could not be simulated; `detail` is the error."""
    INSTRUCTION = "instruction"
    """An instruction could not be read: `subject` is its opcode, `detail` the error."""
    NO_CYCLES = "no cycles"
    """An instruction, `subject`, has no estimated cycles, and is timed as reading and writing its result."""
    SCATTER = "scatter"
    """A scatter has no estimated cycles, and is timed as reading its updates, and reading and writing as many rows."""
    TRIP_COUNT = "trip count"
    """A loop has an unknown length, and is counted once."""
    CONDITIONAL = "conditional"
    """A conditional: all its branches are counted, and the longest is timed."""
    ASYNC_CALL = "async call"
    """An asynchronous call runs no collective."""
    REPLICA_GROUPS = "replica groups"
    """Replica groups are not understood: `subject` is the collective's opcode, `detail` its groups."""


@dataclass(frozen=True)
class Omission:
    """Something that the reader of compiled modules left out or approximated."""

    kind: OmissionKind
    subject: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Verdict(Displayed):
    """The compiler's verdict on one program."""

    outcome: Outcome
    reason: Reason | None
    """Why the program does not fit; None if it does."""
    program: str
    """Kind of workload whose step was compiled, or `load` for the assembly of the model from its state dict."""
    slice: str
    mesh: dict[str, int]
    options: dict[str, str]
    """Compiler options."""
    attention: str
    """Levanter's attention backend."""
    compile_seconds: float
    """Seconds of tracing and compiling."""
    versions: dict[str, str]
    memory: CompiledMemory | None = None
    time: CompiledTime | None = None
    """Modelled time; None if the program does not fit, or only memory was judged."""
    collectives: list[CompiledCollective] = field(default_factory=list)
    not_understood: dict[Omission, int] = field(default_factory=dict)
    """Omission -> number of its occurrences in the module."""

    @property
    def fits(self) -> bool:
        """Whether the program compiled and fits in the available memory."""
        return self.outcome == Outcome.FITS

    def rank(self, workload: Workload) -> tuple[int, float]:
        """Return a sort key: programs that fit by time per token, programs too large by memory, then all others."""
        order = list(Outcome).index(self.outcome)
        if self.time is not None:
            return order, self.time.step_seconds / workload.tokens
        if self.fits:  # in the order of estimates, in which they were compiled
            return order, math.inf
        return order, self.memory.peak if self.memory is not None else 0.0
