"""Checks of a trainer section without a plan: names, duplicates, sizes, entries without effect."""

import math
from collections.abc import Callable

from shardplan.errors import closest, nearest
from shardplan.hardware import GIB
from shardplan.hardware.mesh_axes import MESH_AXES
from shardplan.levanter_config.model_section import ATTENTION_BACKENDS
from shardplan.lint.checks.batch import check_batch, check_replicated_batch
from shardplan.lint.findings import (
    Finding,
    FindingKind,
    Findings,
    Severity,
    names_text,
    product_text,
    short,
    sizes_text,
)
from shardplan.lint.subject import Subject
from shardplan.plan.workload.dtypes import itemsize

OTHER_BACKENDS = frozenset(ATTENTION_BACKENDS) - {"default", "splash"}
"""Values of `model.attn_backend` with which Levanter does not use splash attention on a TPU."""


def check_unknown_axes(s: Subject) -> Findings:
    """Find logical axes that no array of the model has, which Haliax ignores silently."""
    mapped = {**s.params, **s.compute}
    for axis in (axis for axis in mapped if axis not in s.known | s.activation_only):
        mesh_axes = {*s.params.get(axis, ()), *s.compute.get(axis, ())}
        meant = closest(axis, s.mappable)
        unsharded = s.bytes(s.not_sharded_over((p for p in s.axes.parameters if meant in p.axes), mesh_axes))
        replicated = s.replicated(unsharded)
        text = f"the model has no axis {axis!r}, so mapping it has no effect"
        if replicated:
            text += f": Haliax silently replicates, on every device, {sizes_text(replicated)}"
        elif unsharded:
            text += f": {names_text(sorted(mesh_axes))} does not shard {names_text(map(short, unsharded))}"
        yield Finding(
            Severity.ERROR if replicated else Severity.WARNING,
            FindingKind.UNKNOWN_AXIS,
            s.keys([axis]),
            text,
            nearest(axis, s.mappable),
            replicated or unsharded,
            frozenset({axis, meant or axis}),
        )


def check_activation_axes(s: Subject) -> Findings:
    """Find mapped logical axes that only activations have."""
    for axis in sorted(axis for axis in s.activation_only if s.devices(s.compute[axis]) > 1):
        experts = names_text(sorted(s.step.expert_axes)) if s.step.expert_axes else None
        yield Finding(
            Severity.WARNING,
            FindingKind.ACTIVATION_AXIS,
            s.keys([axis]),
            f"only activations have the axis {axis!r}: the effect of sharding it over "
            f"{product_text(s.section.mesh, s.compute[axis])} is not predicted"
            + (f", and in models that route tokens to {experts} it gave wrong logits" if experts else ""),
            f"remove {axis}",
            axes=frozenset({axis}),
        )


def check_stacked_axes(s: Subject) -> Findings:
    """Find mapped logical axes along which layers are stacked."""
    for axis in sorted(s.stacked & {*s.params, *s.compute}):
        mesh_axes = tuple(dict.fromkeys((*s.params.get(axis, ()), *s.compute.get(axis, ()))))
        if s.devices(mesh_axes) > 1:
            yield Finding(
                Severity.WARNING,
                FindingKind.STACKED_AXIS,
                s.keys([axis]),
                f"layers are stacked along {axis!r}: sharded over {product_text(s.section.mesh, mesh_axes)}, every "
                "iteration of the loop over layers gets its slice from other devices, which is not predicted",
                f"leave {axis} replicated, and shard another axis",
                axes=frozenset({axis}),
            )


