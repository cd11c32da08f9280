"""Logical axes of traced jaxprs, primitive by primitive and for every model type that the loader supports."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import inspect_model
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.workload.workload import Workload
from shardplan.program import step_trace
from shardplan.program.named_arrays import AxisCopy, TracedArray, is_scores, mark_repeated_axes, score_positions
from shardplan.program.operations import OperationKind
from shardplan.program.step_trace import trace_step
from shardplan.program.trace import EXCHANGES, Argument, trace_jaxpr
from shardplan.program.walk import build_step

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
X, W = (("batch", "embed"), None), (("mlp", "embed"), "up")
SHAPES = {"batch": 6, "embed": 8, "mlp": 20, "layer": 3, "kv": 2, "group": 5, "heads": 10, "position": 4, "blocks": 12}


def traced(function, *arguments, **types):
    """The trace of `function`, whose arguments are given as (axes, path of the parameter or None)."""
    arrays = [
        jax.ShapeDtypeStruct([SHAPES[name] for name in names], types.get("dtype", jnp.float32))
        for names, _ in arguments
    ]
    given = [Argument(axes) if path is None else Argument.parameter(axes, path) for axes, path in arguments]
    return trace_jaxpr(jax.make_jaxpr(function)(*arrays), given)


def names(trace, value):
    """The axes of each dimension of a value; those of a flattened dimension are joined by `*`."""
    return ["*".join(str(name) for name, _ in dim) for dim in trace.arrays[value].dims]


def walk(operations, executions=1):
    """Every operation other than a loop, in order, with its number of executions."""
    for operation in operations:
        if operation.kind == OperationKind.LOOP:
            yield from walk(operation.body, executions * operation.trips)
        else:
            yield operation, executions


def result_names(function, *arguments):
    trace = traced(function, *arguments)
    return names(trace, trace.results[0])


def test_a_matmul_keeps_the_axes_that_it_does_not_contract():
    trace = traced(lambda x, w: jnp.einsum("be,me->bm", x, w), X, W)
    assert names(trace, trace.results[0]) == ["batch", "mlp"]
    (matmul,) = [operation for operation in trace.operations if operation.kind == OperationKind.CONTRACTION]
    assert matmul.contracted == (("embed", 8),)
    assert [trace.arrays[operand].weight for operand in matmul.operands] == [None, "up"]


def test_query_and_key_positions_have_different_names():
    scores = result_names(
        lambda q, k: jnp.einsum("pe,ke->pk", q, k), (("position", "embed"), None), (("position", "embed"), None)
    )
    assert scores == ["position", "position'"]


@pytest.mark.parametrize(
    ("function", "axes", "expected"),
    [
        (lambda x: x.T, ("batch", "embed"), ["embed", "batch"]),
        (lambda x: jnp.exp(x) * 2 + 1, ("batch", "embed"), ["batch", "embed"]),
        (lambda x: x[:, None, :] + jnp.zeros((6, 9, 8)), ("batch", "embed"), ["batch", "None", "embed"]),
        (lambda x: x.sum(0), ("batch", "embed"), ["embed"]),
        (lambda x: jnp.argmax(x, 1), ("batch", "embed"), ["batch"]),
        (lambda x: x[:, :4], ("batch", "embed"), ["batch", "None"]),
        (lambda x: jnp.concatenate([x[:, 4:], x[:, :4]], 1), ("batch", "embed"), ["batch", "None"]),
        (lambda x: x.reshape(48), ("batch", "embed"), ["batch*embed"]),
        (lambda x: x.reshape(48).reshape(6, 8), ("batch", "embed"), ["batch", "embed"]),
        (lambda x: x.reshape(6, 2, 4), ("batch", "embed"), ["batch", "embed", "embed."]),
        (lambda x: x.reshape(6, 1, 8, 1)[:, 0, :, 0], ("batch", "embed"), ["batch", "embed"]),
        (lambda x: x.reshape(16, 3), ("batch", "embed"), ["None", "None"]),
        (lambda x: jnp.cumsum(x, 0), ("batch", "embed"), ["batch", "embed"]),
        (lambda x: jax.nn.softmax(x), ("batch", "embed"), ["batch", "embed"]),
        (lambda x: jax.checkpoint(jnp.sin)(x), ("batch", "embed"), ["batch", "embed"]),
        (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), ("batch", "embed"), ["batch", "embed"]),
        (lambda x: jnp.where(x > 0, x, 0), ("batch", "embed"), ["batch", "embed"]),
    ],
)
def test_primitives(function, axes, expected):
    assert result_names(function, (axes, None)) == expected


def test_results_without_names_are_reported():
    assert traced(lambda x: x.reshape(16, 3), (("batch", "embed"), None)).unnamed == {"reshape": 1}
    assert traced(lambda x: x + 1, (("batch", "embed"), None)).unnamed == {}


def test_a_name_that_looks_like_a_copy_or_a_part_is_an_axis_of_its_own():
    named = TracedArray(tuple(((name, 4),) for name in ("position", "position'", "position.")), 4)
    assert not is_scores(named) and not score_positions(named)
    assert mark_repeated_axes(named.dims) == named.dims
    scores = TracedArray(mark_repeated_axes((*named.dims, (("position", 4),))), 4)
    assert is_scores(scores) and score_positions(scores) == {"position", AxisCopy("position")}
    assert scores.logical_axes == named.axes
    assert mark_repeated_axes(scores.dims[1:]) == (*named.dims[1:], (("position", 4),))


def test_primitives_without_a_rule_are_reported():
    """A Fourier transform would otherwise be free. In a loop, whose body is traced again, it counts once."""

    def transform(x):
        return jnp.fft.fft(x).real

    def loop(x, stack):
        return jax.lax.scan(lambda carry, slice: (carry + transform(slice), None), x, stack)[0]

    assert traced(transform, (("embed", "mlp"), None)).unpriced == {"fft": 1}
    looped = traced(loop, (("embed", "mlp"), None), (("layer", "embed", "mlp"), None))
    assert looped.unpriced == {"fft": 1}


@pytest.mark.parametrize(
    "moved",
    [
        lambda x: jnp.cumsum(x, 1),
        lambda x: jax.lax.cumsum(x, 1, reverse=True),
        lambda x: jnp.sort(x, axis=1),
        lambda x: x[:, ::-1],
        lambda x: x[:, ::2],
        lambda x: jnp.roll(x, 1, axis=1),
    ],
)
def test_activations_that_move_along_positions_are_reported(moved):
    """Devices with shards of positions exchange them. Tokens, and the last position, are small."""
    arguments = (("batch", "position"), None), (("mlp", "embed"), "table")

    def approximations(function):
        return traced(function, *arguments, dtype=jnp.int32).approximations

    assert EXCHANGES in approximations(lambda tokens, table: moved(table[tokens]))
    assert not approximations(lambda tokens, table: table[moved(tokens)])
    assert not approximations(lambda tokens, table: table[tokens][:, -1])


def test_the_computation_of_a_reduce_is_no_call():
    """It takes scalars, and no rule knows what it computes; a `jax.checkpoint` is called with what it is given."""

    def furthest(x):
        return jax.lax.reduce(x, jnp.float32(0), lambda a, b: jnp.where(abs(a) > abs(b), a, b), (1,))

    trace = traced(furthest, X)
    assert trace.unpriced == {"reduce": 1}
    assert [size for dim in trace.arrays[trace.results[0]].dims for _, size in dim] == [6]
    assert result_names(jax.checkpoint(lambda x, w: jnp.einsum("be,me->bm", x, w)), X, W) == ["batch", "mlp"]


@pytest.mark.parametrize(
    ("summed", "mesh_axes"),
    [("model", ["model"]), (("data", "replica"), ["replica", "data"]), ("embed", []), (("embed", "data"), ["data"])],
)
def test_a_sum_over_devices_is_over_the_mesh_axes_that_it_names(summed, mesh_axes):
    """The program is traced on a mesh that has the logical axes beside those of devices."""
    names = ("embed", "replica", "data", "model")
    mesh = AbstractMesh((1,) * 4, names, axis_types=(AxisType.Auto,) * 4)

    def add(x):
        everywhere = P(names)
        local = jax.shard_map(lambda x: jax.lax.psum(x, summed), mesh=mesh, in_specs=everywhere, out_specs=everywhere)
        return local(x)

    sums = [o for o in traced(add, X).operations if o.kind == OperationKind.COLLECTIVE]
    assert [axis for o in sums for axis in o.mesh_axes] == mesh_axes


@pytest.mark.parametrize(
    ("exchange", "kind"),
    [
        (lambda x: jax.lax.pmax(x, ("data", "embed")), "all-reduce"),
        (lambda x: jax.lax.all_gather(x, "data", tiled=True), "all-gather"),
        (lambda x: jax.lax.all_gather(x, "data")[0], "all-gather"),
        (lambda x: jax.lax.psum_scatter(x, "data", tiled=True), "reduce-scatter"),
        (lambda x: jax.lax.all_to_all(x, "data", 0, 1, tiled=True), "all-to-all"),
        (lambda x: jax.lax.ppermute(x, "data", [(0, 0)]), "collective-permute"),
    ],
)
def test_collectives_of_a_shard_map(exchange, kind):
    mesh = AbstractMesh((1,) * 2, ("embed", "data"), axis_types=(AxisType.Auto,) * 2)
    axes = P("embed", "data")
    trace = traced(jax.shard_map(exchange, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False), X)
    (operation,) = [each for each in trace.operations if each.kind == OperationKind.COLLECTIVE]
    assert (operation.collective, operation.mesh_axes) == (kind, ("data",)) and not trace.unpriced


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
@pytest.mark.parametrize("columns", ["embed", "channel"])
def test_gradients_of_tables_of_one_shape_have_the_axes_of_their_tables(wrap, columns):
    """The indices of the lookups tell them apart."""

    def embed(first, second, ids, types):
        return jnp.tanh(first[ids * 2 % 12]).sum() + jnp.tanh(second[types]).sum()

    gradients, unnamed = gradients_of_tables(wrap(embed), ("vocab", "embed"), ("type", columns))
    assert gradients == [["vocab", "embed"], ["type", columns]] and not unnamed


def test_gradients_of_tables_that_cannot_be_told_apart_are_reported():
    """One value has the indices of both, so that only columns may say which gradient is that of which."""
    rows = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))

    def embed(first, second, ids, _):
        indices = ids[:, None]
        return sum(jnp.tanh(jax.lax.gather(table, indices, rows, (1, 8))).sum() for table in (first, second))

    gradients, unnamed = gradients_of_tables(embed, ("vocab", "embed"), ("type", "embed"))
    assert gradients == [["None", "embed"]] * 2 and unnamed == {"scatter-add": 2}
    gradients, unnamed = gradients_of_tables(embed, ("vocab", "embed"), ("type", "channel"))
    assert gradients == [["vocab", "embed"], ["type", "channel"]] and not unnamed


def gradients_of_tables(embed, first, second):
    """The axes of the gradients of two tables of (12, 8), and what could not be named."""
    tables, ids, types = (jax.ShapeDtypeStruct(*each) for each in (((12, 8), float), ((6,), int), ((4,), int)))
    arguments = [
        Argument.parameter(first, "first"), Argument.parameter(second, "second"), Argument(("batch",)),
        Argument(("position",)),
    ]  # fmt: skip
    trace = trace_jaxpr(jax.make_jaxpr(jax.grad(embed, (0, 1)))(tables, tables, ids, types), arguments)
    return [names(trace, result) for result in trace.results], trace.unnamed


def test_flattened_heads_are_recognised_and_split_again():
    """Attention's output is projected over heads = kv x group; the gradient goes back through the reshape."""

    def project(o, w):
        return (jnp.einsum("bh,he->be", o.reshape(6, 10), w) ** 2).sum()

    trace = traced(jax.grad(project), (("batch", "kv", "group"), None), (("heads", "embed"), "o"))
    assert trace.merged_axes == {"heads": (("kv", 2), ("group", 5))}
    assert names(trace, trace.results[0]) == ["batch", "kv", "group"]


