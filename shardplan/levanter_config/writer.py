"""The Plan as the `trainer:` section of a Levanter configuration, and in Python what YAML cannot say."""

from collections.abc import Iterator
from typing import Any

import yaml

from shardplan.hardware import parse_slice
from shardplan.hardware.multislice import slices_by_axis
from shardplan.levanter_config.trainer_section import BATCH_MESH_AXES, DCN_AXIS, SHARED_BY_DEFAULT
from shardplan.plan.mapping import MeshAxes, as_tuples, mesh_size
from shardplan.plan.plan import BATCH_AXIS, BLOCKWISE, UNCUT, Mapping, Plan
from shardplan.positions.sequence_layout import CONTIGUOUS

SPLASH_NEEDS_WHOLE = ("position", "q_heads_per_group", "head_size")
"""Logical axes that Levanter's splash attention, its default on TPUs, takes for whole wherever they are cut."""


def trainer_section(plan: Plan) -> dict[str, Any]:
    """Levanter's `trainer:` keys for the plan's mesh, batch and mappings; see `inexpressible`.

    In Levanter data is what replica and model leave of the devices, parameters rest as they are computed with unless
    told otherwise, and an evaluation has as many sequences as a training step.
    """
    replica_slices, replica = _replica(plan)
    compute = {axis: mesh_axes for axis, mesh_axes in plan.compute_mapping.items() if axis != BATCH_AXIS}
    whole_at_rest = dict.fromkeys(axis for axis in compute if axis not in plan.param_mapping)
    return {
        "mp": _types(plan),
        "replica_dcn_axis_size": replica_slices,
        "replica_ici_axis_size": replica,
        "model_axis_size": plan.mesh["model"],
        **_batches(plan),
        "fsdp_axis": None,
        "axis_resources": _values(compute),
        "parameter_axis_resources": {**_values(plan.param_mapping), **whole_at_rest},
    }


def mesh_trainer_section(plan: Plan) -> dict[str, Any] | None:
    """The same for the later schema, with a `mesh` section; None where slices cut data, which that has no name for.

    It has lists of mesh axes, and says the batch like any other axis.
    """
    replica_slices, replica = _replica(plan)
    slices = parse_slice(plan.hardware.slice).slices
    if replica_slices != slices:
        return None
    across = [DCN_AXIS] if slices > 1 else []
    names = {"replica": across + (["replica"] if replica > 1 or not across else [])}

    def named(mapping: Mapping) -> dict[str, str | list[str]]:
        return _values({axis: [n for m in axes for n in names.get(m, [m])] for axis, axes in mapping.items()})

    compute, params = named(plan.compute_mapping), named(plan.param_mapping)
    shared = {axis: value for axis, value in compute.items() if axis != BATCH_AXIS and params.get(axis) == value}
    whole: dict[str, Any] = {axis: [] for axis in SHARED_BY_DEFAULT if axis not in shared}
    return {
        "mp": _types(plan),
        **_batches(plan),
        "mesh": {
            "axes": {"replica": replica, "data": plan.mesh["data"], "model": plan.mesh["model"]},
            **({"dcn_axes": {DCN_AXIS: slices}} if across else {}),
            "shared_mapping": {**shared, **whole},
            "compute_mapping": {BATCH_AXIS: [], **{a: value for a, value in compute.items() if a not in shared}},
            "param_mapping": {axis: value for axis, value in params.items() if axis not in shared},
        },
    }


def inexpressible(plan: Plan) -> list[str]:
    """Why Levanter 1.2.dev1644 does not do as planned with `trainer_section` alone; empty where it does."""
    return list(_inexpressible(plan))


def trainer_python(plan: Plan) -> str | None:
    """Python for a class that is Levanter's TrainerConfig with the plan's mappings; None where YAML suffices."""
    if not inexpressible(plan):
        return None
    batch = _batch(plan)
    # without a batch axis in the mapping, Levanter's data loader and train step refuse
    compute = {BATCH_AXIS: batch, **as_tuples(plan.compute_mapping)}
    return (
        "from levanter.trainer import TrainerConfig\n"
        "\n"
        "class PlannedTrainerConfig(TrainerConfig):\n"
        f"    compute_axis_mapping = {compute!r}\n"
        f"    parameter_axis_mapping = {as_tuples(plan.param_mapping)!r}\n"
        f"    data_axis_size = {mesh_size(plan.mesh, batch)}  # groups of devices with sequences of their own\n"
    )


