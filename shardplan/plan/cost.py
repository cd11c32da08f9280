"""Time of a step under a mapping: compute, and the collectives that the mapping makes necessary. Pure.

The simple roofline of https://jax-ml.github.io/scaling-book: matrix products at peak FLOP/s but never faster than the
weights come from HBM; collectives at the bandwidth of one bidirectional ring. Gathers of weights depend on nothing and
hide behind compute as far as it lasts; collectives on activations wait for it. This ranks mappings, and is a lower
bound: a compiler's schedule is slower.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.hardware import Slice
from shardplan.model import Attention, Contraction, ModelAxes, Parameter
from shardplan.plan.mapping import AxisMapping, MeshAxes, MeshShape, mesh_axes_of, mesh_size, shard_count
from shardplan.plan.memory import Workload
from shardplan.runtime.placement import slices_by_axis

GATHER_CAUSE, GRADIENT_CAUSE = "weights of", "gradient of"
WEIGHT_CAUSES = (GATHER_CAUSE, GRADIENT_CAUSE)
"""How the causes of collectives on weights begin, which hide behind compute."""
FORWARD_PASSES = {"save_all": 1}
"""Gradient checkpointing -> forward passes of a training step; every other kind repeats the layers for the gradient."""
REPEATED = 2
CAUSAL = 0.5
"""Part of the position x position products that a causal mask leaves."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one cause in one step."""

    kind: str
    mesh_axes: MeshAxes
    bytes: float
    """Received per device, over all executions."""
    count: int
    cause: str

    def seconds(self, hardware: Slice, mesh: MeshShape) -> float:
        """At the bandwidth of one bidirectional ring; what crosses slices at that of the network.

        Of n devices in s slices each receives n-1 parts: n-s from its own slice, and, as each of a slice's devices asks
        the others for another part, s-1 over the network.
        """
        generation = hardware.generation
        n = mesh_size(mesh, self.mesh_axes)
        parts = dict(zip(mesh, slices_by_axis(hardware.slices, mesh), strict=True))
        crossing = math.prod(parts[axis] for axis in self.mesh_axes)
        across = self.bytes * (crossing - 1) / max(1, n - 1)
        return (self.bytes - across) / (
            2 * generation.link_bandwidth
        ) + across * generation.devices_per_chip / generation.network_bandwidth


