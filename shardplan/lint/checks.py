"""What can be wrong with a layout by itself: names, duplicates, sizes, entries without effect. Pure."""

import math
from collections.abc import Callable

from shardplan.config import MESH_AXES
from shardplan.errors import closest, nearest
from shardplan.hardware import GIB
from shardplan.levanter_config.model_section import ATTENTION_BACKENDS
from shardplan.levanter_config.trainer_section import FLAT_KEYS, OTHER_KEYS
from shardplan.lint.findings import (
    ERROR,
    WARNING,
    Finding,
    Findings,
    Subject,
    names_text,
    product_text,
    short,
    sizes_text,
)
from shardplan.plan.workload import itemsize

OTHER_BACKENDS = frozenset(ATTENTION_BACKENDS) - {"default", "splash"}
"""Values of `model.attn_backend` with which Levanter runs no splash attention on a TPU."""


def unknown_keys(s: Subject) -> Findings:
    """Keys of the trainer section that Levanter does not have, and so refuses; what they were to say holds nowhere."""
    for key in s.trainer:
        if key not in (*FLAT_KEYS, *OTHER_KEYS):
            valid = OTHER_KEYS if not s.is_flat else (*FLAT_KEYS, *OTHER_KEYS)
            yield Finding(
                WARNING,
                "unknown key",
                (f"trainer.{key}",),
                f"Levanter's trainer has no key {str(key)!r}: it refuses the file, and here the key counts for nothing",
                nearest(str(key), valid) if closest(str(key), valid) else "take it out",
            )


def unknown_backend(s: Subject) -> Findings:
    """A kind of attention that Levanter does not have."""
    name = s.attention_backend
    if name is not None and name.lower() not in ATTENTION_BACKENDS:
        yield Finding(
            WARNING,
            "attention backend",
            ("model.attn_backend",),
            f"Levanter has no attention {name!r} and refuses the file; what follows is said of its default",
            nearest(name, ATTENTION_BACKENDS),
        )


def unreadable_lists(s: Subject) -> Findings:
    """The flat schema declares a mapping's values as tuples of exactly one text."""
    for entry in (*s.layout.compute_entries, *s.layout.param_entries[len(s.layout.compute_entries) :]):
        if s.is_flat and len(entry.mesh_axes) > 1 and "axis_resources." in entry.key:
            text = ", ".join(entry.mesh_axes)
            yield Finding(
                ERROR,
                "list",
                (entry.key,),
                f"Levanter reads the list [{text}] as one text, which names no mesh axis (ValueError)",
                f"name one of {names_text(entry.mesh_axes)}, or give Levanter the list in Python",
                axes=frozenset({entry.axis}),
            )


def unknown_axes(s: Subject) -> Findings:
    """Logical axes that no array of the model has: Haliax ignores them in silence."""
    mapped = {**s.params, **s.compute}
    for axis in (axis for axis in mapped if axis not in s.known | s.running):
        mesh_axes = {*s.params.get(axis, ()), *s.compute.get(axis, ())}
        meant = closest(axis, s.mappable)
        whole = s.bytes(s.not_cut_by((p for p in s.axes.parameters if meant in p.axes), mesh_axes))
        replicated = _replicated(s, whole)
        text = f"the model has no axis {axis!r}, so that mapping it does nothing"
        if replicated:
            text += f": Haliax replicates in silence, on every device, {sizes_text(replicated)}"
        elif whole:
            text += f": {names_text(sorted(mesh_axes))} does not cut {names_text(map(short, whole))}"
        yield Finding(
            ERROR if replicated else WARNING,
            "unknown axis",
            s.keys([axis]),
            text,
            nearest(axis, s.mappable),
            replicated or whole,
            frozenset({axis, meant or axis}),
        )


