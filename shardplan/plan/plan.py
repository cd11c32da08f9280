"""The Plan: the only contract between planner, loader, evaluation and reports, as versioned JSON that round-trips."""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardplan.errors import ConfigError, nearest, one_line
from shardplan.experts.method import ExpertMethod
from shardplan.hardware import GIB, parse_slice
from shardplan.hardware.mesh_axes import MESH_AXES
from shardplan.plan.attention_plan import AttentionPlan, Strategy
from shardplan.plan.displayed import Displayed
from shardplan.plan.file.details import Details
from shardplan.plan.file.parameters import ParameterPlan, Tiles
from shardplan.plan.file.sections import CostPlan, HardwareInfo, MemoryPlan, ModelInfo, SearchInfo
from shardplan.plan.mapping import mesh_size, mesh_text, shard_count
from shardplan.plan.serialization import checksum, decode
from shardplan.plan.workload.dtypes import itemsize
from shardplan.plan.workload.workload import AUTO_BATCH, AUTO_POSITION, BATCH_AXIS, Workload
from shardplan.positions.sequence_order import SequenceOrder

SCHEMA_VERSION = 1
KEPT_DTYPE = "float32"
"""The dtype of parameters that do not follow `workload.param_dtype`; see `shardplan.model.dtypes.parameter_dtypes`."""
REQUIRED_WORKLOAD = {"kind", "batch", "position", "param_dtype", "compute_dtype"}
"""Keys of a Plan's workload that have no default, because the Plan follows from them."""
CHECKSUM = "checksum"
"""Key of a Plan's JSON by which edits are detected."""
INVALID = "not a valid plan (plan again)"
"""Beginning of a message about values that are not a Plan."""
UNCHECKED = {CHECKSUM, "search", "versions", "details"}
"""Keys of a Plan file that its checksum leaves out, because they are only for people to read."""
Mapping = dict[str, list[str]]
"""Logical axis -> mesh axes, major to minor; a logical axis that is absent is replicated."""