def all_gather(result_bytes: float, mesh: MeshShape, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """Every device gets the parts of the others; `result_bytes` is what it then has, per execution."""
    n = mesh_size(mesh, axes)
    return Traffic("all-gather", axes, count * result_bytes * (n - 1) / n, count, cause)


def all_reduce(array_bytes: float, mesh: MeshShape, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """A reduce-scatter and an all-gather of `array_bytes`, per execution."""
    n = mesh_size(mesh, axes)
    return Traffic("all-reduce", axes, 2 * count * array_bytes * (n - 1) / n, count, cause)


def step_seconds(compute: float, weights: float, activations: float) -> float:
    """Time of a step from its compute, its gathers of weights, and its collectives on activations, in seconds."""
    return max(compute, weights) + activations


def step_flops(model: ModelAxes, workload: Workload) -> float:
    """Products that the model needs for one step, over all devices: what model FLOP/s utilisation counts.

    Nothing is counted that is done again, nor the masked half of attention.
    """
    whole = sum(_flops(model, workload, {}, {}))
    return 3 * whole if workload.is_training else whole


def compute_seconds(
    model: ModelAxes, workload: Workload, compute: AxisMapping, mesh: MeshShape, hardware: Slice
) -> float:
    """Matrix products of one step on one device, or the time to read the weights where that is longer."""
    parameters = {parameter.path: parameter for parameter in model.parameters}
    weights = (parameters[c.weight] for c in model.contractions if not c.is_lookup)
    weight_bytes = sum(w.size * workload.compute_bytes / shard_count(w.axes, compute, mesh) for w in weights)
    generation = hardware.generation
    # the gradient takes two products for each of the forward pass
    passes = _forward_passes(workload) + 2 if workload.is_training else 1
    flops = sum(_flops(model, workload, compute, mesh))
    return passes * max(flops / generation.flops, weight_bytes / generation.hbm_bandwidth)


def _flops(model: ModelAxes, workload: Workload, compute: AxisMapping, mesh: MeshShape) -> Iterator[float]:
    """Of a forward pass on one device, contraction by contraction."""
    batch_cut = shard_count((workload.batch_axis,), compute, mesh)
    for contraction in model.contractions:
        if contraction.is_lookup:
            continue
        axes = (*contraction.inputs, *contraction.outputs)
        cut = shard_count(axes, compute, mesh) * (1 if contraction.routed else batch_cut)
        is_head = model.vocab in contraction.outputs
        tokens = workload.batch if workload.kind == "prefill" and is_head else workload.tokens
        yield 2 * tokens * model.elements(axes) * contraction.uses_per_token * contraction.repeats / cut
    for attention in model.attention:
        width = model.axes[attention.merged] * model.axes[attention.head_size]
        cut = batch_cut * shard_count((*attention.heads, attention.head_size), compute, mesh)
        yield 4 * CAUSAL * workload.tokens * workload.position * width * attention.repeats / cut


def compute_traffic(model: ModelAxes, workload: Workload, compute: AxisMapping, mesh: MeshShape) -> Iterator[Traffic]:
    """Collectives that the compute mapping causes, whatever the parameters' mapping."""
    forward = _forward_traffic(model, workload, compute, mesh)
    if not workload.is_training:
        yield from forward
        return
    # the transposes of the products sum over the other axis, as much again
    passes = _forward_passes(workload) + 1
    for traffic in forward:
        yield replace(traffic, bytes=passes * traffic.bytes, count=passes * traffic.count)


def _forward_passes(workload: Workload) -> int:
    return FORWARD_PASSES.get(workload.gradient_checkpointing, REPEATED)


def _forward_traffic(model: ModelAxes, workload: Workload, compute: AxisMapping, mesh: MeshShape) -> Iterator[Traffic]:
    batch_cut = shard_count((workload.batch_axis,), compute, mesh)
    for contraction in model.contractions:
        axes = mesh_axes_of(contraction.inputs, compute)
        if not axes:
            continue
        # Contracting a cut axis leaves partial sums; so does a lookup in a cut table.
        width = model.elements(contraction.outputs) / shard_count(contraction.outputs, compute, mesh)
        per_token = width * workload.compute_bytes * contraction.uses_per_token
        # the tokens of routed modules are not cut by the batch axis (see shardplan.plan.memory)
        tokens = workload.tokens / (1 if contraction.routed else batch_cut)
        yield all_reduce(tokens * per_token, mesh, axes, contraction.repeats, f"partial sums of {contraction.weight}")
    for attention in model.attention:
        yield from _attention_traffic(model, attention, workload, compute, mesh)


def _attention_traffic(
    model: ModelAxes, attention: Attention, workload: Workload, compute: AxisMapping, mesh: MeshShape
) -> Iterator[Traffic]:
    tokens = workload.tokens / shard_count((workload.batch_axis,), compute, mesh)
    heads = model.axes[attention.merged]
    inner = compute.get(attention.head_size, ())
    if inner:
        scores = tokens * workload.position * heads / shard_count(attention.heads, compute, mesh) * 4
        yield all_reduce(scores, mesh, inner, attention.repeats, "attention scores over a cut head size")
    # Flattening the heads leaves a cut of the major axis where it is; any other cut of the result must be undone.
    cut = mesh_axes_of(attention.heads, compute)
    major, merged = compute.get(attention.heads[0], ()), compute.get(attention.merged, ())
    if cut and not cut == major == merged:
        result = tokens * heads * model.axes[attention.head_size] * workload.compute_bytes
        yield all_gather(result, mesh, cut, attention.repeats, "attention heads cut differently by the projection")


def weight_traffic(
    contraction: Contraction,
    weight: Parameter,
    workload: Workload,
    params: AxisMapping,
    compute: AxisMapping,
    mesh: MeshShape,
) -> Iterator[Traffic]:
    """Gathers of a weight that rests in more parts than it is used in (FSDP), and the sums of its gradient."""
    resting, used = mesh_axes_of(weight.axes, params), mesh_axes_of(weight.axes, compute)
    whole = weight.size / contraction.repeats * workload.compute_bytes / shard_count(weight.axes, compute, mesh)
    extra = tuple(axis for axis in resting if axis not in used)
    if extra:
        uses = _forward_passes(workload) + 1 if workload.is_training else 1  # the gradient needs it too
        yield all_gather(whole, mesh, extra, uses * contraction.repeats, f"{GATHER_CAUSE} {contraction.weight}")
    if not workload.is_training or contraction.routed:
        return  # every device has seen all tokens of the experts
    # partial sums over the batch: each device needs its part of what rests cut, and all of what does not
    batch = compute.get(workload.batch_axis, ())
    scattered = tuple(axis for axis in batch if axis in extra)
    summed = tuple(axis for axis in batch if axis not in extra)
    cause = f"{GRADIENT_CAUSE} {contraction.weight}"
    if scattered:
        n = mesh_size(mesh, scattered)
        yield Traffic(
            "reduce-scatter", scattered, contraction.repeats * whole * (n - 1) / n, contraction.repeats, cause
        )
    if summed:
        part = whole / mesh_size(mesh, scattered)
        yield all_reduce(part, mesh, summed, contraction.repeats, cause)
