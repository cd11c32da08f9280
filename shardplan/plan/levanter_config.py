"""The layout that the `trainer:` section of a hand-written Levanter configuration asks for.

Imports neither Levanter nor JAX, so that a wrong configuration is complained about instantly. Levanter has had two
schemas, and both are read: flat keys (`model_axis_size`, `tensor_parallel_axes`, `fsdp_axis`, ...; 1.2.dev1644, which
shardplan runs on), and a later `mesh` section (`axes`, `dcn_axes`, `shared_mapping`, ...). A trainer with keys of
neither has the defaults of the flat one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardplan.errors import ConfigError, nearest, one_line

MESH_AXES = ("replica", "data", "model")
"""Axes of a plan's mesh, major to minor."""
DCN_AXIS = "replica_dcn"
"""Mesh axis of the `mesh` schema across slices; a plan's mesh has it as the major part of `replica`."""
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
MESH_KEYS = ("axes", "batch_axis_name", "compute_mapping", "dcn_axes", "param_mapping", "shared_mapping")

# `half` is float16 on other accelerators than TPUs; plans are for TPUs.
DTYPE_NAMES = {
    **dict.fromkeys(("bf16", "bfloat16", "half"), "bfloat16"),
    **dict.fromkeys(("f16", "float16"), "float16"),
    **dict.fromkeys(("f32", "float32", "full"), "float32"),
}
DTYPE_ROLES = {"p": "p", "params": "p", "c": "c", "compute": "c", "o": "o", "output": "o"}

AxisLists = dict[str, list[str]]
"""Logical axis -> mesh axes, major to minor; none where it is replicated."""


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
    param_dtype: str | None
    """bfloat16, float16 or float32; None where the configuration does not say."""
    compute_dtype: str | None


def is_levanter_config(values: Any) -> bool:
    """Whether the content of a YAML file is a Levanter configuration rather than one of shardplan."""
    return isinstance(values, Mapping) and "trainer" in values and not {"hardware", "workload"} & set(values)


def read_levanter_config(path: str, devices: int, slices: int = 1) -> LevanterLayout:
    """The layout on `devices` devices, in `slices` equal slices, that the Levanter configuration `path` asks for.

    Raises:
        ConfigError: no such file, no `trainer` section in it, a value of the wrong type, sizes that do not make
            `devices`, or a mesh that is not replica x data x model.
    """
    trainer = _Section("trainer", _read_trainer(path))
    if devices % slices:
        raise ConfigError(f"{devices} devices are not {slices} slices of equal size")
    if "mesh" not in trainer.values:
        mesh, compute, params, batch_shards = _flat_layout(trainer, devices, slices)
    else:
        for key in FLAT_KEYS:
            if key in trainer.values:
                raise ConfigError(f"trainer.mesh and trainer.{key} are of two versions of Levanter; keep one of them")
        mesh, compute, params, batch_shards = _mesh_layout(trainer.section("mesh"), devices, slices)
    param_dtype, compute_dtype = _dtypes(trainer)
    return LevanterLayout(mesh, _cut(compute), _cut(params), _batch(trainer, batch_shards), param_dtype, compute_dtype)


Layout = tuple[dict[str, int], AxisLists, AxisLists, int]
"""Mesh, mapping while computing, mapping at rest, and groups of devices that each have sequences of their own."""


def _flat_layout(trainer: "_Section", devices: int, slices: int) -> Layout:
    model = trainer.size("model_axis_size", 1)
    replica = trainer.size("replica_ici_axis_size", 1)
    replica_dcn = trainer.size("replica_dcn_axis_size", 1, absorbs=True)
    replica_dcn = slices if replica_dcn == -1 else replica_dcn
    data = _left(
        _devices_text(devices, slices),
        devices // slices,
        {"trainer.model_axis_size": model, "trainer.replica_ici_axis_size": replica},
    )
    data_dcn = _left(f"the {_count(slices, 'slice')}", slices, {"trainer.replica_dcn_axis_size": replica_dcn})
    mesh = {"replica": replica_dcn * replica, "data": data_dcn * data, "model": model}

    compute = trainer.mapping("axis_resources", {}, MESH_AXES)
    compute |= {axis: ["model"] for axis in trainer.axes("tensor_parallel_axes", None, may_be_text=False)}
    batch_axis = trainer.axis("batch_axis", "batch")
    if batch_axis is not None:
        compute[batch_axis] = BATCH_MESH_AXES
    params = compute | trainer.mapping("parameter_axis_resources", {}, MESH_AXES)
    # last, so that it wins over parameter_axis_resources: with its default, `embed` rests on `data` whatever they say
    params |= {axis: ["data"] for axis in trainer.axes("fsdp_axis", "embed")}
    return mesh, compute, params, mesh["replica"] * mesh["data"]