def check_heads(s: Subject) -> Findings:
    """Find a mapping of the axis of all heads, which only the output projection has in grouped-query attention."""
    for attention in s.step.attention_axes:
        own = (*attention.heads, attention.head_size)
        mesh_axes = [axis for axis in s.compute.get(attention.flat_heads, ()) if s.section.mesh[axis] > 1]
        if (
            attention.flat_heads in own
            or not mesh_axes
            or set(mesh_axes) & {m for axis in own for m in s.compute.get(axis, ())}
        ):
            continue
        with_heads = [p for p in s.axes.parameters if set(p.axes) & set(attention.heads)]
        unsharded = s.bytes(s.not_sharded_over(with_heads, mesh_axes))
        replicated = s.replicated(unsharded)
        if not unsharded:
            continue
        yield Finding(
            Severity.ERROR if replicated else Severity.WARNING,
            FindingKind.HEADS,
            s.keys([attention.flat_heads]),
            f"{attention.flat_heads!r} is not an axis of {names_text(map(short, unsharded))}, which have "
            f"{names_text(own)} "
            + (
                f"and so are silently replicated, on every device: {sizes_text(replicated)}"
                if replicated
                else f"and so are not sharded over {product_text(s.section.mesh, mesh_axes)}"
            ),
            _heads_remedy(s, attention.heads[0], mesh_axes),
            replicated or unsharded,
        )


def _heads_remedy(s: Subject, key_heads: str, mesh_axes: list[str]) -> str:
    """Suggest to shard the axis of key heads, so that every device has complete groups of heads."""
    size, devices, names = s.size(key_heads), s.devices(mesh_axes), names_text(mesh_axes)
    divisor = math.gcd(size, devices)
    if divisor == devices:
        return f"map {key_heads} to {names} as well"
    if divisor > 1:
        return (
            f"{devices} does not divide {key_heads} ({size}): make {names} {divisor}, and map {key_heads} to it as well"
        )
    return "shard the stored parameters over another mesh axis"


def check_unused_mesh_axes(s: Subject) -> Findings:
    """Find mesh axes of several devices that no logical axis of the model is mapped to."""
    for mesh_axis, size in s.section.mesh.items():
        mapped = s.known | s.activation_only
        if size == 1 or any(mesh_axis in axes for name, axes in s.compute.items() if name in mapped):
            continue
        stored = [name for name, axes in s.params.items() if mesh_axis in axes and name in s.axes.axes]
        yield Finding(
            Severity.WARNING,
            FindingKind.UNUSED_MESH_AXIS,
            (s.size_key(mesh_axis),),
            (
                f"{mesh_axis} ({size} devices) shards only stored {names_text(stored)} and no computation: these "
                "devices all do the same work"
                if stored
                else f"no logical axis is mapped to {mesh_axis} ({size} devices): they all store and compute the same"
            ),
            f"map a logical axis to {mesh_axis} in {s.mapping_keys[0]}, or make it 1",
        )


def check_duplicates(s: Subject) -> Findings:
    """Find mesh axes, of any size, that two dimensions of one array are mapped to."""
    arrays = [(tuple(p.axes), short(p.path), s.params) for p in s.axes.parameters]
    arrays += [(axes, description, s.compute) for axes, description in s.linear_results.items()]
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
            s.keys(mapped, mesh_axis),
            f"{names_text(mapped)} {shared} in one array (DuplicateSpecError): {names_text(names)}",
            f"shard only one dimension of an array over {mesh_axis}: keep it for one of {names_text(mapped)}",
            axes=frozenset(mapped),
        )


def check_divisibility(s: Subject) -> Findings:
    """Find logical axes whose size is not divisible by the devices along their mesh axes."""
    entries = {*s.compute.items(), *s.params.items()}
    for axis, mesh_axes in sorted(entry for entry in entries if entry[0] in s.known - s.batch_axes):
        length, devices = s.size(axis), s.devices(mesh_axes)
        if length % devices == 0 or (axis == s.axes.vocab and s.rounded_vocab % devices == 0):
            continue
        yield Finding(
            Severity.ERROR,
            FindingKind.INDIVISIBLE,
            s.keys([axis]),
            f"{axis} ({length}) is not divisible by the {devices} devices of {product_text(s.section.mesh, mesh_axes)} "
            "(IndivisibleError)",
            f"shard it over at most {math.gcd(length, devices)} of the {devices} devices, or map another axis",
            axes=frozenset({axis, *MESH_AXES}),
        )


