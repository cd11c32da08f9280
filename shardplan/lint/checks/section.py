"""Checks of a trainer section without a plan: names, duplicates, sizes, entries without effect."""

import math
from collections.abc import Callable

from shardplan.errors import closest, names_text, nearest
from shardplan.hardware import GIB
from shardplan.hardware.mesh_axes import MESH_AXES
from shardplan.levanter_config.model_section import ATTENTION_BACKENDS
from shardplan.lint.checks.batch import check_batch, check_replicated_batch
from shardplan.lint.findings import (
    Finding,
    FindingKind,
    Findings,
    Severity,
    product_text,
    short,
    sizes_text,
)
from shardplan.lint.subject import Subject
from shardplan.plan.workload.dtypes import itemsize

OTHER_BACKENDS = frozenset(ATTENTION_BACKENDS) - {"default", "splash"}
"""Values of `model.attn_backend` for which Levanter does not use splash attention on a TPU."""


def check_unknown_axes(subject: Subject) -> Findings:
    """Find logical axes that no array of the model has, which Haliax ignores silently."""
    mapped = {**subject.params, **subject.compute}
    for axis in (axis for axis in mapped if axis not in subject.known | subject.activation_only):
        mesh_axes = {*subject.params.get(axis, ()), *subject.compute.get(axis, ())}
        meant = closest(axis, subject.mappable)
        unsharded = subject.bytes(
            subject.not_sharded_over((p for p in subject.axes.parameters if meant in p.axes), mesh_axes)
        )
        replicated = subject.replicated(unsharded)
        text = f"the model has no axis {axis!r}, so mapping it has no effect"
        if replicated:
            text += f": Haliax silently replicates, on every device, {sizes_text(replicated)}"
        elif unsharded:
            text += f": {names_text(sorted(mesh_axes))} does not shard {names_text(map(short, unsharded))}"
        yield Finding(
            Severity.ERROR if replicated else Severity.WARNING,
            FindingKind.UNKNOWN_AXIS,
            subject.keys([axis]),
            text,
            nearest(axis, subject.mappable),
            replicated or unsharded,
            frozenset({axis, meant or axis}),
        )


def check_activation_axes(subject: Subject) -> Findings:
    """Find mapped logical axes that only activations have."""
    for axis in sorted(axis for axis in subject.activation_only if subject.devices(subject.compute[axis]) > 1):
        experts = names_text(sorted(subject.step.expert_axes)) if subject.step.expert_axes else None
        yield Finding(
            Severity.WARNING,
            FindingKind.ACTIVATION_AXIS,
            subject.keys([axis]),
            f"only activations have the axis {axis!r}: the effect of sharding it over "
            f"{product_text(subject.section.mesh, subject.compute[axis])} is not predicted"
            + (f", and in models that route tokens to {experts} it gave wrong logits" if experts else ""),
            f"remove {axis}",
            axes=frozenset({axis}),
        )


def check_stacked_axes(subject: Subject) -> Findings:
    """Find mapped logical axes along which layers are stacked."""
    for axis in sorted(subject.stacked & {*subject.params, *subject.compute}):
        mesh_axes = tuple(dict.fromkeys((*subject.params.get(axis, ()), *subject.compute.get(axis, ()))))
        if subject.devices(mesh_axes) > 1:
            yield Finding(
                Severity.WARNING,
                FindingKind.STACKED_AXIS,
                subject.keys([axis]),
                f"layers are stacked along {axis!r}: sharded over {product_text(subject.section.mesh, mesh_axes)}, "
                "every iteration of the loop over layers gets its slice from other devices, which is not predicted",
                f"leave {axis} replicated, and shard another axis",
                axes=frozenset({axis}),
            )


def check_heads(subject: Subject) -> Findings:
    """Find a mapping of the axis of all heads, which in grouped-query attention only the output projection has."""
    for attention in subject.step.attention_axes:
        own = (*attention.heads, attention.head_size)
        # without groups the projections have the axis of all heads too, and a mapping of their own axes shards them
        mesh_axes = [axis for axis in subject.compute.get(attention.flat_heads, ()) if subject.section.mesh[axis] > 1]
        if (
            attention.flat_heads in own
            or not mesh_axes
            or set(mesh_axes) & {m for axis in own for m in subject.compute.get(axis, ())}
        ):
            continue
        with_heads = [p for p in subject.axes.parameters if set(p.axes) & set(attention.heads)]
        unsharded = subject.bytes(subject.not_sharded_over(with_heads, mesh_axes))
        replicated = subject.replicated(unsharded)
        if not unsharded:
            continue
        yield Finding(
            Severity.ERROR if replicated else Severity.WARNING,
            FindingKind.HEADS,
            subject.keys([attention.flat_heads]),
            f"{attention.flat_heads!r} is not an axis of {names_text(map(short, unsharded))}, which have "
            f"{names_text(own)} "
            + (
                f"and so are silently replicated, on every device: {sizes_text(replicated)}"
                if replicated
                else f"and so are not sharded over {product_text(subject.section.mesh, mesh_axes)}"
            ),
            _heads_remedy(subject, attention.heads[0], mesh_axes),
            replicated or unsharded,
        )