def running_axes(s: Subject) -> Findings:
    """Axes that only arrays of the running model have."""
    for axis in sorted(axis for axis in s.running if s.devices(s.compute[axis]) > 1):
        experts = names_text(sorted(s.step.routed)) if s.step.routed else None
        yield Finding(
            WARNING,
            "running axis",
            s.keys([axis]),
            f"arrays have {axis!r} only while the model runs: what cutting it by "
            f"{product_text(s.layout.mesh, s.compute[axis])} does is not predicted"
            + (f", and in models whose tokens choose {experts} it gave wrong logits" if experts else ""),
            f"take {axis} out",
            axes=frozenset({axis}),
        )


def stacked_axes(s: Subject) -> Findings:
    """Axes that layers are stacked along."""
    for axis in sorted(s.stacked & {*s.params, *s.compute}):
        mesh_axes = tuple(dict.fromkeys((*s.params.get(axis, ()), *s.compute.get(axis, ()))))
        if s.devices(mesh_axes) > 1:
            yield Finding(
                WARNING,
                "stacked axis",
                s.keys([axis]),
                f"layers are stacked along {axis!r}: cut by {product_text(s.layout.mesh, mesh_axes)}, every trip of "
                "the loop over them needs its slice from other devices, which is not predicted",
                f"leave {axis} whole, and cut another axis",
                axes=frozenset({axis}),
            )


def merged_heads(s: Subject) -> Findings:
    """The axis of all heads is one of the output projection alone where queries are grouped by key head."""
    for attention in s.step.attention:
        own = (*attention.heads, attention.head_size)
        mesh_axes = [axis for axis in s.compute.get(attention.merged, ()) if s.layout.mesh[axis] > 1]
        if (
            attention.merged in own
            or not mesh_axes
            or set(mesh_axes) & {m for axis in own for m in s.compute.get(axis, ())}
        ):
            continue
        with_heads = [p for p in s.axes.parameters if set(p.axes) & set(attention.heads)]
        whole = s.bytes(s.not_cut_by(with_heads, mesh_axes))
        replicated = _replicated(s, whole)
        if not whole:
            continue
        yield Finding(
            ERROR if replicated else WARNING,
            "heads",
            s.keys([attention.merged]),
            f"{attention.merged!r} is no axis of {names_text(map(short, whole))}, which have {names_text(own)} and "
            + (
                f"so are replicated in silence, on every device: {sizes_text(replicated)}"
                if replicated
                else f"so are not cut by {product_text(s.layout.mesh, mesh_axes)}"
            ),
            _heads_remedy(s, attention.heads[0], mesh_axes),
            replicated or whole,
        )


def _heads_remedy(s: Subject, key_heads: str, mesh_axes: list[str]) -> str:
    """With the axis of key heads, rather than another one, every device has whole groups of heads."""
    size, devices, names = s.size(key_heads), s.devices(mesh_axes), names_text(mesh_axes)
    part = math.gcd(size, devices)
    if part == devices:
        return f"map {key_heads} to {names} as well"
    if part > 1:
        return f"{devices} does not divide {key_heads} ({size}): make {names} {part}, and map {key_heads} to it as well"
    return "let them rest cut by another mesh axis"


def unused_mesh_axes(s: Subject) -> Findings:
    """Mesh axes of several devices that no logical axis of the model is on."""
    for mesh_axis, size in s.layout.mesh.items():
        if size == 1 or any(mesh_axis in axes for name, axes in s.compute.items() if name in s.known | s.running):
            continue
        at_rest = [name for name, axes in s.params.items() if mesh_axis in axes and name in s.axes.axes]
        yield Finding(
            WARNING,
            "unused mesh axis",
            (s.size_key(mesh_axis),),
            f"no logical axis is on {mesh_axis} ({size} devices)"
            + (
                f" while computing, only {names_text(at_rest)} at rest: they all do the same work"
                if at_rest
                else ": they all hold and compute the same"
            ),
            f"map a logical axis to {mesh_axis} in {s.mapping_keys[0]}, or make it 1",
        )


