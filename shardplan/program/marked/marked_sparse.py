"""Marks calls of Native Sparse Attention while a program is traced, so that each call and gradient is one operation.

How attention to selected blocks is computed is the choice of a plan, so that no trace can show it: the cost of the two
operations is a formula (`shardplan.cost.sparse`). Here they are JAX primitives that have shapes and no
implementation. The projections before and after them are matmuls like others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive

from shardplan.decoder.parts.attention.sparse.sparse_call import SparseCall, attend_sparsely
from shardplan.model.gradient_checkpointing.activation_names import ActivationName
from shardplan.positions.pattern import CAUSAL
from shardplan.program.marked.attention_kind import AttentionKind

SPARSE_ATTENTION = "shardplan_sparse_attention"
"""Name of the primitive of a call of Native Sparse Attention. Operands: arrays of `TokenInputs`, then of `GroupInputs`;
results: sum of the branches and their outputs [b, t, g, r, 3, d], in the queries' type, and selected blocks."""
SPARSE_GRADIENT = "shardplan_sparse_attention_gradient"
"""Name of the primitive of a call's gradient. Operands: gradient of the sum, operands of the call, outputs of branches,
selected blocks; results: gradients of the operands."""
BRANCHES = 3
"""Number of branches of a call."""
VALUES = 2
"""Index of a call's operand that has the channels of values."""

_attention_p = Primitive(SPARSE_ATTENTION)
_attention_p.multiple_results = True
_gradient_p = Primitive(SPARSE_GRADIENT)
_gradient_p.multiple_results = True


@contextmanager
def mark_sparse_attention() -> Iterator[None]:
    """Trace every call of Native Sparse Attention as one operation."""
    with attend_sparsely.replaced_by(_mark):
        yield


def kind_of_sparse_call(call: SparseCall) -> AttentionKind:
    """Return the kind of attention of a call of Native Sparse Attention."""
    sizes = call.config
    return AttentionKind(CAUSAL, sizes.key_size, sizes.value_size, sparse=sizes, uses_own_kernel=True)


def _mark(call: SparseCall) -> Array:
    return _compute(kind_of_sparse_call(call), *jax.tree.leaves((call.inputs, call.parameters)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute(kind: AttentionKind, *operands: Array) -> Array:
    """Bind the primitive that stands for a call of Native Sparse Attention."""
    mixed, *_ = _attention_p.bind(*operands, kind=kind)
    result: Array = mixed
    return result


def _forward(kind: AttentionKind, *operands: Array) -> tuple[Array, Any]:
    mixed, outputs, blocks = _attention_p.bind(*operands, kind=kind)
    # policies keep the blocks by this name: rounding may select others when a layer is computed again. The outputs have
    # no name in the layer, so that a policy that keeps the context computes attention again all the same
    return mixed, (operands, outputs, checkpoint_name(blocks, ActivationName.SELECTED_BLOCKS.value))


def _backward(kind: AttentionKind, kept: Any, gradient: Array) -> tuple[Array, ...]:
    operands, outputs, blocks = kept
    return tuple(_gradient_p.bind(gradient, *operands, outputs, blocks, kind=kind))


_compute.defvjp(_forward, _backward)


def _shapes(*operands: Any, kind: AttentionKind) -> list[ShapedArray]:
    assert kind.sparse is not None
    queries, values = operands[0], operands[VALUES]
    mixed = ShapedArray((*queries.shape[:-1], values.shape[-1]), queries.dtype)
    outputs = ShapedArray((*queries.shape[:-1], BRANCHES, values.shape[-1]), queries.dtype)
    return [mixed, outputs, ShapedArray((*values.shape[:-1], kind.sparse.selected), jnp.dtype(jnp.int32))]


def _gradient_shapes(gradient: Any, *operands: Any, kind: AttentionKind) -> list[ShapedArray]:
    return [ShapedArray(each.shape, each.dtype) for each in operands[:-2]]


_attention_p.def_abstract_eval(_shapes)
_gradient_p.def_abstract_eval(_gradient_shapes)
