"""The trace of one step, prepared for planning, with what rests beside it: parameters and the optimizer's state."""

import inspect
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh, AxisType
from levanter.layers.attention import AttentionBackend

from shardplan.config import MESH_AXES
from shardplan.errors import ConfigError, nearest, one_line
from shardplan.model import Model
from shardplan.model.axes import axes_of, named_leaves
from shardplan.model.forward import for_compute, loss_and_gradients, losses, next_logits
from shardplan.plan.workload import Workload
from shardplan.program.named_arrays import Array
from shardplan.program.tasks import Step, prepare
from shardplan.program.trace import Trace, trace_jaxpr

LEARNING_RATE = 1e-5
MICROBATCH = "microbatch"
"""Logical axis that numbers microbatches; it is never cut."""


def token_axes(model: Model, workload: Workload) -> tuple[Axis, ...]:
    """Logical axes of a step's tokens: batch and position, after the microbatch where there are several."""
    parts = workload.microbatches if workload.is_training else 1
    axes = (Axis(workload.batch_axis, workload.batch // parts), model.template.Pos.resize(workload.position))
    return (Axis(MICROBATCH, parts), *axes) if parts > 1 else axes


def trace_step(model: Model, workload: Workload) -> Trace:
    """The step of `workload`, as the Levanter model does it; training up to the gradients.

    Attention is traced as the plain products and softmax; which kernel does them is the plan's affair. Every logical
    axis is mapped to a mesh axis of its name, of size 1, so that constraints on shardings say names.
    """
    template = _attending_plainly(model, workload.gradient_checkpointing)
    axes = token_axes(model, workload)
    shape = tuple(axis.size for axis in axes)
    tokens = NamedArray(jax.ShapeDtypeStruct(shape, jnp.int32), axes)
    predicted = NamedArray(jax.ShapeDtypeStruct(shape, jnp.bool_), axes)
    module = jax.tree.map(lambda leaf: _stored(leaf, workload.param_dtype), template)
    arrays, static = eqx.partition((module, tokens, predicted), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    names = {a.name for _, leaf in named_leaves(arrays) if isinstance(leaf, NamedArray) for a in leaf.axes}
    mapping = {name: name for name in sorted(names)}

    def step(arrays: Any) -> Any:
        module, tokens, predicted = eqx.combine(arrays, static)

        with hax.axis_mapping(mapping):
            if workload.is_training:
                _, gradients = loss_and_gradients(
                    model, module, tokens, predicted, workload.compute_dtype, lambda tree: tree
                )
                return gradients
            module = for_compute(module, workload.compute_dtype)
            if workload.kind == "prefill":
                return next_logits(model, module, tokens)
            return losses(model, module, tokens, predicted)

    mesh_axes = (*mapping, *MESH_AXES)
    mesh = AbstractMesh((1,) * len(mesh_axes), mesh_axes, axis_types=(AxisType.Auto,) * len(mesh_axes))
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(step)(arrays)
    arguments = []
    for i, part in enumerate(arrays):
        for path, leaf in named_leaves(part):
            named = tuple(axis.name for axis in leaf.axes) if isinstance(leaf, NamedArray) else (None,) * leaf.ndim
            arguments.append((named, path if i == 0 else None))
    return trace_jaxpr(jaxpr, arguments)


@lru_cache(maxsize=128)
def plan_step(model: Model, workload: Workload) -> Step:
    """The step of `workload`, traced and prepared for planning."""
    step = prepare(trace_step(model, workload))
    parameters = jax.tree.map(lambda leaf: _stored(leaf, workload.param_dtype), model.template)
    arrays = eqx.filter(parameters, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    state = abstract_state(optimizer(workload.optimizer), arrays) if workload.is_training else ()
    return replace(
        step,
        parameters=tuple(_resting(arrays)),
        state=tuple(_resting(state)),
        activation_axes=(workload.batch_axis, model.template.Pos.name),
        vocab=model.template.Vocab.name,
        pattern=model.pattern,
    )


def optimizer(name: str) -> optax.GradientTransformation:
    """What trains: optax's function `name` of a learning rate.

    Raises:
        ConfigError: optax has no such optimizer.
    """
    known = {each: function for each, function in vars(optax).items() if _is_optimizer(each, function)}
    if name not in known:
        raise ConfigError(f"workload.optimizer {name!r} is no optimizer of optax; {nearest(name, known)}")
    return known[name](LEARNING_RATE)


def _is_optimizer(name: str, function: Any) -> bool:
    """Whether it makes an optimizer of nothing but a learning rate."""
    if name.startswith(("_", "scale")) or not inspect.isfunction(function):
        return False
    names = {each.name: each.default is each.empty for each in inspect.signature(function).parameters.values()}
    return next(iter(names), "") == "learning_rate" and not any([*names.values()][1:])


def abstract_state(transformation: optax.GradientTransformation, parameters: Any) -> Any:
    """The state of an optimizer of `parameters`, a pytree with a `jax.ShapeDtypeStruct` in place of every array.

    Raises:
        ConfigError: it has several arrays in place of a named one, or updates by more than gradients.
    """
    state = eqx.filter_eval_shape(transformation.init, parameters)
    if any(isinstance(leaf, NamedArray) and not hasattr(leaf.array, "shape") for _, leaf in named_leaves(state)):
        raise ConfigError("workload.optimizer has lists of arrays as state, which no mapping can cut; use another")
    try:
        eqx.filter_eval_shape(transformation.update, parameters, state, parameters)
    except TypeError as error:
        raise ConfigError(f"workload.optimizer needs more than gradients; use another: {one_line(error)}") from error
    return state


def _resting(tree: Any) -> Iterator[Array]:
    for path, leaf in named_leaves(tree):
        array, axes = leaf.array if isinstance(leaf, NamedArray) else leaf, axes_of(leaf)
        names = [axis.name for axis in axes] or [None] * array.ndim
        dims = tuple(((name, size),) for name, size in zip(names, array.shape, strict=True))
        yield Array(dims, array.dtype.itemsize, path)


def _attending_plainly(model: Model, checkpointing: str) -> Any:
    """The module tree of `model` with attention in plain operations."""
    plain: dict[str, Any] = {
        "attn_backend": AttentionBackend.VANILLA,
        "use_flash_attention": False,
        "gradient_checkpointing": True if checkpointing == "default" else checkpointing,
    }
    known = {item.name for item in fields(model.config)}
    config = replace(model.config, **{name: value for name, value in plain.items() if name in known})
    return eqx.filter_eval_shape(config.model_type.init, model.vocab, config, key=jax.random.PRNGKey(0))


def _stored(leaf: Any, dtype: str) -> Any:
    """An abstract array as it rests."""
    is_float = isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(leaf.shape, dtype) if is_float else leaf
