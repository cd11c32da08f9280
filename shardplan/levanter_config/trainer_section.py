"""The layout that the `trainer:` section of a hand-written Levanter configuration asks for.

Imports neither Levanter nor JAX, so that a wrong configuration is complained about instantly. Levanter has had two
schemas, and both are read: flat keys (`model_axis_size`, `tensor_parallel_axes`, `fsdp_axis`, ...; 1.2.dev1644, which
shardplan runs on), and a later `mesh` section (`axes`, `dcn_axes`, `shared_mapping`, ...). A trainer with keys of
neither has the defaults of the flat one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from shardplan.config import MESH_AXES, WorkloadConfig
from shardplan.errors import ConfigError, nearest, one_line
from shardplan.hardware import divisors
from shardplan.levanter_config.section import AxisLists, Entry, Section, text_of
from shardplan.plan.mapping import mesh_text

DCN_AXIS = "replica_dcn"
"""Mesh axis of the `mesh` schema across slices; a plan's mesh has it as the major part of `replica`."""
SHARED_BY_DEFAULT = ("mlp", "heads")
"""Logical axes that the `mesh` schema maps to model where the file does not say."""
DEFAULT_FSDP_AXIS = "embed"
"""What `fsdp_axis` is where the flat schema does not say."""
BATCH_MESH_AXES = ["replica", "data"]

FLAT_KEYS = (
    "axis_resources",
    "batch_axis",
    "fsdp_axis",
    "model_axis_size",
    "parameter_axis_resources",
    "replica_dcn_axis_size",
    "replica_ici_axis_size",
    "tensor_parallel_axes",
)
OTHER_KEYS = (
    "mesh",
    "use_explicit_mesh_axes",
    "allow_nondivisible_batch_size",
    "checkpointer",
    "crash_on_inf",
    "crash_on_nan",
    "allow_partial_checkpoint",
    "distributed",
    "id",
    "initialize_from",
    "jax_compilation_cache_dir",
    "jax_config",
    "load_checkpoint",
    "load_checkpoint_path",
    "log_dir",
    "log_jaxprs",
    "log_xla_hlo",
    "max_eval_batches",
    "model_averaging",
    "mp",
    "num_train_steps",
    "per_device_eval_parallelism",
    "per_device_parallelism",
    "profiler",
    "profiler_num_steps",
    "profiler_perfetto_link",
    "profiler_start_step",
    "quantization",
    "ray",
    "require_accelerator",
    "seed",
    "shutdown_at_exit",
    "steps_per_eval",
    "tracker",
    "train_batch_size",
    "wandb",
    "watch",
)
"""Keys of the trainer section beside `FLAT_KEYS`; the first two are of the later schema alone."""
MESH_KEYS = ("axes", "batch_axis_name", "compute_mapping", "dcn_axes", "param_mapping", "shared_mapping")

LEVANTER_BATCH = 512
"""What `train_batch_size` is where the file does not say."""

# `half` is float16 on other accelerators than TPUs; plans are for TPUs.
DTYPE_NAMES = {
    **dict.fromkeys(("bf16", "bfloat16", "half"), "bfloat16"),
    **dict.fromkeys(("f16", "float16"), "float16"),
    **dict.fromkeys(("f32", "float32", "full"), "float32"),
}
DEFAULT_POLICY = "f32"
"""What `mp` is where the file does not say."""
DTYPE_ROLES = {"p": "p", "params": "p", "c": "c", "compute": "c", "o": "o", "output": "o"}


@dataclass(frozen=True)
class LevanterLayout:
    """What Levanter would do with a configuration."""

    mesh: dict[str, int]
    """Mesh axis (replica, data, model) -> size, major to minor; the product is the number of devices."""
    compute_mapping: AxisLists
    """For activations, and for parameters while they are used. A logical axis that is absent is replicated."""
    param_mapping: AxisLists
    """For parameters at rest."""
    batch: int | None
    """Sequences per step, the most of a schedule; None where the configuration does not say."""
    param_dtype: str
    """bfloat16, float16 or float32."""
    compute_dtype: str
    microbatch: int | None
    """Sequences that a training step takes at once, per_device_parallelism on each device; None for all of them."""
    batch_axis: str
    """What the logical axis of the sequences is called."""
    batch_shards: int
    """Groups of devices that each have sequences of their own, as the trainer counts them."""
    compute_entries: tuple[Entry, ...]
    """Where `compute_mapping` is from; of several entries of one logical axis the last one wins."""
    param_entries: tuple[Entry, ...]

    def workload(self, asked: WorkloadConfig) -> WorkloadConfig:
        """The workload `asked` for, with the batch, its parts and the types that the configuration says."""
        return replace(
            asked,
            batch=self.batch or asked.batch,
            param_dtype=self.param_dtype,
            compute_dtype=self.compute_dtype,
            microbatches=self.microbatches if asked.kind == "train" else 1,
        )

    @property
    def microbatches(self) -> int:
        """Parts of the batch that a training step takes one after the other, if they are even."""
        if self.batch is None or self.microbatch is None or self.batch % self.microbatch:
            return 1
        return self.batch // self.microbatch


