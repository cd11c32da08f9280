"""Bytes per device of a step under a mapping. Pure arithmetic, simple on purpose: estimates by part, of a forward pass
from above; gradients of activations are not counted.

Arrays are evenly cut (indivisible mappings never get here), so every device holds the same.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16

from shardplan.model import Contraction, ModelAxes, Parameter
from shardplan.plan.mapping import AxisMapping, MeshShape, mesh_axes_of, shard_count

FLASH_BLOCK = 1024
"""Side of the block of attention scores that Levanter's flash attention keeps, tokens."""
LOGIT_BYTES = 4
"""The loss is computed in float32."""
OPTIMIZER_COPIES = 2
"""AdamW keeps two moments of every parameter, in the parameter's type."""
RESIDUAL_COPIES = 3
"""Arrays of the residual stream alive in a layer: the stream, its normalised form, the result being added."""


@dataclass(frozen=True)
class Workload:
    """What one step does."""

    batch_axis: str
    batch: int
    position: int
    param_dtype: str
    compute_dtype: str
    kind: str = "eval"
    """eval, train or prefill."""
    gradient_checkpointing: str = "default"

    @property
    def is_training(self) -> bool:
        """Whether gradients are computed and the parameters updated."""
        return self.kind == "train"

    @property
    def tokens(self) -> int:
        """Tokens per step, over all devices."""
        return self.batch * self.position

    @property
    def param_bytes(self) -> int:
        """Bytes per parameter at rest."""
        return itemsize(self.param_dtype)

    @property
    def compute_bytes(self) -> int:
        """Bytes per activation element."""
        return itemsize(self.compute_dtype)


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    return np.dtype(bfloat16 if dtype == "bfloat16" else dtype).itemsize


def activation_bytes(
    model: ModelAxes, workload: Workload, compute: AxisMapping, mesh: MeshShape, attention_scores: bool
) -> int:
    """Most bytes of activations alive inside one layer.

    Per token: `RESIDUAL_COPIES` of the residual stream, and every result of the widest module (in an MLP the gate, the
    up projection and their product; in attention q, k, v and the result). Tokens of routed modules are not cut by the
    batch axis: Levanter's mixture of experts sorts all tokens of the step on every device.

    Args:
        attention_scores: count a block of float32 scores (attention without a fused kernel, as on CPU).
    """
    batch_cut = shard_count((workload.batch_axis,), compute, mesh)
    widths = _module_widths(model, workload, compute, mesh)
    tokens = workload.tokens / batch_cut
    residual = RESIDUAL_COPIES * model.axes[model.residual] / shard_count((model.residual,), compute, mesh)
    total = tokens * workload.compute_bytes * (residual + max(widths.values(), default=0))
    if attention_scores:
        side = min(workload.position, FLASH_BLOCK)
        total += max(
            workload.batch / batch_cut * model.elements(a.heads) / shard_count(a.heads, compute, mesh) * side**2 * 4
            for a in model.attention
        )
    return int(total)


def _module_widths(model: ModelAxes, workload: Workload, compute: AxisMapping, mesh: MeshShape) -> dict[str, float]:
    """Module of a layer -> elements of its results per token of a device."""
    batch_cut = shard_count((workload.batch_axis,), compute, mesh)
    widths: dict[str, float] = defaultdict(float)
    for contraction in model.contractions:
        if contraction.is_lookup or contraction.repeats == 1:
            continue
        axes = [axis for axis in (*contraction.inputs, *contraction.outputs) if axis != model.residual]
        per_token = model.elements(axes) / shard_count(axes, compute, mesh)
        copies = batch_cut if contraction.routed else 1
        widths[contraction.module] += per_token * contraction.uses_per_token * copies
    return widths


def saved_bytes(model: ModelAxes, workload: Workload, compute: AxisMapping, mesh: MeshShape) -> int:
    """What training keeps of the forward pass for the gradient, in every layer.

    The residual stream, as every kind of checkpointing keeps at most; with `save_all` the results of all modules too.
    """
    if not workload.is_training:
        return 0
    batch_cut = shard_count((workload.batch_axis,), compute, mesh)
    layers = max(contraction.repeats for contraction in model.contractions)
    kept = layers * model.axes[model.residual] / shard_count((model.residual,), compute, mesh)
    if workload.gradient_checkpointing == "save_all":
        kept += layers * (RESIDUAL_COPIES + sum(_module_widths(model, workload, compute, mesh).values()))
    return int(workload.tokens / batch_cut * workload.compute_bytes * kept)


def logit_bytes(model: ModelAxes, workload: Workload, compute: AxisMapping, mesh: MeshShape) -> int:
    """Logits and their exponentials in float32; of one token per prompt where that is all that is asked for."""
    batch_cut = shard_count((workload.batch_axis,), compute, mesh)
    vocab = model.axes[model.vocab] / shard_count((model.vocab,), compute, mesh)
    tokens = workload.batch if workload.kind == "prefill" else workload.tokens
    return int(2 * LOGIT_BYTES * tokens / batch_cut * vocab)


def optimizer_bytes(stored: int, workload: Workload) -> int:
    """Moments of `stored` bytes of parameters."""
    return OPTIMIZER_COPIES * stored if workload.is_training else 0


def gradient_bytes(stored: int, workload: Workload) -> int:
    """Gradients of `stored` bytes of parameters, which have their type and rest like them."""
    return stored if workload.is_training else 0


def parameter_bytes(parameter: Parameter, workload: Workload, params: AxisMapping, mesh: MeshShape) -> int:
    """A parameter at rest."""
    return parameter.size // shard_count(parameter.axes, params, mesh) * workload.param_bytes


def cast_bytes(stored: int, workload: Workload) -> int:
    """The copy of `stored` bytes of parameters in the compute type, where that is another: made before the layers."""
    if workload.param_dtype == workload.compute_dtype:
        return 0
    return stored // workload.param_bytes * workload.compute_bytes


def gathered_bytes(
    contraction: Contraction,
    weight: Parameter,
    workload: Workload,
    params: AxisMapping,
    compute: AxisMapping,
    mesh: MeshShape,
) -> int:
    """One layer's weight, whole up to the compute mapping while it is used; 0 where it rests like that already."""
    if set(mesh_axes_of(weight.axes, params)) <= set(mesh_axes_of(weight.axes, compute)):
        return 0
    return weight.size // contraction.repeats // shard_count(weight.axes, compute, mesh) * workload.compute_bytes
