"""Writes a Plan as the `trainer:` section of a Levanter configuration."""

import textwrap
from collections.abc import Iterator
from collections.abc import Mapping as AnyMapping
from itertools import chain
from typing import Any

import yaml

from shardplan.experts.method import ExpertMethod
from shardplan.hardware import parse_slice
from shardplan.hardware.mesh_axes import DCN_AXES
from shardplan.hardware.multislice import slices_by_axis
from shardplan.levanter_config.mesh_section import DEFAULT_SHARED_AXES
from shardplan.model.model_class import DECODER, LEVANTER, LEVANTER_CLASSES
from shardplan.plan.arguments import check_plan
from shardplan.plan.attention_plan import AttentionPlan, KernelName, SparseKernel
from shardplan.plan.mapping import MeshAxes, MeshShape, mesh_size
from shardplan.plan.plan import Mapping, Plan
from shardplan.plan.workload.checkpointing import CheckpointPolicy
from shardplan.plan.workload.workload import BATCH_AXIS
from shardplan.positions.sequence_order import SequenceOrder

YAML_WIDTH = 48
"""Column after which YAML breaks a line at the next comma, so that lines have at most 80 columns."""


def trainer_section(plan: Plan) -> dict[str, Any]:
    """Write the plan as the content of a `trainer:` section.

    A replicated axis is null. A replicated batch is mapped to a mesh axis of size 1, because Levanter's data loader
    needs a mesh axis. If no mesh axis has size 1, within and across slices, the batch is null too, and Levanter refuses
    the section.
    """
    mesh = mesh_keys(parse_slice(plan.hardware.slice).slices, plan.mesh, plan.compute_mapping, plan.param_mapping)
    return {"mp": _precision_policy(plan), **_batch_sizes(plan), "mesh": mesh}