def check_vocabulary(s: Subject) -> Findings:
    """Find a vocabulary that Levanter's train_lm and eval_lm round up to a multiple of its shards."""
    vocab, length = s.axes.vocab, s.axes.axes[s.axes.vocab]
    if s.rounded_vocab != length:
        devices = s.devices(s.rounding_mapping[vocab])
        yield Finding(
            Severity.WARNING,
            FindingKind.VOCABULARY,
            s.keys([vocab]),
            f"{vocab} ({length}) is not divisible by the {devices} devices of "
            f"{product_text(s.section.mesh, s.rounding_mapping[vocab])}: Levanter rounds it up to {s.rounded_vocab}, "
            "and the added tokens take part in the softmax, which changes the losses",
            f"shard {vocab} over at most {math.gcd(length, devices)} devices, or leave it replicated",
        )


def check_attention(s: Subject) -> Findings:
    """Find sharding that splash attention ignores: it runs on each device as if that had everything along them."""
    if s.hardware.is_cpu or (s.attention_backend or "").lower() in OTHER_BACKENDS:
        return
    required = {axis for a in s.step.attention_axes for axis in a.unsharded_in_kernels}
    sharded = [axis for axis in s.compute if axis in required and s.devices(s.compute[axis]) > 1]
    if sharded and s.step.attention_axes:
        yield Finding(
            Severity.ERROR,
            FindingKind.ATTENTION,
            s.keys(sharded),
            f"computations shard {names_text(sharded)}: Levanter's splash attention, its default on TPUs, runs on each "
            "device alone and is silently wrong",
            "leave them unsharded in computations, or set model.attn_backend to jax_flash",
            axes=frozenset({*sharded, *MESH_AXES}),
        )


def check_loss(s: Subject) -> Findings:
    """Find sharding that Levanter's loss ignores."""
    sharded = [axis for axis in (s.axes.vocab, s.axes.residual) if s.devices(s.compute.get(axis, ())) > 1]
    if sharded:
        yield Finding(
            Severity.ERROR,
            FindingKind.LOSS,
            s.keys(sharded),
            f"computations shard {names_text(sharded)}: Levanter computes the loss on each device as if that had all "
            "of it, and is silently wrong",
            f"leave {names_text(sharded)} unsharded in computations, or call shardplan.patch_levanter() first",
            axes=frozenset({*sharded, *MESH_AXES}),
        )


def check_experts(s: Subject) -> Findings:
    """Find sharded experts, with which Levanter's own blocks of experts fail."""
    sharded = [axis for axis in sorted(s.step.expert_axes) if s.devices(s.compute.get(axis, ())) > 1]
    if sharded:
        yield Finding(
            Severity.ERROR,
            FindingKind.EXPERTS,
            s.keys(sharded),
            f"computations shard {names_text(sharded)}: Levanter's own blocks of experts fail (ValueError: Axis "
            f"{sharded[0]} has different sizes)",
            f"leave {names_text(sharded)} unsharded in computations, or call shardplan.patch_levanter() first",
            axes=frozenset({*sharded, *MESH_AXES}),
        )


def check_loading(s: Subject) -> Findings:
    """Find a checkpoint too large for Levanter's loader, which shards tensors over every mesh axis but `replica`."""
    replicas, available = s.section.mesh["replica"], s.hardware.generation.hbm_gib
    shards = math.prod(s.section.mesh.values()) // replicas
    needed = s.axes.size * itemsize(s.workload.param_dtype) / shards / GIB
    if needed > available and not s.hardware.is_cpu:
        yield Finding(
            Severity.WARNING,
            FindingKind.LOADING,
            (s.size_key("replica"),),
            "Levanter's own load_pretrained shards the tensors of the checkpoint over all mesh axes but replica "
            f"({replicas}): at least {needed:.2f} GiB per device of {available:.2f}",
            "load with shardplan's HFCheckpointConverter",
        )


BLOCKING: tuple[Callable[[Subject], Findings], ...] = (check_duplicates, check_divisibility, check_batch)
"""Checks whose errors make a prediction impossible."""
OTHERS: tuple[Callable[[Subject], Findings], ...] = (
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