def _heads_remedy(subject: Subject, key_heads: str, mesh_axes: list[str]) -> str:
    """Suggest sharding the axis of key heads, so that every device has complete groups of heads."""
    size, devices, names = subject.size(key_heads), subject.devices(mesh_axes), names_text(mesh_axes)
    divisor = math.gcd(size, devices)
    if divisor == devices:
        return f"map {key_heads} to {names} as well"
    if divisor > 1:
        return (
            f"{devices} does not divide {key_heads} ({size}): make {names} {divisor}, and map {key_heads} to it as well"
        )
    return "shard the stored parameters over another mesh axis"


def check_unused_mesh_axes(subject: Subject) -> Findings:
    """Find mesh axes of size > 1 that no logical axis of the model is mapped to."""
    for mesh_axis, size in subject.section.mesh.items():
        mapped = subject.known | subject.activation_only
        if size == 1 or any(mesh_axis in axes for name, axes in subject.compute.items() if name in mapped):
            continue
        stored = [name for name, axes in subject.params.items() if mesh_axis in axes and name in subject.axes.axes]
        yield Finding(
            Severity.WARNING,
            FindingKind.UNUSED_MESH_AXIS,
            (subject.size_key(mesh_axis),),
            (
                f"{mesh_axis} ({size} devices) shards only stored {names_text(stored)} and no computation: these "
                "devices all do the same work"
                if stored
                else f"no logical axis is mapped to {mesh_axis} ({size} devices): they all store and compute the same"
            ),
            f"map a logical axis to {mesh_axis} in {subject.mapping_keys[0]}, or make it 1",
        )


def check_duplicates(subject: Subject) -> Findings:
    """Find mesh axes, of any size, that shard two dimensions of one array."""
    arrays = [(tuple(p.axes), short(p.path), subject.params) for p in subject.axes.parameters]
    arrays += [(axes, description, subject.compute) for axes, description in subject.linear_results.items()]
    tensors: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for axes, description, mapping in arrays:
        used = [mesh_axis for axis in axes for mesh_axis in mapping.get(axis, ())]
        for mesh_axis in dict.fromkeys(axis for axis in used if used.count(axis) > 1):
            mapped = tuple(axis for axis in axes if mesh_axis in mapping.get(axis, ()))
            tensors.setdefault((mesh_axis, mapped), []).append(description)
    for (mesh_axis, mapped), names in tensors.items():
        shared = f"is mapped twice to {mesh_axis}" if len(mapped) == 1 else f"share the mesh axis {mesh_axis}"
        yield Finding(
            Severity.ERROR,
            FindingKind.DUPLICATE,
            subject.keys(mapped, mesh_axis),
            f"{names_text(mapped)} {shared} in one array (DuplicateSpecError): {names_text(names)}",
            f"shard only one dimension of an array over {mesh_axis}: keep it for one of {names_text(mapped)}",
            axes=frozenset(mapped),
        )


def check_divisibility(subject: Subject) -> Findings:
    """Find logical axes whose size is not divisible by the devices along their mesh axes."""
    entries = {*subject.compute.items(), *subject.params.items()}
    for axis, mesh_axes in sorted(entry for entry in entries if entry[0] in subject.known - subject.batch_axes):
        length, devices = subject.size(axis), subject.devices(mesh_axes)
        if length % devices == 0 or (axis == subject.axes.vocab and subject.rounded_vocab % devices == 0):
            continue
        yield Finding(
            Severity.ERROR,
            FindingKind.INDIVISIBLE,
            subject.keys([axis]),
            f"{axis} ({length}) is not divisible by the {devices} devices of "
            f"{product_text(subject.section.mesh, mesh_axes)} (IndivisibleError)",
            f"shard it over at most {math.gcd(length, devices)} of the {devices} devices, or map another axis",
            axes=frozenset({axis, *MESH_AXES}),
        )