def overridden(s: Subject) -> Findings:
    """Entries that another key wins over: in Levanter `fsdp_axis` is read last, after `parameter_axis_resources`."""
    seen = set()
    for entries in (s.layout.compute_entries, s.layout.param_entries):
        winners = {entry.axis: entry for entry in entries}
        for entry in entries:
            winner = winners[entry.axis]
            if winner.mesh_axes == entry.mesh_axes or "." in winner.key.removeprefix("trainer."):
                continue  # a mapping that is more special is meant to win
            if (entry.key, winner.key) in seen or s.devices(entry.mesh_axes) == 1:
                continue
            seen.add((entry.key, winner.key))
            by = winner.key + ("" if winner.key.removeprefix("trainer.") in s.trainer else " (its default)")
            rests = entry in s.layout.compute_entries and winner.key == "trainer.fsdp_axis"
            yield Finding(
                WARNING,
                "overridden",
                (entry.key, winner.key),
                f"{by} wins: {entry.axis} "
                + (
                    f"is cut by {names_text(entry.mesh_axes)} while computing and by data alone at rest, so that its "
                    "weights move between the two at every use"
                    if rests
                    else f"is cut by {names_text(winner.mesh_axes)}, and this entry has no effect"
                ),
                f"take {entry.axis} out of one of the two, or name another axis in {winner.key.split('.')[-1]}",
            )


def duplicates(s: Subject) -> Findings:
    """Two dimensions of one array on one mesh axis, whatever its size."""
    arrays = [(tuple(p.axes), short(p.path), s.params) for p in s.axes.parameters]
    arrays += [(axes, what, s.compute) for axes, what in s.activations.items()]
    tensors: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for axes, what, mapping in arrays:
        used = [mesh_axis for axis in axes for mesh_axis in mapping.get(axis, ())]
        for mesh_axis in dict.fromkeys(axis for axis in used if used.count(axis) > 1):
            together = tuple(axis for axis in axes if mesh_axis in mapping.get(axis, ()))
            tensors.setdefault((mesh_axis, together), []).append(what)
    for (mesh_axis, together), names in tensors.items():
        times = "twice" if len(together) == 1 else "together"
        yield Finding(
            ERROR,
            "duplicate",
            s.keys(together),
            f"{names_text(together)} {times} on {mesh_axis} in one array (DuplicateSpecError): {names_text(names)}",
            f"let {mesh_axis} cut one dimension of an array: keep it for one of {names_text(together)}",
            axes=frozenset(together),
        )


def indivisible(s: Subject) -> Findings:
    """Logical axes whose size the devices along their mesh axes do not divide."""
    cuts = {*s.compute.items(), *s.params.items()}
    for axis, mesh_axes in sorted(cut for cut in cuts if cut[0] in s.known - s.batch_axes):
        length, devices = s.size(axis), s.devices(mesh_axes)
        if length % devices == 0 or (axis == s.axes.vocab and s.rounded_vocab % devices == 0):
            continue
        yield Finding(
            ERROR,
            "indivisible",
            s.keys([axis]),
            f"{axis} ({length}) is not divisible by the {devices} devices of {product_text(s.layout.mesh, mesh_axes)} "
            "(IndivisibleError)",
            f"at most {math.gcd(length, devices)} of the {devices} can cut it: use fewer, or map another axis",
            axes=frozenset({axis, *MESH_AXES}),
        )


def rounded_vocabulary(s: Subject) -> Findings:
    """Levanter's mains make the vocabulary as large as the devices that cut it need."""
    vocab, length = s.axes.vocab, s.axes.axes[s.axes.vocab]
    if s.rounded_vocab != length:
        devices, by = s.devices(s.rounding[vocab]), product_text(s.layout.mesh, s.rounding[vocab])
        yield Finding(
            WARNING,
            "vocabulary",
            s.keys([vocab]),
            f"{vocab} ({length}) is not divisible by the {devices} devices of {by}: Levanter rounds "
            f"it up to {s.rounded_vocab}, and what it adds takes part in the softmax, so that the losses are others",
            f"let at most {math.gcd(length, devices)} devices cut {vocab}, or leave it whole",
        )


