"""Fusion of traced programs: what is written to memory, with work in proportion to the number of operations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from shardplan.program.fusion.fusion import Fusion
from shardplan.program.trace import Argument, trace_jaxpr
from shardplan.program.walk import build_step

LENGTH, WIDTH = 128, 8


class CountedOperations(tuple):
    """Operations that count how often one of them is looked at."""

    visits = 0

    def __getitem__(self, index):
        if isinstance(index, slice):
            return CountedOperations(super().__getitem__(index))
        type(self).visits += 1
        return super().__getitem__(index)

    def __iter__(self):
        for operation in super().__iter__():
            type(self).visits += 1
            yield operation


def traced(function, rank=1):
    axes = (("position",), ("position", "embed"))[rank - 1]
    argument = jax.ShapeDtypeStruct((LENGTH, WIDTH)[:rank], jnp.float32)
    return trace_jaxpr(jax.make_jaxpr(function)(argument), [Argument(axes)])


def chain(n):
    """A value that n times gets its own sine added: the paths through it double with every step."""

    def function(x):
        for _ in range(n):
            x = x + jnp.sin(x)
        return x

    return function


def count_visits(trace) -> int:
    CountedOperations.visits = 0
    Fusion(CountedOperations(trace.operations), trace.arrays, set(trace.results), writes_outputs=True)
    return CountedOperations.visits


def test_work_is_proportional_to_the_number_of_operations():
    few, many = count_visits(traced(chain(16))), count_visits(traced(chain(160)))
    assert few >= 32 and 9 * few <= many <= 11 * few


@pytest.mark.slow
def test_the_walk_through_unrolled_layers_is_linear_too():
    """Layers of equal parameters have the same buffers; a point lists each of them once, with its number."""

    def walk(n):
        """Operations that the walk looks at, and buffers that its points list."""
        weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2 * n
        x = jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.float32)
        step = jax.grad(lambda x, weights: unrolled(n)(x, weights).sum(), argnums=(0, 1))
        weights_named = [Argument.parameter(("embed", "mlp"), f"{i}.weight") for i in range(2 * n)]
        named = [Argument(("position", "embed")), *weights_named]
        trace = trace_jaxpr(jax.make_jaxpr(step)(x, weights), named)
        CountedOperations.visits = 0
        points = build_step(replace(trace, operations=CountedOperations(trace.operations))).points
        return CountedOperations.visits, sum(map(len, points))

    few, many = walk(8), walk(80)
    assert few[0] > 100 and few[1] > 100
    assert many[0] <= 11 * few[0] and many[1] <= 11 * few[1]


def test_a_long_chain_and_a_tree():
    """Neither the depth nor the number of paths matters."""
    for function, rank in (
        (chain(1200), 1),
        (lambda x: jax.lax.associative_scan(jnp.add, x), 1),
        (lambda x: jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x))[1], 2),
    ):
        trace = traced(function, rank)
        fusion = Fusion(trace.operations, trace.arrays, set(trace.results), writes_outputs=True)
        assert {fusion.base_of(value) for value in trace.results} <= fusion.written


def unrolled(n):
    """Layers with a norm, two matmuls and a residual, one after the other without a loop."""

    def function(x, weights=None):
        weights = weights or [jnp.ones((WIDTH, WIDTH))] * 2 * n
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            normed = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True))
            x = x + jnp.maximum(normed @ up, 0) @ down
        return x

    return function


def test_every_matmul_of_unrolled_layers_is_done_once():
    """A matmul that is fused with what follows it is no part of what follows that."""
    step = build_step(traced(unrolled(20), 2))
    matmuls = [task for task in step.tasks if task.kind == "contraction"]
    assert len(matmuls) == 40


@pytest.mark.parametrize("reads", [1, 2])
def test_a_fused_matmul_is_counted_once_where_its_result_is_used_again(reads):
    """The result of an activation that another matmul and a residual read, as in a network without norms."""

    def function(x):
        weight = jnp.ones((WIDTH, WIDTH))
        y = jnp.maximum(x @ weight, 0)
        for _ in range(reads):
            y = jnp.maximum(y @ weight, 0) + y
        return y

    step = build_step(traced(function, 2))
    assert sum(task.kind == "contraction" for task in step.tasks) == 1 + reads


@pytest.mark.parametrize(
    ("function", "read", "written", "is_move"),
    [
        (lambda x: block_of(x) @ jnp.ones((WIDTH, 4)), [16 * WIDTH], [16 * WIDTH], True),
        (lambda x: jnp.sin(block_of(x)) @ jnp.ones((WIDTH, 4)), [16 * WIDTH], [16 * WIDTH], False),
        (
            lambda x: jax.lax.dynamic_update_slice(x, jnp.ones((16, WIDTH)), (4, 0)) @ jnp.ones((WIDTH, 4)),
            [],
            [128],
            True,
        ),
        (lambda x: jnp.where(x > 0, x, 0) @ jnp.ones((WIDTH, 4)), [LENGTH * WIDTH], [LENGTH * WIDTH], True),
    ],
)
def test_what_is_moved(function, read, written, is_move):
    """Of an array that is sliced, or into which a slice is written, the slice alone is read and written."""
    task = next(task for task in build_step(traced(function, 2)).tasks if task.kind == "elementwise")
    assert [array.elements for array in task.operands] == read
    assert [array.elements for array in task.results] == written and task.is_move == is_move


def block_of(x):
    return jax.lax.dynamic_slice(x, (4, 0), (16, WIDTH))


def test_an_inner_jit_with_constants():
    """What an inner function captures is a constant of its jaxpr, not an argument."""
    table = jnp.arange(LENGTH, dtype=jnp.float32)
    trace = traced(lambda x: jax.jit(lambda y: y * table)(x) + 1)
    assert [operation.primitive for operation in trace.operations] == ["mul", "add"]
    assert trace.arrays[trace.results[0]].axes == ("position",)


def test_a_cast_to_a_wider_type_takes_no_memory():
    """It is computed where it is used, from the narrow value, as in norms that compute in float32."""

    def function(x):
        wide = jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32)
        weight = jnp.ones((WIDTH, WIDTH))
        return wide @ weight, jnp.sin(wide) @ weight

    trace = traced(function, 2)
    written = Fusion(trace.operations, trace.arrays, set(trace.results), writes_outputs=True).written - {*trace.results}
    assert sorted(trace.arrays[value].itemsize for value in written if len(trace.arrays[value].dims) == 2) == [2, 4]


def test_what_follows_from_one_value_in_memory_is_computed_again():
    """The sum of a residual and a matmul is in memory; what several operations compute from it, as a norm, is not."""

    def function(x):
        weight = jnp.ones((WIDTH, WIDTH))
        residual = x + x @ weight
        normed = jnp.tanh(residual)
        return residual @ weight, jnp.sin(normed) @ weight, jnp.cos(normed) @ weight

    trace = traced(function, 2)
    fusion = Fusion(trace.operations, trace.arrays, set(trace.results), writes_outputs=True)
    executed = [each.primitive for each in trace.operations if fusion.is_executed(each)]
    assert "add" in executed and "tanh" not in executed
    assert {"sin", "cos"} <= {*executed}