def _mesh_layout(section: "_Section", devices: int, slices: int) -> Layout:
    section.only(MESH_KEYS, "unknown key")
    dcn_axes = section.section("dcn_axes")
    dcn_axes.only([DCN_AXIS], "a plan's mesh is replica x data x model, its only axis across slices replica_dcn; not")
    replica_dcn = dcn_axes.size(DCN_AXIS, -1, absorbs=True)
    if replica_dcn not in (-1, slices):
        raise ConfigError(
            f"{dcn_axes.name}.{DCN_AXIS} is {replica_dcn}, but there {'is' if slices == 1 else 'are'} "
            f"{_count(slices, 'slice')}; set it to {slices} or -1"
        )
    mesh = _mesh_axes(section.section("axes"), devices, slices)

    names = (*MESH_AXES, DCN_AXIS)
    shared = {"mlp": ["model"], "heads": ["model"]} | section.mapping("shared_mapping", {}, names)
    given = section.mapping("compute_mapping", {}, names)
    compute = dict(shared)
    batch_axis = section.axis("batch_axis_name", "batch")
    if batch_axis is not None and batch_axis not in shared:
        # what `batch` is mapped to holds for a batch axis of another name
        compute[batch_axis] = given.get("batch", [DCN_AXIS, *BATCH_MESH_AXES])
    compute |= given
    params = shared | section.mapping("param_mapping", {"embed": ["data"]}, names)

    def without_dcn(mapping: AxisLists) -> AxisLists:
        return {axis: _without_dcn(axis, mesh_axes, mesh["replica"], slices) for axis, mesh_axes in mapping.items()}

    compute, params = without_dcn(compute), without_dcn(params)
    mesh["replica"] *= slices
    batch_shards = math.prod(mesh[mesh_axis] for mesh_axis in compute.get(batch_axis or "batch", []))
    return mesh, compute, params, batch_shards


