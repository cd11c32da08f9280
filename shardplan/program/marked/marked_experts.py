"""Marks blocks of routed experts while a program is traced, so that each block and each gradient is one operation.

What a device does for a block depends on the strategy that a plan chooses, so that no trace can show it: the cost of
the two operations is a formula (`shardplan.cost.experts`). Here they are JAX primitives that have shapes and no
implementation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import haliax as hax
import jax
from haliax import NamedArray
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive

from shardplan.experts.block import RoutedCall, replace_routed_mlp
from shardplan.experts.expert_weights import ExpertWeights
from shardplan.program.marked.expert_kind import ExpertKind

EXPERTS = "shardplan_experts"
"""Name of the primitive of a block of experts. Operands: tokens, chosen experts, routing weights, and the
`ExpertWeights` that exist; the result has the tokens' shape."""
EXPERTS_GRADIENT = "shardplan_experts_gradient"
"""Name of the primitive of the gradient of a block of experts. Operands: gradient of the result, operands of the block;
results: gradients of tokens, routing weights and weights."""

_experts_p = Primitive(EXPERTS)
_gradient_p = Primitive(EXPERTS_GRADIENT)
_gradient_p.multiple_results = True


@contextmanager
def mark_experts(load_spread: float = 0.0) -> Iterator[None]:
    """Trace every block of routed experts as one operation.

    Args:
        load_spread: see `ExpertKind`.
    """
    with replace_routed_mlp(partial(_mark, load_spread=load_spread)):
        yield


def _mark(call: RoutedCall, load_spread: float) -> NamedArray:
    weights = call.weights
    kind = ExpertKind(
        experts=call.Experts.size,
        experts_per_token=call.experts_per_token,
        embed=call.Embed.size,
        mlp=call.Mlp.size,
        has_gate=weights.gate is not None,
        has_bias=weights.down_bias is not None,
        weighs_inputs=call.function.weighs_inputs,
        load_spread=load_spread,
    )
    tokens = call.x.array, call.chosen.array, call.routing_weights.array
    return hax.named(_compute(kind, *tokens, weights.map(lambda each: each.array)), call.x.axes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute(kind: ExpertKind, x: Array, chosen: Array, routing_weights: Array, weights: ExpertWeights[Array]) -> Array:
    """Bind the primitive that stands for a block of routed experts."""
    result: Array = _experts_p.bind(x, chosen, routing_weights, *jax.tree.leaves(weights), kind=kind)
    return result


def _forward(kind: ExpertKind, *operands: Any) -> tuple[Array, Any]:
    return _compute(kind, *operands), operands


def _backward(kind: ExpertKind, operands: Any, gradient: Array) -> tuple[Any, ...]:
    x, chosen, routing_weights, weights = operands
    leaves, structure = jax.tree.flatten(weights)
    to_x, to_routing_weights, *to_weights = _gradient_p.bind(gradient, x, chosen, routing_weights, *leaves, kind=kind)
    # the numbers of experts are integers, without a gradient
    return to_x, None, to_routing_weights, jax.tree.unflatten(structure, to_weights)


_compute.defvjp(_forward, _backward)


def _like(array: Any) -> ShapedArray:
    return ShapedArray(array.shape, array.dtype)


def _gradient_shapes(gradient: Any, *operands: Any, kind: ExpertKind) -> list[ShapedArray]:
    x, _, *with_gradients = operands
    return [_like(x), *map(_like, with_gradients)]


_experts_p.def_abstract_eval(lambda x, *_, kind: _like(x))
_gradient_p.def_abstract_eval(_gradient_shapes)
