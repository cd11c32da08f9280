"""The details behind a Plan's figures, for reports only: live bytes, timed tasks, candidates.

Plans of older versions have no details, and neither have Plans that `launch` puts into a script.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LivePoint:
    """The memory in use at one point of the step; a point in a loop stands for all iterations."""

    label: str
    """The parameter or the named scope of the operation at this point."""
    executions: int
    """Number of executions of this operation in a step."""
    bytes: dict[str, int]
    """Field of `MemoryPlan` -> bytes per device; fields of 0 bytes are left out."""


@dataclass(frozen=True)
class LiveArray:
    """Arrays of one shape that are live at the peak for the same reason."""

    array: str
    """Path of a parameter, or logical axes with their sizes."""
    role: str
    bytes: int
    """Bytes per device of all arrays of this shape together."""
    count: int


@dataclass(frozen=True)
class TimedTransfer:
    """All executions of one collective of a task."""

    kind: str
    mesh_axes: list[str]
    cause: str
    bytes: int
    """Bytes that a device receives."""
    seconds: float
    exposed_seconds: float
    """The part of `seconds` that does not overlap with compute."""


@dataclass(frozen=True)
class TimedTask:
    """An operation of the step, with all operations fused into it, over all its executions."""

    label: str
    """The parameter or the named scope of the operation."""
    kind: str
    executions: int
    compute_seconds: float
    flops: float
    """FLOPs of one device, padding excluded; 0 for operations other than matmuls."""
    hbm_bytes: float
    """Bytes that one device reads from and writes to HBM."""
    transfers: list[TimedTransfer]


@dataclass(frozen=True)
class AttentionCost:
    """A kind of attention in the model: the layers that have it, and its cost in one step."""

    kind: str
    """Name of the kind, as in `attention.kinds` of the Plan."""
    layers: int
    """Number of layers with attention of this kind; if `layer_numbers` is empty, number of attention calls."""
    layer_numbers: list[int]
    """Layer numbers, from 0; empty if unknown, or if some layer has no attention call or several."""
    compute_seconds: float
    exposed_seconds: float
    """Seconds of the attention's collectives that do not overlap with compute."""
    model_flops: float
    """FLOPs of attention of this kind over all devices, masked scores excluded; a part of `cost.model_flops`."""
    received_bytes: int
    """Bytes that a device receives for this attention: keys, values, resharded arrays, and their gradients."""
    live_bytes: int
    """Bytes per device of one layer: queries, keys, values and output, their gradients in training, and the largest
    buffers for other devices' positions."""


@dataclass(frozen=True)
class EvaluatedCandidate:
    """A mesh with mappings that fits, and is Pareto-optimal in time and memory among candidates on the same mesh."""

    mesh: list[int]
    """Sizes of the mesh axes, major to minor."""
    batch: list[str]
    """Mesh axes that shard the batch."""
    positions: list[str]
    """Mesh axes that shard positions."""
    stored: list[str]
    """Mesh axes that shard the residual axis of stored parameters."""
    step_seconds: float
    peak: int
    """Peak bytes per device."""


@dataclass(frozen=True)
class ChangedSetting:
    """The best plan if one setting is changed (`--what_if`)."""

    change: str
    """The changed key and its value."""
    obstacle: str
    """Why there is no plan; empty if there is one."""
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    peak: int = 0
    """Peak bytes per device."""
    available: int = 0
    """Bytes available per device."""
    devices: int = 0


@dataclass(frozen=True)
class Details:
    """The details behind a Plan's estimates, which reports and explanations use."""

    live: list[LivePoint] = field(default_factory=list)
    """Points of the step, in order."""
    largest: list[LiveArray] = field(default_factory=list)
    """The largest arrays that are live at the peak."""
    tasks: list[TimedTask] = field(default_factory=list)
    """Operations of the step, in order; their seconds of compute and of exposed transfers sum to the step's seconds."""
    attention: list[AttentionCost] = field(default_factory=list)
    """Kinds of attention in the model, the one with the most work first."""
    candidates: list[EvaluatedCandidate] = field(default_factory=list)
    """Candidates of the search, fastest first; empty if the mappings were given."""
    slower_candidates: int = 0
    """Number of slower candidates, which are not listed."""
    settings: list[ChangedSetting] = field(default_factory=list)
    """Plans with changed settings; empty without `--what_if`."""