def test_a_split_axis_keeps_its_name_and_can_be_joined():
    """Nested checkpointing splits layers into blocks: without names, stacked gradients would count as replicated."""
    split = traced(lambda w: w.reshape(3, 2, 2, 8) * 2, (("blocks", "embed"), "w"))
    assert names(split, split.results[0]) == ["blocks", "blocks.", "blocks..", "embed"]
    joined = result_names(lambda w: w.reshape(3, 2, 2, 8).reshape(12, 8), (("blocks", "embed"), "w"))
    assert joined == ["blocks", "embed"]


def test_lookups_and_their_gradients():
    table = (("mlp", "embed"), "table")
    rows = result_names(lambda t, i: t[i.astype(int)], table, (("batch", "position"), None))
    assert rows == ["batch", "position", "embed"]

    def squared_rows(t, i):
        return (t[i.astype(int)] ** 2).sum()

    trace = traced(jax.grad(squared_rows), table, (("batch", "position"), None))
    assert names(trace, trace.results[0]) == ["mlp", "embed"]


def test_loops_carry_names_and_stack_them():
    def layers(x, w):
        def body(x, w):
            return jnp.tanh(jnp.einsum("be,me->bm", x, w) @ w), x

        return jax.lax.scan(body, x, w)

    trace = traced(layers, X, (("layer", "mlp", "embed"), "up"))
    assert [names(trace, value) for value in trace.results] == [["batch", "embed"], ["layer", "batch", "embed"]]
    assert [n for o, n in walk(trace.operations) if o.kind == OperationKind.CONTRACTION] == [3, 3]


