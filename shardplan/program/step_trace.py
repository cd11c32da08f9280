"""The traced step of a workload, with the parameters and optimizer state that are stored beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh, AxisType
from levanter.layers.attention import AttentionBackend
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, Llama3RotaryEmbeddingsConfig

from shardplan.model.forward import (
    cast_for_compute,
    compute_losses,
    compute_next_logits,
    compute_scores,
    equal_windows,
    loss_and_gradients,
)
from shardplan.model.inspect import axes_of, named_leaves
from shardplan.model.levanter_loss import one_block_of_tokens
from shardplan.model.registry import Model, abstract_module
from shardplan.model.token_scores import ScoreSettings
from shardplan.plan.mesh_axes import MESH_AXES
from shardplan.plan.workload import BATCH_AXIS, Workload
from shardplan.program.named_arrays import TracedArray, is_parameter_like, traced_mesh_axis
from shardplan.program.optimizer import abstract_optimizer_state, make_optimizer
from shardplan.program.tasks import Step, Task, TaskKind
from shardplan.program.trace import Trace, trace_jaxpr
from shardplan.program.unrolled_blocks import trace_equal_blocks_once
from shardplan.program.walk import build_step

MICROBATCH = "microbatch"
"""Name of the logical axis that numbers microbatches, which is never sharded; primed if the model has such an axis."""


def token_axes(model: Model, workload: Workload) -> tuple[Axis, ...]:
    """Logical axes of a step's tokens: batch and position, preceded by that of microbatches where there are several."""
    parts = workload.num_microbatches if workload.is_training else 1
    axes = (Axis(BATCH_AXIS, workload.batch // parts), model.template.Pos.resize(workload.position))
    if parts == 1:
        return axes
    taken = {axis.name for _, leaf in named_leaves(model.template) for axis in axes_of(leaf)} | {a.name for a in axes}
    name = MICROBATCH
    while name in taken:
        name += "'"
    return (Axis(name, parts), *axes)


def trace_step(model: Model, workload: Workload) -> Trace:
    """Trace the step of `workload` as the Levanter model computes it; a training step up to the gradients.

    Attention is traced as plain matmuls and softmax; the plan decides which kernel runs it. Every logical axis is
    mapped to a mesh axis of its own, of size 1, so that sharding constraints carry the names of logical axes.
    """
    template = _with_plain_attention(model, workload.gradient_checkpointing)
    axes = token_axes(model, workload)
    shape = tuple(axis.size for axis in axes)
    tokens = NamedArray(jax.ShapeDtypeStruct(shape, jnp.int32), axes)
    predicted = NamedArray(jax.ShapeDtypeStruct(shape, jnp.bool_), axes)
    module = jax.tree.map(lambda leaf: _with_float_dtype(leaf, workload.param_dtype), template)
    arrays, static = eqx.partition((module, tokens, predicted), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    names = {a.name for _, leaf in named_leaves(arrays) if isinstance(leaf, NamedArray) for a in leaf.axes}
    mapping = {name: traced_mesh_axis(name) for name in sorted(names)}

    def step(arrays: Any) -> Any:
        """Compute gradients to train, logits of the next token for a prefill, scores, or else the losses."""
        module, tokens, predicted = eqx.combine(arrays, static)
        module = trace_equal_blocks_once(module)

        with hax.axis_mapping(mapping):
            if workload.is_training:
                _, gradients = loss_and_gradients(
                    model, module, tokens, predicted, workload.compute_dtype, lambda tree: tree
                )
                return gradients
            module = cast_for_compute(module, workload.compute_dtype)
            if workload.kind == "prefill":
                return compute_next_logits(model, module, tokens)
            if workload.is_scoring:
                settings = ScoreSettings(workload.top_k, workload.num_logit_blocks, temperature=workload.temperature)
                return compute_scores(model, module, tokens, equal_windows(tokens.axes[-1], workload.window), settings)
            return compute_losses(model, module, tokens, predicted, blocks=workload.num_logit_blocks)

    mesh_axes = (*mapping.values(), *MESH_AXES)
    mesh = AbstractMesh((1,) * len(mesh_axes), mesh_axes, axis_types=(AxisType.Auto,) * len(mesh_axes))
    with jax.sharding.use_abstract_mesh(mesh), _without_optimization(), one_block_of_tokens():
        jaxpr = jax.make_jaxpr(step)(arrays)
    arguments = []
    for i, part in enumerate(arrays):
        for path, leaf in named_leaves(part):
            named = tuple(axis.name for axis in leaf.axes) if isinstance(leaf, NamedArray) else (None,) * leaf.ndim
            arguments.append((named, path if i == 0 else None))
    return trace_jaxpr(jaxpr, arguments)


@lru_cache(maxsize=128)
def plan_step(model: Model, workload: Workload) -> Step:
    """The traced step of `workload`, with its stored parameters and optimizer state."""
    step = build_step(trace_step(model, workload))
    activation_axes = (BATCH_AXIS, model.template.Pos.name)
    parameters, optimizer_state = _stored_arrays(
        model, workload.param_dtype, workload.optimizer if workload.is_training else None
    )
    return replace(
        step,
        parameters=parameters,
        optimizer_state=optimizer_state,
        tasks=tuple(_mark_work_on_parameters(task, activation_axes) for task in step.tasks),
        activation_axes=activation_axes,
        vocab=model.template.Vocab.name,
        pattern=model.pattern,
    )


@lru_cache(maxsize=32)
def _stored_arrays(
    model: Model, param_dtype: str, optimizer: str | None
) -> tuple[tuple[TracedArray, ...], tuple[TracedArray, ...]]:
    """The parameters in `param_dtype`, and the state of the optimizer of that name; none without a name."""
    parameters = jax.tree.map(lambda leaf: _with_float_dtype(leaf, param_dtype), model.template)
    arrays = eqx.filter(parameters, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    state = abstract_optimizer_state(make_optimizer(optimizer), arrays) if optimizer is not None else ()
    return tuple(_traced_arrays(arrays)), tuple(_traced_arrays(state))


def _mark_work_on_parameters(task: Task, activation_axes: tuple[str, ...]) -> Task:
    """Return `task`, marked if it is elementwise work on nothing but parameters, their copies and gradients."""
    arrays = (*task.operands, *task.results)
    is_marked = task.kind == TaskKind.ELEMENTWISE and all(is_parameter_like(array, activation_axes) for array in arrays)
    return replace(task, is_on_parameters=True) if is_marked else task


def _traced_arrays(tree: Any) -> Iterator[TracedArray]:
    """The leaves of a pytree of abstract arrays."""
    for path, leaf in named_leaves(tree):
        array, axes = leaf.array if isinstance(leaf, NamedArray) else leaf, axes_of(leaf)
        names = [axis.name for axis in axes] or [None] * array.ndim
        dims = tuple(((name, size),) for name, size in zip(names, array.shape, strict=True))
        yield TracedArray(dims, array.dtype.itemsize, path)


@lru_cache(maxsize=32)
def _with_plain_attention(model: Model, checkpointing: str) -> Any:
    """The module tree of `model` with attention in plain operations."""
    plain: dict[str, Any] = {
        "attn_backend": AttentionBackend.VANILLA,
        "use_flash_attention": False,
        "gradient_checkpointing": True if checkpointing == "default" else checkpointing,
    }
    if isinstance(getattr(model.config, "rope", None), Llama3RotaryEmbeddingsConfig):
        # other frequencies by the same operations; those of Llama 3 take 17 compiles, half a second, and nothing in a
        # trace depends on them
        plain["rope"] = DefaultRotaryEmbeddingsConfig()
    names = {each.name for each in fields(model.config)}
    config = replace(model.config, **{name: value for name, value in plain.items() if name in names})
    return abstract_module(config, model.vocab)


@contextmanager
def _without_optimization() -> Iterator[None]:
    """Compile what a trace computes, such as rotary frequencies, without optimization: everything is needed once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _with_float_dtype(leaf: Any, dtype: str) -> Any:
    """An abstract array with `dtype` if it is floating-point; any other leaf as it is."""
    is_float = isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(leaf.shape, dtype) if is_float else leaf