@dataclass(frozen=True)
class Plan(Displayed):
    """A mesh, both mappings, and the memory, cost and settings that follow from them."""

    model: ModelInfo
    workload: Workload
    hardware: HardwareInfo
    mesh: dict[str, int]
    """Mesh axis -> size, major to minor; the product is the number of devices."""
    compute_mapping: Mapping
    """Sharding of activations, and of parameters in computations."""
    param_mapping: Mapping
    """Sharding of stored parameters."""
    parameters: list[ParameterPlan]
    memory: MemoryPlan
    cost: CostPlan
    search: SearchInfo
    versions: dict[str, str]
    compiler_options: dict[str, str] = field(default_factory=dict)
    """Options of the TPU compiler that the times assume; `eval` compiles with them."""
    attention: AttentionPlan = field(default_factory=AttentionPlan)
    experts: ExpertMethod | None = None
    """How routed experts are computed; None for a model without experts, and in plans of older versions."""
    details: Details | None = field(default=None, repr=False, compare=False)
    """Data for the report; None in plans of older versions."""
    schema_version: int = SCHEMA_VERSION

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s utilisation: FLOPs that the model needs / (step seconds * peak FLOP/s of all devices).

        None if the Plan does not record the model's FLOPs, and for CPUs, which have no peak.
        """
        hardware, cost = parse_slice(self.hardware.slice), self.cost
        if hardware.is_cpu or cost.model_flops is None or not cost.step_seconds:
            return None
        return cost.model_flops / (cost.step_seconds * hardware.devices * hardware.generation.flops)

    def tiles_of(self, path: str) -> Tiles:
        """Return which device holds which tile of a parameter; a notebook displays the tiles.

        Args:
            path: path of the parameter, or its end, such as mlp.gate_proj.weight.

        Raises:
            ConfigError: no parameter has this path, or several end in it.
        """
        matches = [each for each in self.parameters if f".{each.path}".endswith(f".{path}")]
        if len(matches) > 1:
            paths = ", ".join(each.path for each in matches)
            raise ConfigError(f"{path} is the end of several parameters; write more of one of them: {paths}")
        if not matches:
            ends = [".".join(each.path.split(".")[-path.count(".") - 1 :]) for each in self.parameters]
            raise ConfigError(f"no parameter {path}; {nearest(path, ends)}")
        return Tiles(matches[0], self.hardware.slice, self.mesh)

    def to_json(self) -> dict[str, Any]:
        """Return the Plan as JSON values, `schema_version` first and a checksum of the values last."""
        values = dataclasses.asdict(self)
        for name in ("details", "experts"):
            if values[name] is None:
                del values[name]
        if values["model"]["adapter"] is None:
            del values["model"]["adapter"]
        if values["model"]["kept_dtype"] is None:  # as in plans of before
            del values["model"]["kept_dtype"]
        for method in (values["attention"], *values["attention"]["kinds"].values()):
            if not method["kinds"]:  # as in plans of models with one kind of attention
                del method["kinds"]
        values = {"schema_version": values.pop("schema_version"), **values}
        return {**values, CHECKSUM: _checksum(values)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Plan":
        """Make a Plan from the JSON values of `to_json`.

        Raises:
            ConfigError: the values are not a plan, or have another schema version.
        """
        version = values.get("schema_version") if isinstance(values, dict) else None
        if version is None:
            raise ConfigError("not a plan: it has no schema_version; `shardplan plan --json` writes one")
        if version != SCHEMA_VERSION:
            raise ConfigError(f"plan has schema_version {version!r}; this shardplan reads {SCHEMA_VERSION}; plan again")
        workload = values.get("workload")
        missing = sorted(REQUIRED_WORKLOAD - (workload.keys() if isinstance(workload, dict) else set()))
        if missing:
            raise ConfigError(f"{INVALID}: workload has no {', '.join(missing)}")
        mesh = values.get("mesh")
        if isinstance(mesh, dict) and mesh:  # along an axis that the file does not name there is one device
            values = {**values, "mesh": {**mesh, **{axis: 1 for axis in MESH_AXES if axis not in mesh}}}
        try:
            plan = decode(cls, {name: value for name, value in values.items() if name != CHECKSUM})
        except ConfigError as error:
            raise ConfigError(f"{INVALID}: {error}") from error
        problem = next(plan._problems(), None)
        if problem is not None:
            raise ConfigError(f"{INVALID}: {problem}")
        return plan

    def _problems(self) -> Iterator[str]:
        """Yield every contradiction within the plan that an edit by hand can make."""
        sizes = mesh_text(self.mesh)
        if self.mesh.keys() != set(MESH_AXES) or min(self.mesh.values()) < 1:
            yield f"its mesh is {sizes or 'empty'}; it must be {' x '.join(MESH_AXES)}, each at least 1"
        devices = parse_slice(self.hardware.slice).devices
        if not math.prod(self.mesh.values()) == self.hardware.devices == devices:
            yield f"mesh {sizes} and {self.hardware.devices} devices, where {self.hardware.slice} has {devices}"
        for section in ("workload", "memory", "cost"):
            part = getattr(self, section)
            optional = {each.name for each in dataclasses.fields(part) if each.default is None}
            for name, amount in vars(part).items():
                if amount is None and name in optional:
                    continue
                if amount is None or (isinstance(amount, int | float) and not 0 <= amount < math.inf):
                    yield f"{section}.{name} is {amount}"
        if not self.cost.step_seconds:
            yield "cost.step_seconds is 0; it must be more than 0"
        yield from self.workload.problems()
        for key, value, open_value in (
            ("batch", self.workload.batch, AUTO_BATCH), ("position", self.workload.position, AUTO_POSITION),
        ):  # fmt: skip
            if value == open_value:
                yield f"workload.{key} is {value}; it must be at least 1"
        yield from self.workload.microbatch_problems()
        if not self.parameters:
            yield "it has no parameters"
        for where, mapping in (("compute_mapping", self.compute_mapping), ("param_mapping", self.param_mapping)):
            for axis, mesh_axes in mapping.items():
                yield from self._mesh_axis_problems(f"{where}.{axis}", mesh_axes)
        position = self.model.position
        shared = {*self.compute_mapping.get(BATCH_AXIS, ())} & {*self.compute_mapping.get(position, ())}
        if shared:
            yield f"compute_mapping has {BATCH_AXIS} and {position} both on {', '.join(sorted(shared))}"
        yield from self._attention_problems()
        for parameter in self.parameters:
            yield from self._mesh_axis_problems(
                parameter.path, [axis for axes in parameter.spec if axes for axis in axes]
            )
            if parameter.spec != [self.param_mapping.get(axis) for axis in parameter.axes]:
                yield f"{parameter.path} has the spec {parameter.spec}, not that of param_mapping"
            if parameter.bytes_per_device < 0:
                yield f"{parameter.path} has {parameter.bytes_per_device} bytes"

    def _attention_problems(self) -> Iterator[str]:
        """Yield what is wrong with the attention plan, for all kinds of attention."""
        yield from self._method_problems("attention", self.attention)
        for kind, method in self.attention.kinds.items():
            where = f"attention.kinds.{kind}"
            yield from self._method_problems(where, method)
            if method.kinds:
                yield f"{where} has kinds of its own"
            orders = [
                (each.layout, each.ring, each.ulysses) if each.layout != SequenceOrder.CONTIGUOUS else each.layout
                for each in (method, self.attention)
            ]
            if orders[0] != orders[1]:
                yield f"{where} has another order of positions than attention; give all the same layout and ring"

    def _method_problems(self, where: str, method: AttentionPlan) -> Iterator[str]:
        """Yield what is wrong with a method of attention: its degrees, its strategy, or its order of positions."""
        parts = f"{where}.ulysses {method.ulysses} x ring {method.ring}"
        degree = math.prod(self.mesh.get(axis, 1) for axis in self.compute_mapping.get(self.model.position, []))
        if min(method.ulysses, method.ring) < 1:
            yield f"{parts}; each must be at least 1"
        elif method.strategy != Strategy.NONE and method.ulysses * method.ring != degree:
            yield f"{parts} where {degree} devices shard {self.model.position}"
        users_of_ring = (Strategy.ALL_GATHER, Strategy.RING, Strategy.HYBRID)
        for size, users in ((method.ulysses, (Strategy.ULYSSES, Strategy.HYBRID)), (method.ring, users_of_ring)):
            if size > 1 and method.strategy not in users:
                yield f"{parts} where the strategy is {method.strategy}"
        if method.layout == SequenceOrder.CONTIGUOUS:
            return
        if method.strategy == Strategy.NONE:
            yield f"{where}.layout {method.layout} where the strategy is {Strategy.NONE}"
        elif self.workload.is_training:
            kind = self.workload.kind
            yield f"{where}.layout {method.layout} where workload.kind is {kind}, which takes sequences in order"
        elif method.sequence_layout(self.workload.position).padded_length != self.workload.position:
            yield f"{where}.layout {method.layout} with {parts}: {self.workload.position} positions do not divide"

    def _mesh_axis_problems(self, where: str, mesh_axes: list[str]) -> Iterator[str]:
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
            ConfigError: the file does not exist, is not a plan, or was edited.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            plan = cls.from_json(values)
        except OSError as error:
            raise ConfigError(f"plan {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"plan {path} is not JSON: {one_line(error)}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        problem = next(_edits(plan, values), None)
        if problem is not None:
            raise ConfigError(f"{path}: {problem}; a Plan that was edited by hand cannot be used, plan again")
        return plan


def _checksum(values: dict[str, Any]) -> str:
    return checksum({name: value for name, value in values.items() if name not in UNCHECKED})


def _edits(plan: Plan, values: dict[str, Any]) -> Iterator[str]:
    """Yield signs that `values`, the JSON of `plan`, were edited after they were written; contradictions come first.

    Version 0.1 wrote no checksum; then an edit that contradicts nothing, of a time for example, is not noticed.
    """
    if values.get(CHECKSUM) != _checksum(values):
        yield from _contradictions(plan)
        if CHECKSUM in values:
            yield "it differs from what was written, so that its memory and times may be those of another plan"


def _contradictions(plan: Plan) -> Iterator[str]:
    """Yield the contradictions within `plan`, which arise if one part of it is edited by hand."""
    yield from _hardware_contradictions(plan)
    known = {*plan.model.axes, BATCH_AXIS, plan.model.position}
    for where, mapping in (("compute_mapping", plan.compute_mapping), ("param_mapping", plan.param_mapping)):
        for axis in mapping.keys() - known:
            if not plan.search.given:  # a mapping by hand may have axes of other models
                yield f"{where} has logical axis {axis!r}; {nearest(axis, known)}"
    workload, mapping = plan.workload, plan.compute_mapping
    yield from _indivisible(plan, "workload.batch", workload.batch, mapping.get(BATCH_AXIS))
    yield from _indivisible(plan, "workload.position", workload.position, mapping.get(plan.model.position))
    for parameter in plan.parameters:
        yield from _parameter_contradictions(plan, parameter)
    stored = sum(parameter.bytes_per_device for parameter in plan.parameters)
    if plan.memory.parameters != stored:
        yield f"memory.parameters is {plan.memory.parameters}, those of the list are {stored} bytes"


def _hardware_contradictions(plan: Plan) -> Iterator[str]:
    """Yield contradictions between the device memory that the plan records and the device memory of its slice."""
    hardware, expected = plan.hardware, parse_slice(plan.hardware.slice)
    # virtual devices share the memory of the machine that planned
    if not expected.is_cpu and hardware.hbm_gib != expected.generation.hbm_gib:
        yield f"hardware.hbm_gib is {hardware.hbm_gib}, {hardware.slice} has {expected.generation.hbm_gib}"
    if plan.memory.available != int(hardware.hbm_gib * GIB):
        yield f"memory.available is {plan.memory.available}, not the bytes of hardware.hbm_gib {hardware.hbm_gib}"


def _parameter_contradictions(plan: Plan, parameter: ParameterPlan) -> Iterator[str]:
    """Yield contradictions of a parameter's type, dimensions or bytes with its axes and the workload."""
    path, dtype = parameter.path, plan.workload.param_dtype
    if parameter.dtype in (dtype, KEPT_DTYPE):
        dtype = parameter.dtype
    else:
        yield f"{path} has dtype {parameter.dtype}, workload.param_dtype is {dtype}"
    for (axis, size), mesh_axes in zip(parameter.axes.items(), parameter.spec, strict=True):
        yield from _indivisible(plan, f"{axis} of {path}", size, mesh_axes)
    shards = shard_count(plan.mesh, parameter.spec)
    expected = round(math.prod(parameter.axes.values()) * itemsize(dtype) / shards)
    if parameter.bytes_per_device != expected:
        yield f"{path} has bytes_per_device {parameter.bytes_per_device}, its size over {shards} shards is {expected}"


def _indivisible(plan: Plan, what: str, size: int, mesh_axes: list[str] | None) -> Iterator[str]:
    """Yield an error if the `size` of `what` is not a multiple of its shards."""
    shards = mesh_size(plan.mesh, mesh_axes or ())
    if size % shards:
        yield f"{what} is {size}, which the {shards} shards over {' x '.join(mesh_axes or ())} do not divide"
