"""The Plan: the one contract between planner, loader, evaluation and reports. Versioned JSON that round-trips."""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draccus
from draccus.utils import ParsingError

from shardplan.config import MESH_AXES, Config, ModelConfig, WorkloadConfig
from shardplan.errors import ConfigError, nearest, one_line
from shardplan.hardware import parse_slice
from shardplan.plan.mapping import mesh_text
from shardplan.positions.sequence_layout import CONTIGUOUS, KINDS, SequenceLayout

SCHEMA_VERSION = 1
BATCH_AXIS, POSITION_AXIS = "batch", "position"
"""Logical axes of the sequences of a step, as Levanter's trainer calls it, and of their tokens, as its models do."""

Mapping = dict[str, list[str]]
"""Logical axis -> mesh axes, major to minor. A logical axis that is absent is replicated."""


Spec = list[list[str] | None]
"""Mesh axes of each dimension of an array, None where it is not cut."""


@dataclass(frozen=True)
class ModelInfo:
    """Which model was planned."""

    ref: str
    type: str
    axes: dict[str, int]
    """Logical axis -> size."""
    parameters: int
    """Number of parameters."""
    config: str | None = None
    """The config.json that was planned from, where it was not the checkpoint's."""

    @property
    def name(self) -> str:
        """What to call it."""
        return self.ref or str(self.config)


@dataclass(frozen=True)
class WorkloadInfo:
    """What one step does."""

    kind: str
    """eval, train or prefill."""
    batch: int
    position: int
    param_dtype: str
    compute_dtype: str
    gradient_checkpointing: str = "default"
    microbatches: int = 1
    optimizer: str = "adamw"


@dataclass(frozen=True)
class HardwareInfo:
    """Where it runs."""

    slice: str
    devices: int
    hbm_gib: float
    """Memory available per device, GiB."""


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is sharded."""

    path: str
    axes: dict[str, int]
    dtype: str
    spec: Spec
    """Mesh axes of each dimension, None where it is not cut."""
    bytes_per_device: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per device, by part; `peak` is the most that is alive at once."""

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
    """Of what is available: kept free, for the estimate errs by so much."""

    @property
    def usable(self) -> int:
        """Bytes that the peak may have."""
        return self.available - self.reserved

    @property
    def fits(self) -> bool:
        """Whether the peak, with the error of its estimate, is available."""
        return self.peak <= self.usable


@dataclass(frozen=True)
class Collective:
    """A collective operation of the step, per device."""

    kind: str
    mesh_axes: list[str]
    bytes: int
    """Bytes received per device in one step, over all executions."""
    count: int
    """Executions in one step."""
    seconds: float
    cause: str


@dataclass(frozen=True)
class CostPlan:
    """Estimated time of one step."""

    step_seconds: float
    compute_seconds: float
    collectives: list[Collective]


UNCUT, GATHERED, RING, ULYSSES, HYBRID = STRATEGIES = ("none", "all_gather", "ring", "ulysses", "hybrid")
"""How attention is done: by Levanter's own, for positions are not cut; keys and values are gathered; they go round;
heads are exchanged for positions; in groups that, and between them a ring."""


BLOCKWISE, SPLASH = KERNELS = ("blockwise", "splash")
"""What a device does its part of attention with: XLA, or a Pallas kernel for TPUs."""


@dataclass(frozen=True)
class AttentionPlan:
    """Sequence parallelism: how attention is done where positions are cut; and by which kernel it is."""

    strategy: str = UNCUT
    ulysses: int = 1
    """Devices that exchange heads for positions."""
    ring: int = 1
    """Parts that positions are in then: together these are the devices that cut positions."""
    layout: str = CONTIGUOUS
    """The order of positions; see `shardplan.positions.sequence_layout`."""
    kernel: str = BLOCKWISE

    @property
    def gathers(self) -> bool:
        """Whether all keys are in one place; where attention is Levanter's own, the partitioner gathers them."""
        return self.strategy in (UNCUT, GATHERED)

    def order(self, length: int) -> SequenceLayout:
        """Which of `length` positions each device has."""
        return SequenceLayout(length, self.ring, self.ulysses, self.layout)


@dataclass(frozen=True)
class RunnerUp:
    """The best plan that has another mesh, other mesh axes on batch, positions or the residual axis at rest, or, where
    the workload leaves them open, other checkpointing or microbatches."""

    mesh: dict[str, int]
    step_seconds: float


@dataclass(frozen=True)
class SearchInfo:
    """How the plan was found."""

    candidates: int
    """Combinations of mesh and mappings that were evaluated."""
    proven_optimal: bool
    """Whether no combination in the search space is better under the cost model; false where none fits."""
    seconds: float
    runner_up: RunnerUp | None
    rejected: dict[str, int]
    """Reason -> how many choices it excluded."""
    reasons: list[str]
    """The verdict in words: why this one, and what was impossible."""
    given: bool = False
    """Whether somebody else chose the mesh and mappings, and nothing was searched."""


