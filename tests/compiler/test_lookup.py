"""Bytes received in lookups of tokens[batch, position] in a table[vocab, embed]: predicted, and by the TPU compiler."""

from collections import Counter
from itertools import chain, combinations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from shardplan.cost.gspmd import device_cost
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import parse_slice
from shardplan.program.trace import Argument, trace_jaxpr
from shardplan.program.walk import build_step
from shardplan.verify.compiler.topology import make_topology_mesh
from shardplan.verify.hlo.collectives import Network
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.timing import model_step

pytestmark = pytest.mark.usefixtures("tpu_compiler")

HARDWARE = parse_slice("v4:4x4x4")
MESH = {"replica": 2, "data": 8, "model": 4}
VOCAB, EMBED, POSITION = 32768, 2048, 2048
FEW, SOME, MANY = 8, 16, 64
"""Batch sizes for which the result has half, as many, and four times the table's number of elements."""
REPLICA, DATA, MODEL, BOTH = ("replica",), ("data",), ("model",), ("replica", "data")


def predicted(mapping, table, batch) -> Counter:
    """Kind of collective -> bytes, as the cost model has them."""
    shapes = jax.ShapeDtypeStruct((VOCAB, EMBED), jnp.bfloat16), jax.ShapeDtypeStruct((batch, POSITION), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda weight, tokens: weight[tokens])(*shapes)
    step = build_step(
        trace_jaxpr(jaxpr, [Argument.parameter(("vocab", "embed"), "table"), Argument(("batch", "position"))])
    )
    assignment = ShardingAssignment(
        MESH, mapping, dict(zip(("vocab", "embed"), table, strict=True)), {}, ("batch", "position")
    )
    received = Counter()
    for task in step.tasks:
        for traffic in device_cost(task, assignment).traffic:
            received[traffic.kind] += traffic.bytes
    return received


def compiled(mapping, table, batch) -> Counter:
    """Kind of collective -> bytes, in the compiled lookup and a matmul of its normalized result."""
    mesh = make_topology_mesh(HARDWARE, MESH)
    tokens = PartitionSpec(mapping.get("batch"), mapping.get("position"))

    def function(weight, ids, projection):
        x = lax.with_sharding_constraint(weight[ids], NamedSharding(mesh, PartitionSpec(*tokens, None)))
        y = jnp.tanh(x * lax.rsqrt((x * x).mean(-1, keepdims=True))) @ projection
        return x, lax.with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec(*tokens, "model")))

    arrays = [
        ((VOCAB, EMBED), jnp.bfloat16, PartitionSpec(*(axes or None for axes in table))),
        ((batch, POSITION), jnp.int32, tokens),
        ((EMBED, EMBED), jnp.bfloat16, PartitionSpec(None, "model")),
    ]
    structs = [jax.ShapeDtypeStruct(n, kind, sharding=NamedSharding(mesh, spec)) for n, kind, spec in arrays]
    module = parse(jax.jit(function).lower(*structs).compile().as_text())
    received = Counter()
    for use in model_step(module, Network(MESH, HARDWARE, [0] * HARDWARE.devices), HARDWARE).uses:
        received[use.transfer.kind] += use.transfer.bytes * use.count
    return received


@pytest.mark.parametrize(
    ("table", "batch"),
    [
        # the tokens' only sharded dimension has the mesh axes of the columns, and others
        pytest.param(((), DATA), SOME, marks=pytest.mark.whole),
        (((), DATA), MANY),
        # it has the mesh axes of the rows: the table is gathered unless the result is smaller
        pytest.param((BOTH, ()), SOME, marks=pytest.mark.whole),
        ((BOTH, ()), MANY),
        pytest.param((REPLICA, ()), MANY, marks=pytest.mark.whole),
        pytest.param((DATA, ()), MANY, marks=pytest.mark.whole),
    ],
)
def test_lookups_of_sequences_on_all_devices(table, batch, monkeypatch):
    monkeypatch.setattr(f"{__name__}.HARDWARE", parse_slice("v4:2x2x4"))
    monkeypatch.setattr(f"{__name__}.MESH", {"replica": 2, "data": 8, "model": 1})
    test_lookups((BOTH, ()), table, batch)


ALL_AXES = ("replica", "data", "model")
SEVERAL = [*chain.from_iterable(combinations(ALL_AXES, count) for count in range(4))]
TABLES = [(rows, columns) for rows in SEVERAL for columns in SEVERAL if (rows or columns) and not {*rows} & {*columns}]
"""All shardings of a table's rows and columns."""
DISORDERED = ((REPLICA, ("data", "model")), MANY)
"""The columns have as many shards as the tokens, but of other devices, and the partitioner gathers the rows: the order
of devices is not modelled."""


@pytest.mark.parametrize(
    ("table", "batch"),
    [
        (((), DATA), SOME),  # an all-to-all to the minor mesh axis of the tokens
        ((MODEL, DATA), MANY),  # before it the table's rows are gathered, since a group has half of them
        # the columns are gathered for the tokens of a group that are summed
        pytest.param((DATA, REPLICA), SOME, marks=pytest.mark.whole),
        ((("replica", "model"), ()), MANY),  # of the rows only those are gathered that a group does not hold
        *(
            pytest.param(table, batch, marks=pytest.mark.whole)
            for table in TABLES
            for batch in (SOME, MANY)
            if (table, batch) != DISORDERED
        ),
    ],
)
def test_lookups_where_a_mesh_axis_shards_no_tokens(table, batch, monkeypatch):
    monkeypatch.setattr(f"{__name__}.HARDWARE", parse_slice("v4:4x4x2"))
    monkeypatch.setattr(f"{__name__}.MESH", {"replica": 2, "data": 8, "model": 2})
    test_lookups((BOTH, ()), table, batch)


@pytest.mark.parametrize(
    ("tokens", "table", "batch"),
    [
        ((REPLICA, DATA), (MODEL, ()), FEW),
        pytest.param((REPLICA, DATA), ((), MODEL), FEW, marks=pytest.mark.whole),
        # tokens are divided among all other devices, also along model
        pytest.param((REPLICA, DATA), (DATA, ()), FEW, marks=pytest.mark.whole),
        pytest.param((REPLICA, DATA), (("data", "model"), ()), FEW, marks=pytest.mark.whole),
        ((DATA, ()), ((), DATA), FEW),  # an all-to-all from columns to tokens
        # the table keeps its sharding, the smaller result does not
        pytest.param((REPLICA, DATA), ((), ("replica", "data")), FEW, marks=pytest.mark.whole),
        pytest.param((REPLICA, DATA), (MODEL, DATA), FEW, marks=pytest.mark.whole),
        pytest.param((REPLICA, DATA), (("model", "replica", "data"), ()), FEW, marks=pytest.mark.whole),
        ((REPLICA, DATA), (("model", "data"), REPLICA), FEW),  # of the table only the columns lose their sharding
        ((REPLICA, DATA), (MODEL, DATA), MANY),  # the result keeps its sharding, the smaller table does not
        pytest.param((REPLICA, DATA), (("model", "replica"), DATA), MANY, marks=pytest.mark.whole),
    ],
)
def test_lookups(tokens, table, batch):
    mapping = {name: axes for name, axes in zip(("batch", "position"), tokens, strict=True) if axes}
    expected, received = predicted(mapping, table, batch), compiled(mapping, table, batch)
    # the cost model does not predict that the compiler reorders the rows
    del received["collective-permute"]
    small = 0.01 * received.total()
    assert expected == pytest.approx({kind: size for kind, size in received.items() if size > small}, rel=0.05)
