"""Marks calls of `attend_to_blocks` while a program is traced, so that each call and each gradient is one operation.

What a device does for a call depends on its method, and kernels have no operations that a trace could count: the cost
of the two operations is a formula (`shardplan.cost.sparse`). Here they are JAX primitives that have shapes and no
implementation. The rule that computes the numbers of blocks is traced as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive

from shardplan.decoder.parts.attention.sparse.block_call import BlockCall, compute_block_call
from shardplan.plan.attention_plan import SparseKernel
from shardplan.program.marked.block_attention_kind import BlockAttentionKind

BLOCK_ATTENTION = "shardplan_block_attention"
"""Name of the primitive of a call. Operands: queries, keys, values, numbers of blocks; result: the output, in the
queries' type."""
BLOCK_GRADIENT = "shardplan_block_attention_gradient"
"""Name of the primitive of a call's gradient. Operands: gradient of the output, operands of the call, output; results:
gradients of queries, keys and values."""

_attention_p = Primitive(BLOCK_ATTENTION)
_gradient_p = Primitive(BLOCK_GRADIENT)
_gradient_p.multiple_results = True


@contextmanager
def mark_block_attention() -> Iterator[None]:
    """Trace every call of `attend_to_blocks` as one operation."""
    with compute_block_call.replaced_by(_mark):
        yield


def kind_of_block_call(call: BlockCall) -> BlockAttentionKind:
    """Return the kind of a call of `attend_to_blocks`."""
    *_, groups, heads_per_group, key_size = call.queries.shape
    return BlockAttentionKind(
        groups,
        heads_per_group,
        key_size,
        call.values.shape[-1],
        call.block_size,
        call.blocks.shape[-1],
        SparseKernel(call.method.value),
        call.parts.order,
        call.queries_per_chunk,
    )


def _mark(call: BlockCall) -> Array:
    return _compute(kind_of_block_call(call), call.queries, call.keys, call.values, call.blocks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute(kind: BlockAttentionKind, *operands: Array) -> Array:
    """Bind the primitive that stands for a call of `attend_to_blocks`."""
    output: Array = _attention_p.bind(*operands, kind=kind)
    return output


def _forward(kind: BlockAttentionKind, *operands: Array) -> tuple[Array, Any]:
    output = _compute(kind, *operands)
    # gradients need it without its name: nothing that a policy keeps by name saves them the attention
    return output, (operands, output)


def _backward(kind: BlockAttentionKind, kept: Any, gradient: Array) -> tuple[Array | None, ...]:
    operands, output = kept
    # the numbers of blocks are integers, without a gradient
    return *_gradient_p.bind(gradient, *operands, output, kind=kind), None


_compute.defvjp(_forward, _backward)


def _shape(queries: Any, keys: Any, values: Any, blocks: Any, kind: BlockAttentionKind) -> ShapedArray:
    return ShapedArray((*queries.shape[:-1], values.shape[-1]), queries.dtype)


def _gradient_shapes(gradient: Any, *operands: Any, kind: BlockAttentionKind) -> list[ShapedArray]:
    queries, keys, values, *_ = operands
    return [ShapedArray(each.shape, each.dtype) for each in (queries, keys, values)]


_attention_p.def_abstract_eval(_shape)
_gradient_p.def_abstract_eval(_gradient_shapes)