class MeshSizeError(ConfigError):
    """Sizes of mesh axes that do not make the devices of the slice; `key` would have to be `nearest`."""

    def __init__(self, message: str, key: str, nearest: int) -> None:
        super().__init__(message)
        self.key, self.nearest = key, nearest


def is_levanter_config(values: Any) -> bool:
    """Whether the content of a YAML file is a Levanter configuration rather than one of shardplan."""
    return isinstance(values, Mapping) and "trainer" in values and not {"hardware", "workload"} & set(values)


def read_levanter_config(path: str, devices: int, slices: int = 1) -> LevanterLayout:
    """The layout on `devices` devices, in `slices` equal slices, that the Levanter configuration `path` asks for.

    Raises:
        ConfigError: what `read_file` and `layout_of` complain about.
    """
    return layout_of(read_file(path)["trainer"], devices, slices)


def read_file(path: str) -> dict[str, Any]:
    """The sections of the Levanter configuration `path`.

    Raises:
        ConfigError: no such file, not YAML, no `trainer` section in it, or a section that is a part of itself.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {one_line(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path} is not YAML: {one_line(error)}") from error
    if not isinstance(values, dict) or "trainer" not in values:
        held = f"the sections {', '.join(map(str, values))}" if isinstance(values, dict) else type(values).__name__
        held = " ".join(held.split())
        raise ConfigError(f"config file {path} holds {held:.200}, but no trainer section; is it for Levanter?")
    for name, section in values.items():
        endless = _endless(section, str(name), ())
        if endless is not None:
            raise ConfigError(
                f"config file {path}: {endless:.200} is an alias of a section that it is in; write it out"
            )
    return values


def _endless(value: Any, name: str, around: tuple[int, ...]) -> str | None:
    """Dotted name of a section or list within `value` that is one of those `around` it, as aliases can make it."""
    if not isinstance(value, dict | list):
        return None
    if id(value) in around:
        return name
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = (_endless(each, f"{name}.{key}", (*around, id(value))) for key, each in inner)
    return next(filter(None, found), None)


def layout_of(values: Any, devices: int, slices: int = 1) -> LevanterLayout:
    """The layout that the content `values` of a `trainer` section asks for.

    Raises:
        MeshSizeError: sizes that do not make `devices`.
        ConfigError: a value of the wrong type, or a mesh that is not replica x data x model.
    """
    trainer = Section("trainer", values)
    if devices % slices:
        raise ConfigError(f"{devices} devices are not {slices} slices of equal size")
    if "mesh" not in trainer.values:
        parts = _flat_layout(trainer, devices, slices)
    else:
        for key in FLAT_KEYS:
            if key in trainer.values:
                raise ConfigError(f"trainer.mesh and trainer.{key} are of two versions of Levanter; keep one of them")
        parts = _mesh_layout(trainer.section("mesh"), devices, slices)
    param_dtype, compute_dtype = _dtypes(trainer)
    per_device = trainer.size("per_device_parallelism", -1, absorbs=True)
    return LevanterLayout(
        parts.mesh,
        _mapping(parts.compute),
        _mapping(parts.params),
        _batch(trainer, parts.batch_shards),
        param_dtype,
        compute_dtype,
        None if per_device == -1 else per_device * parts.batch_shards,
        parts.batch_axis,
        parts.batch_shards,
        tuple(parts.compute),
        tuple(parts.params),
    )


@dataclass(frozen=True)
class _Parts:
    """What differs between the two schemas; see `LevanterLayout`."""

    mesh: dict[str, int]
    compute: list[Entry]
    params: list[Entry]
    batch_axis: str
    batch_shards: int


def _flat_layout(trainer: Section, devices: int, slices: int) -> _Parts:
    model = trainer.size("model_axis_size", 1)
    replica = trainer.size("replica_ici_axis_size", 1)
    replica_dcn = trainer.size("replica_dcn_axis_size", 1, absorbs=True)
    replica_dcn = slices if replica_dcn == -1 else replica_dcn
    data = _left(
        _devicestext_of(devices, slices),
        devices // slices,
        {"trainer.model_axis_size": model, "trainer.replica_ici_axis_size": replica},
    )
    data_dcn = _left(f"the {_count(slices, 'slice')}", slices, {"trainer.replica_dcn_axis_size": replica_dcn})
    mesh = {"replica": replica_dcn * replica, "data": data_dcn * data, "model": model}

    compute = trainer.entries("axis_resources", {}, MESH_AXES)
    tensor_parallel = trainer.axes("tensor_parallel_axes", None, may_be_text=False)
    compute += [Entry("trainer.tensor_parallel_axes", axis, ["model"]) for axis in tensor_parallel]
    batch_axis = trainer.axis("batch_axis", "batch")
    if batch_axis is not None:
        compute.append(Entry("trainer.batch_axis", batch_axis, BATCH_MESH_AXES))
    params = compute + trainer.entries("parameter_axis_resources", {}, MESH_AXES)
    # last, so that it wins over parameter_axis_resources: with its default, `embed` rests on `data` whatever they say
    params += [Entry("trainer.fsdp_axis", axis, ["data"]) for axis in trainer.axes("fsdp_axis", DEFAULT_FSDP_AXIS)]
    return _Parts(mesh, compute, params, batch_axis or "batch", mesh["replica"] * mesh["data"])


def _mesh_layout(section: Section, devices: int, slices: int) -> _Parts:
    section.only(MESH_KEYS, "unknown key")
    dcn_axes = section.section("dcn_axes")
    dcn_axes.only([DCN_AXIS], "a plan's mesh is replica x data x model, its only axis across slices replica_dcn; not")
    replica_dcn = dcn_axes.size(DCN_AXIS, -1, absorbs=True)
    if replica_dcn not in (-1, slices):
        key = f"{dcn_axes.name}.{DCN_AXIS}"
        raise MeshSizeError(
            f"{key} is {replica_dcn}, but there {'is' if slices == 1 else 'are'} "
            f"{_count(slices, 'slice')}; set it to {slices} or -1",
            key,
            slices,
        )
    mesh = _mesh_axes(section.section("axes"), devices, slices)

    names = (*MESH_AXES, DCN_AXIS)
    shared = section.entries("shared_mapping", {}, names)
    defaults = [Entry(f"{section.name}.shared_mapping.{axis}", axis, ["model"]) for axis in SHARED_BY_DEFAULT]
    shared = defaults + shared
    own = section.entries("compute_mapping", {}, names)
    batch_axis = section.axis("batch_axis_name", "batch")
    batch = []
    if batch_axis is not None and batch_axis not in {entry.axis for entry in shared}:
        # what `batch` is mapped to holds for a batch axis of another name
        mesh_axes = _all(own).get("batch", [DCN_AXIS, *BATCH_MESH_AXES])
        batch = [Entry(f"{section.name}.batch_axis_name", batch_axis, mesh_axes)]
    params = section.entries("param_mapping", {"embed": ["data"]}, names)

    def without_dcn(entries: list[Entry]) -> list[Entry]:
        return [replace(e, mesh_axes=_without_dcn(e.axis, e.mesh_axes, mesh["replica"], slices)) for e in entries]

    compute, params = without_dcn(shared + batch + own), without_dcn(shared + params)
    mesh["replica"] *= slices
    batch_axis = batch_axis or "batch"
    batch_shards = math.prod(mesh[mesh_axis] for mesh_axis in _mapping(compute).get(batch_axis, []))
    return _Parts(mesh, compute, params, batch_axis, batch_shards)


def _mesh_axes(axes: Section, devices: int, slices: int) -> dict[str, int]:
    """Sizes of the mesh axes within a slice. Levanter's order, data before replica, only says which device is where."""
    axes.only(MESH_AXES, "a plan's mesh is replica x data x model; not")
    mesh = {axis: axes.size(axis, -1 if axis == "data" else 1, absorbs=True) for axis in MESH_AXES}
    absorbing = [axis for axis, size in mesh.items() if size == -1]
    if len(absorbing) > 1 and "data" not in axes.values:
        absorbing.remove("data")
        mesh["data"] = 1
    if len(absorbing) > 1:
        raise ConfigError(f"{axes.name}: {' and '.join(absorbing)} are -1; only one can take the devices that are left")
    known = {f"{axes.name}.{axis}": mesh[axis] for axis in reversed(MESH_AXES) if axis not in absorbing}
    left = _left(_devicestext_of(devices, slices), devices // slices, known)
    if absorbing:
        return mesh | {absorbing[0]: left}
    if left > 1:
        raise MeshSizeError(
            f"{axes.name}: {mesh_text(mesh)} is 1/{left} of {_devicestext_of(devices, slices)}; "
            f"set data to {mesh['data'] * left} or -1",
            f"{axes.name}.data",
            mesh["data"] * left,
        )
    return mesh


def _without_dcn(axis: str, mesh_axes: list[str], replica: int, slices: int) -> list[str]:
    """`mesh_axes` of a mesh with replica_dcn on one where it is part of replica; `replica` is the size in a slice."""
    if slices == 1:
        return [mesh_axis for mesh_axis in mesh_axes if mesh_axis != DCN_AXIS]
    if replica == 1:
        kept = [mesh_axis for mesh_axis in mesh_axes if mesh_axis != "replica"]
        return ["replica" if mesh_axis == DCN_AXIS else mesh_axis for mesh_axis in kept]
    after_dcn = [index + 1 for index, mesh_axis in enumerate(mesh_axes) if mesh_axis == DCN_AXIS]
    if after_dcn != [index for index, mesh_axis in enumerate(mesh_axes) if mesh_axis == "replica"]:
        raise ConfigError(
            f"trainer.mesh maps {axis!r} to [{', '.join(mesh_axes)}]; with {slices} slices and replica {replica} only "
            "replica_dcn and replica together, in this order, are part of a plan's mesh"
        )
    return [mesh_axis for mesh_axis in mesh_axes if mesh_axis != DCN_AXIS]


def _all(entries: Iterable[Entry]) -> AxisLists:
    """Logical axis -> what its last entry says."""
    return {entry.axis: list(entry.mesh_axes) for entry in entries}


def _mapping(entries: Iterable[Entry]) -> AxisLists:
    """`_all`, without the logical axes that are replicated."""
    return {axis: mesh_axes for axis, mesh_axes in _all(entries).items() if mesh_axes}


def _left(whole: str, count: int, sizes: dict[str, int]) -> int:
    """`count` divided by every one of `sizes`, which have names; `whole` says in words what `count` counts."""
    for name, size in sizes.items():
        if count % size:
            around = [max(d for d in divisors(count) if d < size), *[d for d in divisors(count) if d > size][:1]]
            raise MeshSizeError(
                f"{name} {size} does not divide {whole}; did you mean {' or '.join(map(str, around))}?",
                name,
                min(around, key=lambda divisor: abs(divisor - size)),
            )
        count //= size
        if size > 1:
            whole = f"the {_count(count, 'device')} that {name} {size} leaves"
    return count


def _devicestext_of(devices: int, slices: int) -> str:
    return f"the {_count(devices // slices, 'device')}{' of a slice' if slices > 1 else ''}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _batch(trainer: Section, shards: int) -> int | None:
    """Sequences per step, where `shards` groups of devices each have sequences of their own."""
    value = trainer.values.get("train_batch_size")
    if isinstance(value, list) and value:
        steps = [Section(f"trainer.train_batch_size[{index}]", step) for index, step in enumerate(value)]
        return max(step.size("value", None) for step in steps)
    if "train_batch_size" not in trainer.values:
        return None
    batch = trainer.size("train_batch_size", None, absorbs=True)
    if batch != -1:
        return batch
    per_device = trainer.size("per_device_parallelism", -1, absorbs=True)
    if per_device == -1:
        raise ConfigError("trainer.train_batch_size and trainer.per_device_parallelism are both -1; set one of them")
    return per_device * shards


def _dtypes(trainer: Section) -> tuple[str, str]:
    """Types of the parameters, at rest and while computing."""
    policy = trainer.values.get("mp", DEFAULT_POLICY)
    if not isinstance(policy, str):
        raise ConfigError(f"trainer.mp is {text_of(policy)}; it must be text such as 'p=f32,c=bf16'")
    dtypes = {"p": "float32"}
    for part in policy.split(",") if "=" in policy else [f"p={policy}"]:
        role, _, name = part.partition("=")
        if role not in DTYPE_ROLES:
            raise ConfigError(f"trainer.mp is {text_of(policy)}: unknown key {role!r}; {nearest(role, DTYPE_ROLES)}")
        if name not in DTYPE_NAMES:
            raise ConfigError(f"trainer.mp is {text_of(policy)}: no type {name!r}; {nearest(name, DTYPE_NAMES)}")
        dtypes[DTYPE_ROLES[role]] = DTYPE_NAMES[name]
    return dtypes["p"], dtypes.get("c", dtypes["p"])