def _mesh_axes(axes: "_Section", devices: int, slices: int) -> dict[str, int]:
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
    left = _left(_devices_text(devices, slices), devices // slices, known)
    if absorbing:
        return mesh | {absorbing[0]: left}
    if left > 1:
        product = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        raise ConfigError(
            f"{axes.name}: {product} is 1/{left} of {_devices_text(devices, slices)}; "
            f"set data to {mesh['data'] * left} or -1"
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


def _cut(mapping: AxisLists) -> AxisLists:
    return {axis: list(mesh_axes) for axis, mesh_axes in mapping.items() if mesh_axes}


def _left(whole: str, count: int, sizes: dict[str, int]) -> int:
    """`count` divided by every one of `sizes`, which have names; `whole` says in words what `count` counts."""
    for name, size in sizes.items():
        if count % size:
            divisors = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
            around = [max(d for d in divisors if d < size), *[d for d in divisors if d > size][:1]]
            raise ConfigError(f"{name} {size} does not divide {whole}; did you mean {' or '.join(map(str, around))}?")
        count //= size
        if size > 1:
            whole = f"the {_count(count, 'device')} that {name} {size} leaves"
    return count


def _devices_text(devices: int, slices: int) -> str:
    return f"the {_count(devices // slices, 'device')}{' of a slice' if slices > 1 else ''}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _batch(trainer: "_Section", shards: int) -> int | None:
    """Sequences per step, where `shards` groups of devices each have sequences of their own."""
    value = trainer.values.get("train_batch_size")
    if isinstance(value, list) and value:
        steps = [_Section(f"trainer.train_batch_size[{index}]", step) for index, step in enumerate(value)]
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


def _dtypes(trainer: "_Section") -> tuple[str | None, str | None]:
    """Types of the parameters, at rest and while computing."""
    if "mp" not in trainer.values:
        return None, None
    policy = trainer.values["mp"]
    if not isinstance(policy, str):
        raise ConfigError(f"trainer.mp is {_text(policy)}; it must be text such as 'p=f32,c=bf16'")
    dtypes = {"p": "float32"}
    for part in policy.split(",") if "=" in policy else [f"p={policy}"]:
        role, _, name = part.partition("=")
        if role not in DTYPE_ROLES:
            raise ConfigError(f"trainer.mp is {_text(policy)}: unknown key {role!r}; {nearest(role, DTYPE_ROLES)}")
        if name not in DTYPE_NAMES:
            raise ConfigError(f"trainer.mp is {_text(policy)}: no type {name!r}; {nearest(name, DTYPE_NAMES)}")
        dtypes[DTYPE_ROLES[role]] = DTYPE_NAMES[name]
    return dtypes["p"], dtypes.get("c", dtypes["p"])


class _Section:
    """A section of the configuration, whose values are checked when they are read. `name` is its dotted name."""

    def __init__(self, name: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{name} is {_text(values)}; it must be a section with keys")
        self.name = name
        self.values: dict[Any, Any] = values

    def only(self, keys: Iterable[str], complaint: str) -> None:
        """Raises ConfigError, beginning with `complaint`, where there is a key that is not one of `keys`."""
        for key in self.values:
            if key not in keys:
                raise ConfigError(f"{self.name}: {complaint} {_text(key)}; {nearest(str(key), keys)}")

    def section(self, key: str) -> "_Section":
        """A section in this one; without keys where it is not given."""
        return _Section(f"{self.name}.{key}", self.values.get(key, {}))

    def size(self, key: str, default: int | None, absorbs: bool = False) -> int:
        """A positive number, or -1 if `absorbs`."""
        value = self.values.get(key, default)
        if type(value) is not int or (value < 1 and not (absorbs and value == -1)):
            wanted = "a positive integer or -1" if absorbs else "a positive integer"
            raise ConfigError(f"{self.name}.{key} is {_text(value)}; it must be {wanted}")
        return value

    def axis(self, key: str, default: str) -> str | None:
        """The name of a logical axis, or none."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.name}.{key} is {_text(value)}; it must be the name of an axis, or null")
        return value

    def axes(self, key: str, default: str | None, may_be_text: bool = True) -> list[str]:
        """Names of logical axes: a list, none, or one by itself if `may_be_text`."""
        names = _names(self.values.get(key, default), may_be_text)
        if names is None:
            wanted = "the name of an axis, a list of names, or null" if may_be_text else "a list of axes, or null"
            raise ConfigError(f"{self.name}.{key} is {_text(self.values[key])}; it must be {wanted}")
        return names

    def mapping(self, key: str, default: AxisLists, mesh_axes: Iterable[str]) -> AxisLists:
        """Logical axis -> mesh axes, each one of `mesh_axes`."""
        if key not in self.values:
            return dict(default)
        mapping = {}
        for axis, value in self.section(key).values.items():
            names = _names(value)
            if not isinstance(axis, str) or names is None:
                raise ConfigError(
                    f"{self.name}.{key} maps {_text(axis)} to {_text(value)}; "
                    "it must map names of axes to a mesh axis, a list of them, or null"
                )
            for name in names:
                if name not in mesh_axes:
                    raise ConfigError(
                        f"{self.name}.{key} maps {_text(axis)} to the unknown mesh axis {_text(name)}; "
                        f"{nearest(name, mesh_axes)}"
                    )
            mapping[axis] = names
        return mapping


def _names(value: Any, may_be_text: bool = True) -> list[str] | None:
    """A list of names from a name, a list of names or null; None where it is something else."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value] if may_be_text else None
    return value if isinstance(value, list) and all(isinstance(name, str) for name in value) else None


def _text(value: Any) -> str:
    """A value of the file, on one line and not longer than that."""
    return f"{value!r:.80}"


def _read_trainer(path: str) -> Any:
    """What the file `path` has under `trainer`."""
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
    return values["trainer"]