def test_a_carry_is_named_after_what_is_added_to_it():
    """Gradients start from zeros without names."""

    def total(xs):
        return jax.lax.scan(lambda total, x: (total + x, None), jnp.zeros((6, 8)), xs)[0]

    assert result_names(total, (("layer", "batch", "embed"), None)) == ["batch", "embed"]


def test_dead_code_is_not_traced():
    def function(x, w):
        _ = x @ w.T
        return x + 1

    assert [o.kind for o, _ in walk(traced(function, X, W).operations)] == [OperationKind.ELEMENTWISE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model_class"), [("eval", None), ("prefill", None), ("train", None), ("train", LEVANTER)]
)
@pytest.mark.parametrize("model_type", sorted(path.name for path in GOLDEN.iterdir()))
def test_every_model_type_is_named(model_type, kind, model_class):
    """Every primitive has a rule, every weight of a matmul has all its axes, and every weight has a matmul.

    Levanter's classes train, and the decoder evaluates or trains.
    """
    model = build_model(read_config(str(GOLDEN / model_type / "config.json"), None, model_class), 64)
    trace = trace_step(model, Workload(kind, 5, 64, "float32", "bfloat16"))  # as many rows of experts as no other array
    assert not trace.unnamed and not trace.unpriced and EXCHANGES not in trace.approximations
    # a shard_map gathers the parameters that each device multiplies by itself
    kinds = (OperationKind.CONTRACTION, OperationKind.RESHARD)
    users = [operation for operation, _ in walk(trace.operations) if operation.kind in kinds]
    weights = [trace.arrays[v] for user in users for v in user.operands if trace.arrays[v].weight]
    assert all(name is not None for weight in weights for name, _ in weight.factors)
    multiplied = {weight.weight for weight in weights}
    axes = inspect_model(model)
    matrices = {
        p.path for p in axes.parameters if axes.residual in p.axes and len(set(p.axes) - {"layer", "layers"}) > 1
    }
    looked_up = {"embedding", "position_embedding"} if model.is_decoder else {"embeddings"}
    assert all(looked_up & set(path.split(".")) for path in matrices - multiplied)
    assert len(matrices & multiplied) >= 4
    if kind == "train":
        assert len(trace.results) >= len(matrices)


@pytest.mark.parametrize("kind", ["eval", "prefill", "train"])
def test_other_rotary_frequencies_change_nothing(kind, monkeypatch):
    """Those of Llama 3 take half a second to compute in Levanter, so a trace has those of plain rotary embeddings."""
    model = build_model(read_config("llama-3.1-8b", None, LEVANTER), 64)
    workload = Workload(kind, 4, 64, "float32", "bfloat16")
    plain = build_step(trace_step(model, workload))
    monkeypatch.setattr(step_trace, "Llama3RotaryEmbeddingsConfig", ())
    assert build_step(trace_step(model, workload)) == plain
