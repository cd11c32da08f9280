"""Bytes moved by lookups of tokens[batch, position] in a table[vocab, embed]: predicted, and by the TPU compiler."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from shardplan.cost.gspmd import device_cost
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import parse_slice
from shardplan.program.tasks import prepare
from shardplan.program.trace import trace_jaxpr
from shardplan.verify.hlo.collectives import Network
from shardplan.verify.hlo.module import parse
from shardplan.verify.hlo.timing import model_step
from shardplan.verify.topology import make_topology_mesh

pytestmark = pytest.mark.usefixtures("tpu_compiler")

HARDWARE = parse_slice("v4:4x4x4")
MESH = {"replica": 2, "data": 8, "model": 4}
VOCAB, EMBED, POSITION = 32768, 2048, 2048
FEW, MANY = 8, 64
"""Sequences with which the result has half the table's elements, and with which it has four times as many."""
REPLICA, DATA, MODEL = ("replica",), ("data",), ("model",)


def predicted(mapping, table, batch) -> Counter:
    """Kind of collective -> bytes."""
    shapes = jax.ShapeDtypeStruct((VOCAB, EMBED), jnp.bfloat16), jax.ShapeDtypeStruct((batch, POSITION), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda weight, tokens: weight[tokens])(*shapes)
    step = prepare(trace_jaxpr(jaxpr, [(("vocab", "embed"), "table"), (("batch", "position"), None)]))
    layout = ShardingAssignment(
        MESH, mapping, dict(zip(("vocab", "embed"), table, strict=True)), {}, ("batch", "position")
    )
    found = Counter()
    for task in step.tasks:
        for traffic in device_cost(task, layout).traffic:
            found[traffic.kind] += traffic.bytes
    return found


def compiled(mapping, table, batch) -> Counter:
    """The same, of the lookup and a product of what was found."""
    mesh = make_topology_mesh(HARDWARE, MESH)
    tokens = PartitionSpec(mapping.get("batch"), mapping.get("position"))

    def function(weight, ids, product):
        x = lax.with_sharding_constraint(weight[ids], NamedSharding(mesh, PartitionSpec(*tokens, None)))
        y = jnp.tanh(x * lax.rsqrt((x * x).mean(-1, keepdims=True))) @ product
        return x, lax.with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec(*tokens, "model")))

    arrays = [
        ((VOCAB, EMBED), jnp.bfloat16, PartitionSpec(*(axes or None for axes in table))),
        ((batch, POSITION), jnp.int32, tokens),
        ((EMBED, EMBED), jnp.bfloat16, PartitionSpec(None, "model")),
    ]
    structs = [jax.ShapeDtypeStruct(n, kind, sharding=NamedSharding(mesh, spec)) for n, kind, spec in arrays]
    module = parse(jax.jit(function).lower(*structs).compile().as_text())
    found = Counter()
    for use in model_step(module, Network(MESH, HARDWARE, [0] * HARDWARE.devices), HARDWARE, causal=1.0).uses:
        found[use.transfer.kind] += use.transfer.bytes * use.count
    return found


@pytest.mark.parametrize(
    ("tokens", "table", "batch"),
    [
        ((REPLICA, DATA), (MODEL, ()), FEW),
        ((REPLICA, DATA), ((), MODEL), FEW),
        ((REPLICA, DATA), (DATA, ()), FEW),  # the tokens are cut by the others, also by model
        ((REPLICA, DATA), (("data", "model"), ()), FEW),
        ((DATA, ()), ((), DATA), FEW),  # columns become tokens
        ((REPLICA, DATA), ((), ("replica", "data")), FEW),  # the table keeps its cut, the smaller result does not
        ((REPLICA, DATA), (MODEL, DATA), FEW),
        ((REPLICA, DATA), (("model", "replica", "data"), ()), FEW),
        ((REPLICA, DATA), (("model", "data"), REPLICA), FEW),  # of the table only the columns lose theirs
        ((REPLICA, DATA), (MODEL, DATA), MANY),  # the result keeps its cut, the smaller table does not
        ((REPLICA, DATA), (("model", "replica"), DATA), MANY),
    ],
)
def test_lookups(tokens, table, batch):
    mapping = {name: axes for name, axes in zip(("batch", "position"), tokens, strict=True) if axes}
    expected, found = predicted(mapping, table, batch), compiled(mapping, table, batch)
    # beyond what is predicted, what was found is put in order
    del found["collective-permute"]
    small = 0.01 * found.total()
    assert expected == pytest.approx({kind: size for kind, size in found.items() if size > small}, rel=0.05)
