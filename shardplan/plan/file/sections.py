"""The sections of a Plan, as in its file: model, hardware, memory, cost and search."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shardplan.model.model_class import LEVANTER


@dataclass(frozen=True)
class ModelInfo:
    """Which model was planned."""

    ref: str
    """The checkpoint, as the user named it; empty if the plan was made from a config.json alone."""
    type: str
    """The model_type of the model's config.json."""
    axes: dict[str, int]
    """Logical axis -> size."""
    parameters: int
    """Number of parameters."""
    config: str | None = None
    """The config.json from which the plan was made; None for the checkpoint's own."""
    position: str = "position"
    """Logical axis of the tokens of a sequence; plans of version 0.1, only for Levanter's models, lack it."""
    levanter_class: str | None = None
    """Configuration class of the model, as package.module:Class; None, in plans before 0.3, for Levanter's class for
    the type."""
    vocab: str = "vocab"
    """Logical axis of the vocabulary."""
    unsharded_in_kernels: list[str] = field(default_factory=lambda: ["q_heads_per_group", "head_size"])
    """Logical axes of attention heads that Levanter's splash attention needs unsharded for right results."""
    adapter: str | None = None
    """The adapter whose changes are added to the weights, as the user named it; the plan does not depend on it."""
    kept_dtype: str | None = None
    """Type of the weights that stay as the checkpoint stores them; None if all are decoded at loading."""

    @property
    def class_name(self) -> str:
        """Configuration class of the model, see `shardplan.model.model_class`."""
        return self.levanter_class or LEVANTER

    @property
    def name(self) -> str:
        """Reference of the checkpoint, else path of the config.json; followed by the adapter's reference, if any."""
        model = self.ref or str(self.config)
        return model if self.adapter is None else f"{model} + {self.adapter}"


@dataclass(frozen=True)
class HardwareInfo:
    """Which slice was planned for."""

    slice: str
    devices: int
    hbm_gib: float
    """GiB of memory available per device."""


class MemoryVerdict(NamedTuple):
    """Whether a step fits, with the bytes of the memory that decides."""

    fits: bool
    bytes: int
    """Bytes that the step needs."""
    limit: int
    """The limit in bytes that is shown: the size of the memory if the step fits, else its usable part."""
    place: str = "per device"
    """Text that follows a number of GiB and names the memory, such as `per device`."""


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of a step, bytes per device; `peak` is the largest sum of bytes live at once."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    logits: int
    gathered_weights: int
    cast_parameters: int
    load_transient: int
    peak: int
    available: int
    reserved: int = 0
    """Part of `available` that is kept free because the estimate has an error."""
    host: int = 0
    """Largest sum of activations in host memory at once, bytes per device of the host."""
    host_usable: int = 0
    """Bytes of host memory that `host` may use."""

    @property
    def usable(self) -> int:
        """Bytes of device memory that the peak may use."""
        return self.available - self.reserved

    @property
    def fits_host(self) -> bool:
        """Whether the activations moved to the host fit there."""
        return self.host <= self.host_usable

    @property
    def fits(self) -> bool:
        """Whether the peak fits a device's usable memory, and the activations moved to the host fit there."""
        return self.peak <= self.usable and self.fits_host

    @property
    def verdict(self) -> MemoryVerdict:
        """The verdict and the bytes that decide it: the host's bytes if only the host's memory is too small."""
        if self.peak <= self.usable and not self.fits_host:
            return MemoryVerdict(False, self.host, self.host_usable, "of the host per device")
        return MemoryVerdict(self.fits, self.peak, self.available if self.fits else self.usable)

    @property
    def may_fit(self) -> bool:
        """Whether the peak would fit if the estimate were too high by its full error."""
        return self.peak - self.reserved <= self.available


@dataclass(frozen=True)
class Collective:
    """All executions of one collective operation of a step, on one device."""

    kind: str
    """all-gather, reduce-scatter, all-reduce, ..."""
    mesh_axes: list[str]
    """Mesh axes along which devices exchange data."""
    bytes: int
    """Bytes that a device receives in one step, over all executions."""
    count: int
    """Executions in one step."""
    seconds: float
    """Time of all executions in one step, overlapped or not."""
    cause: str
    """Cause of the collective, such as the parameter that is gathered."""


@dataclass(frozen=True)
class CostPlan:
    """Estimated time of one step."""

    step_seconds: float
    """Seconds of the step."""
    compute_seconds: float
    """Seconds of the step in which devices compute."""
    collectives: list[Collective]
    model_flops: float | None = None
    """FLOPs that the model needs in one step, over all devices; None in plans of version 0.1."""


@dataclass(frozen=True)
class RunnerUp:
    """The second best plan of a search, with its predicted time.

    It differs from the best plan in the mesh, in the mesh axes of batch, positions or the stored residual axis, or in a
    choice that the workload leaves open (gradient checkpointing, microbatches).
    """

    mesh: dict[str, int]
    step_seconds: float


class Caveat(StrEnum):
    """A limitation of a plan's estimates for other code to act on; `SearchInfo.reasons` explains it in words."""

    NO_ATTENTION_KERNEL = "no_attention_kernel"
    """No kernel can run attention under this plan, so that the time of attention is a guess."""
    OFFLOAD_NOT_PRICED = "offload_not_priced"
    """The step time omits copies of activations to the host and back; only in plans of version 0.1."""
    SLICED_ACTIVATIONS = "sliced_activations"
    """A mesh axis shards parameters, but neither batch nor positions; estimates of such plans are not good."""
    REPEATED_WORK = "repeated_work"
    """A mesh axis shards no computation, so that devices along it repeat the same work."""


@dataclass(frozen=True)
class SearchInfo:
    """How the search chose the plan."""

    candidates: int
    """Number of combinations of mesh and mappings that were evaluated."""
    proven_optimal: bool
    """Whether no combination in the search space is better under the cost model, by proof.

    False if none fits, for every plan but the fastest, and if numbers of microbatches were left out without a proof.
    """
    seconds: float
    """Seconds of the search."""
    runner_up: RunnerUp | None
    rejected: dict[str, int]
    """`shardplan.search.reasons.Rejection` -> number of choices rejected for this reason."""
    reasons: list[str]
    """Why this plan was chosen and what was impossible, one sentence each, for people."""
    given: bool = False
    """Whether the caller gave the mesh and mappings, so that nothing was searched."""
    caveats: list[Caveat] = field(default_factory=list)