def batch(s: Subject) -> Findings:
    """Sequences that the devices cannot share evenly, or that every device has all of."""
    name, size, mesh = s.layout.batch_axis, s.workload.batch, s.layout.mesh
    mesh_axes = s.compute.get(name, ())
    cut, asked = s.devices(mesh_axes), s.layout.batch_shards
    key = "trainer.train_batch_size" if s.layout.batch else "workload.batch"
    by_trainer = s.layout.batch is not None and size % asked != 0
    if size % cut or by_trainer:
        devices = asked if by_trainer else cut
        around = (size // devices * devices, (size // devices + 1) * devices)
        yield Finding(
            ERROR,
            "batch",
            (key, s.size_key("model")),
            f"{size} sequences are not divisible by the {devices} groups of devices that "
            + (f"{product_text(mesh, mesh_axes)} make" if size % cut else "Levanter's trainer counts (replica x data)"),
            f"use {' or '.join(str(n) for n in around if n)} sequences, or a larger model axis",
            axes=frozenset({name, *MESH_AXES}),
        )
    elif s.layout.microbatch is not None and size % s.layout.microbatch:
        yield Finding(
            ERROR,
            "batch",
            (key, "trainer.per_device_parallelism", s.size_key("model")),
            f"{size} sequences are no multiple of {s.layout.microbatch}, which {asked} groups of devices take at once "
            f"with {s.layout.microbatch // asked} each",
            f"make per_device_parallelism a divisor of {size // asked}",
            axes=frozenset({name, *MESH_AXES}),
        )
    elif cut == 1 and mesh["replica"] * mesh["data"] > 1:
        yield Finding(
            WARNING,
            "batch",
            s.keys([name]) or ("trainer.batch_axis" if s.is_flat else "trainer.mesh.batch_axis_name",),
            f"{name!r} is cut by nothing: every device computes all {size} sequences",
            "leave the batch axis at its default, which maps it to replica and data",
        )


def attention_kernel(s: Subject) -> Findings:
    """Levanter's splash attention runs on each device alone: right only with all positions and whole heads there."""
    if s.hardware.is_cpu or (s.attention_backend or "").lower() in OTHER_BACKENDS:
        return
    needed = {s.axes.position, *(axis for a in s.step.attention for axis in (*a.heads[1:], a.head_size))}
    cut = [axis for axis in s.compute if axis in needed and s.devices(s.compute[axis]) > 1]
    if cut and s.step.attention:
        yield Finding(
            ERROR,
            "attention",
            s.keys(cut),
            f"{names_text(cut)} cut while computing: Levanter's splash attention, its default on TPUs, runs on each "
            "device alone and is wrong in silence",
            "keep them whole while computing, or set model.attn_backend to jax_flash",
            axes=frozenset({*cut, *MESH_AXES}),
        )


def loading(s: Subject) -> Findings:
    """Levanter's loader puts the whole state dict on the devices, every tensor cut by `data` whatever the mapping."""
    data, available = s.layout.mesh["data"], s.hardware.generation.hbm_gib
    needed = s.axes.size * itemsize(s.workload.param_dtype) / data / GIB
    if needed > available and not s.hardware.is_cpu:
        yield Finding(
            WARNING,
            "loading",
            (s.size_key("data"),),
            f"Levanter's own load_pretrained cuts every tensor of the checkpoint by data ({data}) alone: at least "
            f"{needed:.2f} GiB per device of {available:.2f}",
            "load with shardplan's HFCheckpointConverter",
        )


def _replicated(s: Subject, parameters: dict[str, int]) -> dict[str, int]:
    """Those that every device holds whole, with several devices."""
    cuts = {p.path: s.cut(p) for p in s.axes.parameters}
    return {path: amount for path, amount in parameters.items() if cuts[path] == 1 and s.hardware.devices > 1}


BLOCKING: tuple[Callable[[Subject], Findings], ...] = (duplicates, indivisible, batch)
"""Checks whose errors leave nothing to predict."""
OTHERS: tuple[Callable[[Subject], Findings], ...] = (
    unknown_keys,
    unknown_backend,
    unreadable_lists,
    unknown_axes,
    running_axes,
    stacked_axes,
    merged_heads,
    unused_mesh_axes,
    overridden,
    rounded_vocabulary,
    attention_kernel,
    loading,
)
