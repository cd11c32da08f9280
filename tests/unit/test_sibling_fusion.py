"""Gradients of a gated MLP of experts, which the compiler computes in one loop (`fusion.450` of Mixtral on v5p-64)."""

import jax
import jax.numpy as jnp

from shardplan.program.fusion.siblings import fuse_with_siblings
from shardplan.program.operations import OperationKind
from shardplan.program.trace import Argument, trace_jaxpr

EXPERTS, ROWS, EMBED, MLP = 4, 64, 8, 16


def traced_gradients(activation):
    """The gradients of rows and weights of a gated MLP, of which the kernels of grouped matmuls fuse nothing."""

    def loss(rows, gate, up, down, sizes):
        gated = activation(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
        return jnp.sum(jnp.sin(jax.lax.ragged_dot(gated, down, sizes)))

    shapes = [(ROWS, EMBED), (EXPERTS, EMBED, MLP), (EXPERTS, EMBED, MLP), (EXPERTS, MLP, EMBED)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    axes = [("position", "embed"), *[("experts", "embed", "mlp")] * 2, ("experts", "mlp", "embed"), ("experts",)]
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3)))(
        *arguments, jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    )
    return trace_jaxpr(jaxpr, [Argument(each) for each in axes])


def test_both_gradients_of_a_gated_mlp_are_one_operation():
    """It reads three arrays of rows x mlp: both factors, and the gradient of their product."""
    trace = traced_gradients(jax.nn.silu)
    fusion = fuse_with_siblings(trace.operations, trace.arrays, set(trace.results), writes_outputs=False)
    (fused,) = (each for each in fusion.operations if each.is_backward and len(each.results) > 1)
    assert fused.kind == OperationKind.ELEMENTWISE and fusion.is_executed(fused)
    wide = [trace.arrays[value].elements for value in (*fusion.reads(fused), *fused.results)]
    assert wide.count(ROWS * MLP) == 3 + 2

    # every value is computed once, before it is read
    computed = {value for operation in trace.operations for value in operation.results}
    seen = set()
    for operation in fusion.operations:
        assert seen >= computed & set(operation.operands) and not seen & set(operation.results)
        seen.update(operation.results)
    assert seen == computed


def test_without_a_gate_nothing_changes():
    """Such an MLP has one gradient between its matmuls."""
    trace = traced_gradients(jnp.ones_like)
    fusion = fuse_with_siblings(trace.operations, trace.arrays, set(trace.results), writes_outputs=False)
    assert fusion.operations == trace.operations
