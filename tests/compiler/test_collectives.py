"""The bytes of every kind of collective that are read from a compiled module agree with calculations by hand.

Shapes: x[batch, embed], weights w[layer, embed, mlp] and v[layer, mlp, embed], all bfloat16 (2 bytes), on a v4 torus of
4 x 4 x 4 devices. In a ring of n devices each receives n-1 of n shards.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from shardplan.hardware import parse_slice
from shardplan.search.result.compiler_options import ASYNC_COLLECTIVES, NO_WINDOWED_EINSUM
from shardplan.verify.compiler.topology import make_topology_mesh
from shardplan.verify.hlo.collectives import Network
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.timing import model_step

pytestmark = pytest.mark.usefixtures("tpu_compiler")

LAYERS, BATCH, EMBED, MLP = 7, 4096, 2048, 8192
HARDWARE = parse_slice("v4:4x4x4")
WINDOWED = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"}
BFLOAT16 = 2


def timing_of(function, arrays, sizes, options=NO_WINDOWED_EINSUM):
    """Timing of `function` compiled for arrays given as (shape, spec)."""
    mesh = make_topology_mesh(HARDWARE, sizes)
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in arrays
    ]
    compiled = jax.jit(lambda *arguments: function(mesh, *arguments)).lower(*structs).compile(compiler_options=options)
    network = Network(sizes, HARDWARE, [0] * HARDWARE.devices)
    return model_step(parse(compiled.as_text()), network, HARDWARE)


def received(timing) -> dict[tuple[str, tuple[str, ...]], float]:
    """(kind, mesh axes) -> bytes that a device receives in a step, of all collectives of at least a kilobyte."""
    result: dict[tuple[str, tuple[str, ...]], float] = {}
    for use in timing.uses:
        if use.transfer.bytes >= 1024:
            key = (use.transfer.kind, use.transfer.mesh_axes)
            result[key] = result.get(key, 0) + use.transfer.bytes * use.count
    assert not timing.not_understood
    return result


def constrain(mesh, array, *spec):
    return lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize("sizes", [{"replica": 1, "data": 8, "model": 8}, {"replica": 2, "data": 2, "model": 16}])
def test_column_then_row_parallel_mlp(sizes):
    """An all-reduce per layer adds the partial sums of y[batch, embed] over `model`, which go around the ring twice."""

    def forward(mesh, x, w, v):
        def layer(x, weights):
            hidden = constrain(mesh, x @ weights[0], ("replica", "data"), "model")
            return constrain(mesh, hidden @ weights[1], ("replica", "data"), None), None

        return lax.scan(layer, x, (w, v))[0]

    batch = ("replica", "data")
    arrays = [
        ((BATCH, EMBED), (batch, None)),
        ((LAYERS, EMBED, MLP), (None, None, "model")),
        ((LAYERS, MLP, EMBED), (None, "model", None)),
    ]
    n = sizes["model"]
    local = BATCH // (sizes["replica"] * sizes["data"]) * EMBED * BFLOAT16
    assert received(timing_of(forward, arrays, sizes)) == {("all-reduce", ("model",)): LAYERS * 2 * (n - 1) / n * local}


def fsdp(mesh, x, w):
    """Square layers whose stored weights are sharded along embed over `data`, as is the batch."""

    def layer(x, weight):
        return constrain(mesh, x @ weight, "data", None), None

    return lax.scan(layer, x, w)[0]


SHARDS = 16
FSDP_SIZES = {"replica": 1, "data": SHARDS, "model": 4}
FSDP_ARRAYS = [((16 * BATCH, EMBED), ("data", None)), ((LAYERS, EMBED, EMBED), (None, "data", None))]
SHARD_BYTES = EMBED * EMBED * BFLOAT16 // SHARDS


@pytest.mark.parametrize("options", [NO_WINDOWED_EINSUM, {**NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES}])
def test_fsdp_gathers_each_weight_once_a_layer(options):
    """Every layer gathers the shards of the 15 others, in a synchronous all-gather or in several fusions."""
    timing = timing_of(fsdp, FSDP_ARRAYS, FSDP_SIZES, options)
    assert received(timing) == {("all-gather", ("data",)): LAYERS * (SHARDS - 1) * SHARD_BYTES}


def test_windowed_einsum():
    """The matmul as a loop: in each of 8 iterations a shard arrives from either side, and one before the first.

    That is 17 shards where 15 are needed: the last iteration of the compiler's loop transfers unused shards.
    """

    def columns(mesh, x, w):
        def layer(x, weight):
            return x, constrain(mesh, x @ weight, "data", "model")

        return lax.scan(layer, x, w)[1]

    arrays = [((16 * BATCH, EMBED), ("data", None)), ((LAYERS, EMBED, MLP), (None, "data", "model"))]
    timing = timing_of(columns, arrays, FSDP_SIZES, WINDOWED)
    part = EMBED * MLP // FSDP_SIZES["model"] * BFLOAT16 // SHARDS
    assert received(timing) == {("collective-permute", ("data",)): LAYERS * (SHARDS + 1) * part}
    assert {use.count for use in timing.uses if use.form == "windowed"} >= {LAYERS * SHARDS // 4}
    # the permutes are attributed to the matmul
    assert all("dot_general" in use.transfer.op for use in timing.uses)


def test_ulysses_all_to_all():
    """[position/n, heads] -> [position, heads/n]: a device keeps one of its n shards, and receives n-1 others."""
    n, position, heads = 8, 8192, 2048
    sizes = {"replica": 1, "data": 8, "model": n}

    def reshard(mesh, x):
        all_to_all = jax.shard_map(
            lambda part: lax.all_to_all(part, "model", split_axis=1, concat_axis=0, tiled=True),
            mesh=mesh,
            in_specs=PartitionSpec("model", None),
            out_specs=PartitionSpec(None, "model"),
        )
        return all_to_all(x)

    local = position // n * heads * BFLOAT16
    timing = timing_of(reshard, [((position, heads), ("model", None))], sizes)
    assert received(timing) == {("all-to-all", ("model",)): local * (n - 1) / n}


def test_ring_permute():
    """Keys pass around the ring: in each of n-1 iterations a device receives its neighbour's complete shard."""
    n, position, width = 16, 8192, 2048
    sizes = {"replica": 1, "data": 4, "model": n}

    def ring(mesh, x):
        def rounds(part):
            def one(carry, _):
                part, total = carry
                part = lax.ppermute(part, "model", [(i, (i + 1) % n) for i in range(n)])
                return (part, total + part @ part.T @ part), None

            return lax.scan(one, (part, part), None, length=n - 1)[0][1]

        spec = PartitionSpec("model", None)
        return jax.shard_map(rounds, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    timing = timing_of(ring, [((position, width), ("model", None))], sizes)
    local = position // n * width * BFLOAT16
    assert received(timing) == {("collective-permute", ("model",)): (n - 1) * local}
    assert [use.count for use in timing.uses] == [n - 1]


def test_gradients_are_reduce_scattered():
    """The gradient of w is a partial sum over the batch, and its result is sharded: a device receives 15 shards."""

    def gradient(mesh, x, w):
        loss = lambda w: (constrain(mesh, x @ w, "data", None).astype(jnp.float32) ** 2).sum()  # noqa: E731
        return constrain(mesh, jax.grad(loss)(w), "data", None)

    arrays = [((16 * BATCH, EMBED), ("data", None)), ((EMBED, MLP), (None, None))]
    timing = timing_of(gradient, arrays, FSDP_SIZES)
    assert received(timing) == {("reduce-scatter", ("data",)): (SHARDS - 1) * (EMBED * MLP * BFLOAT16 // SHARDS)}