def trainer_yaml(plan: Plan, is_flat: bool = True) -> str:
    """`trainer_section` as text to paste; what YAML cannot say follows as a comment, with `trainer_python`.

    Args:
        is_flat: otherwise `mesh_trainer_section`, where that can say the plan.
    """
    section = None if is_flat else mesh_trainer_section(plan)
    text = yaml.safe_dump(
        {"trainer": section or trainer_section(plan)}, sort_keys=False, default_flow_style=None, width=120
    )
    notes = list(_notes(plan))
    python = trainer_python(plan) if section is None else None
    if python is not None:
        notes += [
            *(f"YAML alone is not this plan: {reason}." for reason in inexpressible(plan)),
            "Take this class in place of TrainerConfig:",
            "",
            *python.splitlines(),
        ]
    return text + "".join(f"# {line}".rstrip() + "\n" for line in notes)


def _replica(plan: Plan) -> tuple[int, int]:
    """Slices along replica, and its size within one."""
    slices = parse_slice(plan.hardware.slice).slices
    along = dict(zip(plan.mesh, slices_by_axis(slices, plan.mesh), strict=True))["replica"]
    return along, plan.mesh["replica"] // along


def _types(plan: Plan) -> str:
    return f"p={plan.workload.param_dtype},c={plan.workload.compute_dtype}"


def _batches(plan: Plan) -> dict[str, int]:
    work = plan.workload
    per_device = work.batch // work.microbatches // mesh_size(plan.mesh, _batch(plan))
    return {
        "train_batch_size": work.batch,
        **({"per_device_parallelism": per_device} if work.microbatches > 1 else {}),
    }


def _inexpressible(plan: Plan) -> Iterator[str]:
    cuts = [*plan.compute_mapping.items(), *plan.param_mapping.items()]
    listed = dict.fromkeys(axis for axis, mesh_axes in cuts if len(mesh_axes) > 1 and axis != BATCH_AXIS)
    if listed:
        yield f"Levanter takes a list of mesh axes ({', '.join(listed)}) for one name, and finds no such mesh axis"
    batch = _batch(plan)
    if _cutting(plan, batch) != _cutting(plan, tuple(BATCH_MESH_AXES)):
        planned = " x ".join(batch) or "no mesh axis"
        yield f"Levanter always maps the batch to {' x '.join(BATCH_MESH_AXES)}, the plan to {planned}"


def _notes(plan: Plan) -> Iterator[str]:
    """What is to be said in other sections."""
    if plan.workload.kind == "train" and plan.workload.gradient_checkpointing != "default":
        yield f"model.gradient_checkpointing must be {plan.workload.gradient_checkpointing}, as planned."
    cut = [axis for axis in SPLASH_NEEDS_WHOLE if _cutting(plan, tuple(plan.compute_mapping.get(axis, ())))]
    if parse_slice(plan.hardware.slice).is_cpu:
        return  # Levanter's attention on CPUs is no kernel, and right wherever it is cut
    method = plan.attention
    if method.strategy != UNCUT:
        order = f'Layout({plan.workload.position}, {method.ring}, {method.ulysses}, "{method.layout}")'
        given = (
            (f"ulysses={method.ulysses}", method.ulysses > 1),
            (f'kernel="{method.kernel}"', method.kernel != BLOCKWISE),
            (f"layout={order}", method.layout != CONTIGUOUS),
        )
        settings = ", ".join([f'"{method.strategy}"', *(text for text, is_given in given if is_given)])
        yield "Attention must be that of shardplan.attention.levanter, as planned: with positions cut Levanter's own is"
        yield f"wrong in silence. model = with_sequence_parallel(model, Method({settings}))"
        if method.layout != CONTIGUOUS:
            yield f"Examples must be in its order, shard_sequence(example, {order}) of"
            yield "shardplan.attention.sequence, and their losses next_token_losses(model, sequence)."
    elif cut:
        yield (
            f"model.attn_backend must be jax_flash: with {', '.join(cut)} cut, Levanter's default on TPUs is wrong in "
            "silence."
        )


def _batch(plan: Plan) -> MeshAxes:
    return tuple(plan.compute_mapping.get(BATCH_AXIS, ()))


def _cutting(plan: Plan, mesh_axes: MeshAxes) -> MeshAxes:
    """Those of `mesh_axes` that have more than one device."""
    return tuple(mesh_axis for mesh_axis in mesh_axes if plan.mesh[mesh_axis] > 1)


def _values(mapping: Mapping) -> dict[str, str | list[str]]:
    """A mesh axis, or several as a list, for every logical axis."""
    return {axis: mesh_axes[0] if len(mesh_axes) == 1 else list(mesh_axes) for axis, mesh_axes in mapping.items()}