def check_vocabulary(subject: Subject) -> Findings:
    """Find a vocabulary that Levanter's train_lm and eval_lm round up to a multiple of its shards."""
    vocab, length = subject.axes.vocab, subject.axes.axes[subject.axes.vocab]
    if subject.rounded_vocab != length:
        mesh_axes = subject.rounding_mapping[vocab]
        devices = subject.devices(mesh_axes)
        yield Finding(
            Severity.WARNING,
            FindingKind.VOCABULARY,
            subject.keys([vocab]),
            f"{vocab} ({length}) is not divisible by the {devices} devices of "
            f"{product_text(subject.section.mesh, mesh_axes)}: Levanter rounds it up to {subject.rounded_vocab}, "
            "and the added tokens take part in the softmax, which changes the losses",
            f"shard {vocab} over at most {math.gcd(length, devices)} devices, or leave it replicated",
        )


def check_attention(subject: Subject) -> Findings:
    """Find sharding that splash attention ignores because it treats a device's shard as the whole axis."""
    if subject.hardware.is_cpu or (subject.attention_backend or "").lower() in OTHER_BACKENDS:
        return
    required = {axis for a in subject.step.attention_axes for axis in a.unsharded_in_kernels}
    sharded = [axis for axis in subject.compute if axis in required and subject.devices(subject.compute[axis]) > 1]
    if sharded and subject.step.attention_axes:
        yield Finding(
            Severity.ERROR,
            FindingKind.ATTENTION,
            subject.keys(sharded),
            f"computations shard {names_text(sharded)}: Levanter's splash attention, its default on TPUs, runs on each "
            "device alone and is silently wrong",
            "leave them unsharded in computations, or set model.attn_backend to jax_flash",
            axes=frozenset({*sharded, *MESH_AXES}),
        )


def check_loss(subject: Subject) -> Findings:
    """Find sharding that Levanter's loss ignores."""
    sharded = [
        axis
        for axis in (subject.axes.vocab, subject.axes.residual)
        if subject.devices(subject.compute.get(axis, ())) > 1
    ]
    if sharded:
        yield Finding(
            Severity.ERROR,
            FindingKind.LOSS,
            subject.keys(sharded),
            f"computations shard {names_text(sharded)}: Levanter computes the loss on each device as if that had all "
            "of it, and is silently wrong",
            f"leave {names_text(sharded)} unsharded in computations, or call shardplan.patch_levanter() first",
            axes=frozenset({*sharded, *MESH_AXES}),
        )


def check_experts(subject: Subject) -> Findings:
    """Find sharded experts, with which Levanter's own blocks of experts fail."""
    sharded = [axis for axis in sorted(subject.step.expert_axes) if subject.devices(subject.compute.get(axis, ())) > 1]
    if sharded:
        yield Finding(
            Severity.ERROR,
            FindingKind.EXPERTS,
            subject.keys(sharded),
            f"computations shard {names_text(sharded)}: Levanter's own blocks of experts fail (ValueError: Axis "
            f"{sharded[0]} has different sizes)",
            f"leave {names_text(sharded)} unsharded in computations, or call shardplan.patch_levanter() first",
            axes=frozenset({*sharded, *MESH_AXES}),
        )


def check_loading(subject: Subject) -> Findings:
    """Find a checkpoint too large for Levanter's loader, which shards tensors over every mesh axis but `replica`."""
    replicas, available = subject.section.mesh["replica"], subject.hardware.generation.hbm_gib
    shards = math.prod(subject.section.mesh.values()) // replicas
    needed = subject.axes.size * itemsize(subject.workload.param_dtype) / shards / GIB
    if needed > available and not subject.hardware.is_cpu:
        yield Finding(
            Severity.WARNING,
            FindingKind.LOADING,
            (subject.size_key("replica"),),
            "Levanter's own load_pretrained shards the tensors of the checkpoint over all mesh axes but replica "
            f"({replicas}): at least {needed:.2f} GiB per device of {available:.2f}",
            "load with shardplan's HFCheckpointConverter",
        )


BLOCKING: tuple[Callable[[Subject], Findings], ...] = (check_duplicates, check_divisibility, check_batch)
"""Checks whose errors make a prediction impossible."""
NON_BLOCKING: tuple[Callable[[Subject], Findings], ...] = (
    check_unknown_axes,
    check_activation_axes,
    check_stacked_axes,
    check_heads,
    check_unused_mesh_axes,
    check_vocabulary,
    check_replicated_batch,
    check_attention,
    check_loss,
    check_experts,
    check_loading,
)
