"""The parts that a Plan's figures are sums of: live bytes, timed tasks, candidates. Only reports read them.

Plans of older versions have none, nor have those that `launch` puts into a script.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LivePoint:
    """What is in memory at one point of the step; a point in a loop stands for all iterations."""

    label: str
    """The parameter or the named scope of the operation that runs."""
    executions: int
    """Executions of that operation in a step."""
    bytes: dict[str, int]
    """Field of `MemoryPlan` -> bytes per device; parts of 0 bytes are left out."""


@dataclass(frozen=True)
class LiveArray:
    """Arrays of one shape that are live at the peak, for the same reason."""

    array: str
    """The path of a parameter, or the logical axes with their sizes."""
    role: str
    bytes: int
    """Bytes per device of all of them."""
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
    """An operation of the step with all that is fused into it, over all its executions."""

    label: str
    """The parameter or the named scope of the operation."""
    kind: str
    executions: int
    compute_seconds: float
    flops: float
    """FLOPs of a device, without padding; 0 for what is no matmul."""
    hbm_bytes: float
    """Bytes that a device reads from and writes to its memory."""
    transfers: list[TimedTransfer]


@dataclass(frozen=True)
class AttentionCost:
    """A kind of attention in the model: which layers have it, and what a step spends on it."""

    kind: str
    """The name of the kind, as in `attention.kinds` of the Plan."""
    layers: int
    """Number of layers with attention of this kind; of calls of attention, where `layer_numbers` is empty."""
    layer_numbers: list[int]
    """The layers, from 0; empty where a model does not say how many layers it has, or some have no call or several."""
    compute_seconds: float
    exposed_seconds: float
    """Time of collectives for it that do not overlap with compute."""
    model_flops: float
    """FLOPs over all devices that the model needs for it, among those of `cost.model_flops`; the mask is counted."""
    received_bytes: int
    """Bytes that a device receives for it: keys, values and what is resharded, and their gradients."""
    live_bytes: int
    """Bytes per device of queries, keys, values and output of one layer, with their gradients in training, and the most
    that it adds for the positions of other devices."""


@dataclass(frozen=True)
class EvaluatedCandidate:
    """A combination of mesh and mappings that fits, and is neither slower nor larger than another one on its mesh."""

    mesh: list[int]
    """Sizes of the mesh axes, major to minor."""
    batch: list[str]
    """Mesh axes of the batch."""
    positions: list[str]
    """Mesh axes of the positions."""
    stored: list[str]
    """Mesh axes of the residual axis of stored parameters."""
    step_seconds: float
    peak: int
    """Bytes per device."""


@dataclass(frozen=True)
class ChangedSetting:
    """The best plan with one other setting (`--what_if`)."""

    change: str
    """The key and its other value."""
    obstacle: str
    """Why there is no plan; empty if there is one."""
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    peak: int = 0
    """Bytes per device."""
    available: int = 0
    """Bytes of a device."""
    devices: int = 0


@dataclass(frozen=True)
class Details:
    """The details of a Plan."""

    live: list[LivePoint] = field(default_factory=list)
    """In the order of the step."""
    largest: list[LiveArray] = field(default_factory=list)
    """The largest arrays that are live at the peak."""
    tasks: list[TimedTask] = field(default_factory=list)
    """In the order of the step; the times of their compute and their exposed transfers add up to that of the step."""
    attention: list[AttentionCost] = field(default_factory=list)
    """The kinds of attention in the model, the one with most work first."""
    candidates: list[EvaluatedCandidate] = field(default_factory=list)
    """Of the search, fastest first; empty for a layout that was given."""
    slower_candidates: int = 0
    """Number of further candidates, which are slower and left out."""
    settings: list[ChangedSetting] = field(default_factory=list)
    """Empty unless they were planned."""