@dataclass(frozen=True)
class Plan:
    """A mesh, both mappings, and what follows from them."""

    model: ModelInfo
    workload: WorkloadInfo
    hardware: HardwareInfo
    mesh: dict[str, int]
    """Mesh axis -> size, major to minor; the product is the number of devices."""
    compute_mapping: Mapping
    """For activations, and for parameters while they are used."""
    param_mapping: Mapping
    """For parameters at rest."""
    parameters: list[ParameterPlan]
    memory: MemoryPlan
    cost: CostPlan
    search: SearchInfo
    versions: dict[str, str]
    compiler_options: dict[str, str] = field(default_factory=dict)
    attention: AttentionPlan = field(default_factory=AttentionPlan)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """The Plan as JSON values, `schema_version` first."""
        values = dataclasses.asdict(self)
        return {"schema_version": values.pop("schema_version"), **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Plan":
        """The inverse of `to_json`.

        Raises:
            ConfigError: another schema version, or not a plan.
        """
        version = values.get("schema_version") if isinstance(values, dict) else None
        if version != SCHEMA_VERSION:
            raise ConfigError(f"plan has schema_version {version!r}; this shardplan reads {SCHEMA_VERSION}; plan again")
        try:
            plan: Plan = draccus.decode(cls, values)
        except ParsingError as error:
            raise ConfigError(f"not a plan: {one_line(error)}") from error
        problem = next(plan._problems(), None)
        if problem is not None:
            raise ConfigError(f"not a plan: {problem}")
        return plan

    def _problems(self) -> Iterator[str]:
        """What cannot be, in a plan that somebody edited."""
        sizes = mesh_text(self.mesh)
        if self.mesh.keys() != set(MESH_AXES) or min(self.mesh.values()) < 1:
            yield f"its mesh is {sizes or 'empty'}; it must be {' x '.join(MESH_AXES)}, each at least 1"
        devices = parse_slice(self.hardware.slice).devices
        if not math.prod(self.mesh.values()) == self.hardware.devices == devices:
            yield f"mesh {sizes} and {self.hardware.devices} devices, where {self.hardware.slice} has {devices}"
        for section in ("workload", "memory", "cost"):
            for name, amount in vars(getattr(self, section)).items():
                if amount is None or (isinstance(amount, int | float) and not 0 <= amount < math.inf):
                    yield f"{section}.{name} is {amount}"
        try:
            Config(model=ModelConfig(ref=self.model.name), workload=WorkloadConfig(**vars(self.workload)))
        except ConfigError as error:
            yield str(error)
        if not self.parameters:
            yield "it has no parameters"
        for where, mapping in (("compute_mapping", self.compute_mapping), ("param_mapping", self.param_mapping)):
            for axis, mesh_axes in mapping.items():
                yield from self._misuses(f"{where}.{axis}", mesh_axes)
        shared = {*self.compute_mapping.get(BATCH_AXIS, ())} & {*self.compute_mapping.get(POSITION_AXIS, ())}
        if shared:
            yield f"compute_mapping has {BATCH_AXIS} and {POSITION_AXIS} both on {', '.join(sorted(shared))}"
        yield from self._attention_problems()
        for parameter in self.parameters:
            yield from self._misuses(parameter.path, [axis for axes in parameter.spec if axes for axis in axes])
            if parameter.spec != [self.param_mapping.get(axis) for axis in parameter.axes]:
                yield f"{parameter.path} has the spec {parameter.spec}, not that of param_mapping"
            if parameter.bytes_per_device < 0:
                yield f"{parameter.path} has {parameter.bytes_per_device} bytes"

    def _attention_problems(self) -> Iterator[str]:
        method = self.attention
        valid = {"strategy": STRATEGIES, "layout": KINDS, "kernel": KERNELS}
        for name, values in valid.items():
            given = getattr(method, name)
            if given not in values:
                yield f"attention.{name} is {given!r}; {nearest(given, values)}"
        parts = f"attention.ulysses {method.ulysses} x ring {method.ring}"
        degree = math.prod(self.mesh.get(axis, 1) for axis in self.compute_mapping.get(POSITION_AXIS, []))
        if min(method.ulysses, method.ring) < 1:
            yield f"{parts}; each must be at least 1"
        elif method.strategy != UNCUT and method.ulysses * method.ring != degree:
            yield f"{parts} where {degree} devices cut {POSITION_AXIS}"
        for size, users in ((method.ulysses, (ULYSSES, HYBRID)), (method.ring, (GATHERED, RING, HYBRID))):
            if size > 1 and method.strategy not in users:
                yield f"{parts} where the strategy is {method.strategy}"
        if method.layout == CONTIGUOUS:
            return
        if method.strategy == UNCUT:
            yield f"attention.layout {method.layout} where the strategy is {UNCUT}"
        elif self.workload.kind == "train":
            yield f"attention.layout {method.layout} where workload.kind is train, which takes sequences in order"
        elif method.order(self.workload.position).padded != self.workload.position:
            yield f"attention.layout {method.layout} with {parts}: {self.workload.position} positions do not divide"

    def _misuses(self, where: str, mesh_axes: list[str]) -> Iterator[str]:
        for mesh_axis in mesh_axes:
            if mesh_axis not in self.mesh:
                yield f"{where} has mesh axis {mesh_axis!r}; {nearest(mesh_axis, self.mesh)}"
        if len(set(mesh_axes)) < len(mesh_axes):
            yield f"{where} has a mesh axis twice: {', '.join(mesh_axes)}"

    def save(self, path: str) -> None:
        """Write the Plan as JSON."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str) -> "Plan":
        """Read a Plan written by `save`.

        Raises:
            ConfigError: no such file, or not a plan.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"plan {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"plan {path} is not JSON: {one_line(error)}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