def mesh_keys(
    slices: int, mesh: MeshShape, compute_mapping: Mapping, param_mapping: Mapping, batch_axis: str = BATCH_AXIS
) -> dict[str, Any]:
    """Write a mesh over `slices` slices and its mappings as the section `mesh`."""
    across = dict(zip(mesh, slices_by_axis(slices, mesh), strict=True))
    within = {axis: size // across[axis] for axis, size in mesh.items()}
    levanter_axes = {axis: [axis] for axis in mesh}
    """Mesh axis of a plan -> Levanter's mesh axes for it; two if it crosses slices."""
    for axis, dcn in DCN_AXES.items():
        if across[axis] > 1:
            levanter_axes[axis] = [dcn, axis] if within[axis] > 1 else [dcn]

    def rename(mapping: Mapping) -> dict[str, str | list[str] | None]:
        renamed = {}
        for axis, mesh_axes in mapping.items():
            renamed[axis] = [*chain.from_iterable(levanter_axes.get(each, [each]) for each in mesh_axes)]
        return _yaml_values(renamed)

    compute, params = rename(compute_mapping), rename(param_mapping)
    shared = {axis: value for axis, value in compute.items() if axis != batch_axis and params.get(axis) == value}
    # Levanter shards these axes by default; null replicates them
    replicated = dict.fromkeys(axis for axis in DEFAULT_SHARED_AXES if axis not in shared)
    dcn_sizes = {dcn: across[axis] for axis, dcn in DCN_AXES.items() if across[axis] > 1}
    # Levanter's data loader refuses a mapping without the batch; a mesh axis of size 1 leaves it unsharded
    if compute.get(batch_axis) is None:
        singles = [dcn for axis, dcn in DCN_AXES.items() if across[axis] == 1]
        unsharded = next(iter((*singles, *(axis for axis in within if within[axis] == 1))), None)
        compute = {**compute, batch_axis: unsharded}
        dcn_sizes |= dict.fromkeys(singles[:1], 1)
    return {
        "axes": within,
        **({"dcn_axes": dcn_sizes} if dcn_sizes else {}),
        **({} if batch_axis == BATCH_AXIS else {"batch_axis_name": batch_axis}),
        "shared_mapping": {**shared, **replicated},
        "compute_mapping": {a: value for a, value in compute.items() if a not in shared},
        "param_mapping": {axis: value for axis, value in params.items() if axis not in shared},
    }


def trainer_yaml(plan: Plan, schedule: list[dict[str, int]] | None = None) -> str:
    """Write the trainer section as text to paste, followed by comments on settings outside of it.

    Args:
        schedule: stages of a batch schedule, which replaces the plan's batch in the section.
    """
    check_plan("trainer_yaml", plan)
    comments = list(_settings_outside_trainer(plan))
    section = trainer_section(plan)
    if schedule is not None:
        section["train_batch_size"] = schedule
    return section_yaml(section) + "".join(f"# {line}".rstrip() + "\n" for line in comments)


def batch_divisor(plan: Plan) -> int:
    """Return the number that Levanter's trainer divides a batch by: batch shards times sequences per device."""
    per_device = _batch_sizes(plan).get("per_device_parallelism", 1)
    return per_device * mesh_size(plan.mesh, _batch_mesh_axes(plan))


def section_yaml(section: dict[str, Any]) -> str:
    """Write the content of a `trainer:` section as text to paste."""
    return sections_yaml({"trainer": section})


def sections_yaml(sections: AnyMapping[str, Any]) -> str:
    """Write sections of a configuration as text to paste."""
    text: str = yaml.safe_dump(dict(sections), sort_keys=False, default_flow_style=None, width=YAML_WIDTH)
    return text


def _precision_policy(plan: Plan) -> str:
    return f"p={plan.workload.param_dtype},c={plan.workload.compute_dtype}"


def _batch_sizes(plan: Plan) -> dict[str, int]:
    """Return the keys of the batch size, with `per_device_parallelism` only if there are microbatches."""
    work = plan.workload
    per_device = work.batch // work.num_microbatches // mesh_size(plan.mesh, _batch_mesh_axes(plan))
    return {
        "train_batch_size": work.batch,
        **({"per_device_parallelism": per_device} if work.num_microbatches > 1 else {}),
    }


def _settings_outside_trainer(plan: Plan) -> Iterator[str]:
    """Yield comment lines about the settings outside of the trainer section that the plan requires."""
    is_decoder = plan.model.class_name == DECODER
    if is_decoder:
        kind = plan.model.type
        other = f"; for Levanter's {kind}, plan with --model.levanter_class {LEVANTER}"
        yield from _wrap(f"model.type must be shardplan_decoder{other if kind in LEVANTER_CLASSES else ''}.")
    policy = plan.workload.checkpoint_policy
    if plan.workload.is_training and policy != CheckpointPolicy():
        value = policy.levanter_value
        if isinstance(value, dict):
            value = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
        yield from _wrap(f"model.gradient_checkpointing must be {value}, as planned.")
        if policy.names and not is_decoder:
            yield from _wrap(
                "Call shardplan.patch_levanter() first, as scripts/levanter_main.py does: activations of Levanter's "
                "own models have no names, and it would keep nothing."
            )
    vocab = plan.model.vocab
    if _sharding_axes(plan, tuple(plan.compute_mapping.get(vocab, ()))):
        yield from _wrap(
            f"Call shardplan.patch_levanter() first, as scripts/levanter_main.py does: with {vocab} sharded, "
            f"Levanter's own loss is silently wrong. A plan without it: --pin {vocab}="
        )
    if plan.experts is not None and not is_decoder:
        yield from _expert_settings(plan.experts)
    if any(isinstance(method.kernel, SparseKernel) for method in plan.attention.methods):
        yield from _wrap(f"model.selected_method must be {plan.attention.sparse_kernel}, as planned.")
        if plan.attention.layout != SequenceOrder.CONTIGUOUS:
            yield from _wrap(
                f"Positions are planned in {plan.attention.layout} order, and Levanter's programs have them in the "
                f"order of the sequence: run shardplan eval instead, or plan with --pin {plan.model.position}="
            )
            return
    if parse_slice(plan.hardware.slice).is_cpu:
        return  # Levanter's attention on CPUs is no kernel, and correct under any sharding
    if is_decoder and not plan.attention.runs_in_levanter:
        position = plan.model.position
        yield from _wrap(
            f"Levanter's programs gather all keys where {position} is sharded: run shardplan eval instead, or plan "
            f"with --pin {position}="
        )
        return
    if not plan.attention.runs_in_levanter:
        yield from _attention_settings(plan)
        return
    unsharded = plan.model.unsharded_in_kernels
    sharded = [axis for axis in unsharded if _sharding_axes(plan, tuple(plan.compute_mapping.get(axis, ())))]
    if sharded:
        yield from _wrap(
            f"model.attn_backend must be jax_flash: with {', '.join(sharded)} sharded, Levanter's default on TPUs is "
            "silently wrong."
        )


def _attention_settings(plan: Plan) -> Iterator[str]:
    """Yield comment lines about the calls that replace Levanter's attention with sequence-parallel attention."""
    attention = plan.attention
    yield from _wrap(
        "Use the attention of shardplan.attention.levanter, as planned: with sharded positions Levanter's own gathers "
        "all keys on every device."
    )
    is_reordered = attention.layout != SequenceOrder.CONTIGUOUS
    if is_reordered:
        parts = f'{plan.workload.position}, {attention.ring}, {attention.ulysses}, "{attention.layout}"'
        yield f"    layout = SequenceLayout({parts})"
    if attention.kinds:
        yield "    kinds = ("
        for name, method in attention.kinds.items():
            yield f'        ("{name}", {_method_text(method)}),'
        yield "    )"
    yield f"    method = {_method_text(attention)}"
    yield "    model = with_sequence_parallel(model, method)"
    if not is_reordered:
        return
    yield from _wrap(
        "Put examples in the same order, and compute their losses, with the functions of shardplan.attention.sequence:"
    )
    yield "    sequence = shard_sequence(example, layout)"
    yield "    losses = next_token_losses(model, sequence)"


def _expert_settings(experts: ExpertMethod) -> Iterator[str]:
    """Yield comment lines about the calls that replace Levanter's blocks of experts."""
    method = f'ExpertMethod("{experts.strategy}")'
    is_default = experts == ExpertMethod()
    yield from _wrap(
        "Use the experts of shardplan.experts, as planned: with sharded experts Levanter's own blocks fail. Call "
        f"shardplan.patch_levanter({'' if is_default else method}) first"
        f"{', as scripts/levanter_main.py does' if is_default else ''}, or replace the blocks of a model:"
    )
    yield f"    model = with_expert_parallel(model, {method})"


def _method_text(attention: AttentionPlan) -> str:
    """Return the Python expression that makes the plan's `Method`."""
    arguments = [f'"{attention.strategy}"']
    if attention.ulysses > 1:
        arguments.append(f"ulysses={attention.ulysses}")
    if attention.kernel != KernelName.BLOCKWISE:
        arguments.append(f'kernel="{attention.kernel}"')
    if attention.layout != SequenceOrder.CONTIGUOUS:
        arguments.append("layout=layout")
    if attention.kinds:
        arguments.append("kinds=kinds")
    return f"Method({', '.join(arguments)})"


def _wrap(sentence: str) -> list[str]:
    """Wrap a comment to lines of at most 80 columns, without the `# ` at the beginning of each."""
    return textwrap.wrap(sentence, 78, break_long_words=False, break_on_hyphens=False)


def _batch_mesh_axes(plan: Plan) -> MeshAxes:
    return tuple(plan.compute_mapping.get(BATCH_AXIS, ()))


def _sharding_axes(plan: Plan, mesh_axes: MeshAxes) -> MeshAxes:
    """Return the mesh axes in `mesh_axes` that have more than one device."""
    return tuple(mesh_axis for mesh_axis in mesh_axes if plan.mesh[mesh_axis] > 1)


def _yaml_values(mapping: Mapping) -> dict[str, str | list[str] | None]:
    """Return the YAML value of each logical axis: a mesh axis, a list of several, or null."""
    values: dict[str, str | list[str] | None] = {}
    for axis, mesh_axes in mapping.items():
        match mesh_axes:
            case []:
                values[axis] = None
            case [mesh_axis]:
                values[axis] = mesh_axis
            case _:
                values[axis] = list(mesh_axes)
    return values
