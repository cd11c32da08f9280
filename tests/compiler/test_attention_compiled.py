"""Sequence-parallel attention as the TPU compiler compiles it: received bytes, hops, and memory. Nothing runs.

q[batch, kv_head, q_heads_per_group, position, head_size], positions sharded over the mesh axis `model`; bfloat16.
"""

from collections import Counter

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from haliax.partitioning import pspec_for_axis
from jax.sharding import NamedSharding
from levanter.layers.attention import AttentionMask

from shardplan.attention import dot_product_attention, with_chunks
from shardplan.hardware import parse_slice
from shardplan.verify.compiler.topology import make_topology_mesh
from shardplan.verify.hlo.collectives import Network
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.timing import model_step

pytestmark = pytest.mark.usefixtures("tpu_compiler")

DEGREE, LENGTH, HEAD_SIZE, BFLOAT16 = 8, 65536, 128, 2
MAPPING = {"batch": "data", "position": "model", "key_position": "model"}
CAUSAL = AttentionMask.causal()


def compile_attention(slice_name, heads, mask=CAUSAL, length=LENGTH, degree=DEGREE, kernel="splash", **arguments):
    """Return received bytes and number of collectives by kind, and peak bytes; one sequence per group of devices.

    Args:
        heads: key heads, and query heads per key head.
    """
    hardware = parse_slice(slice_name)
    sizes = {"replica": 1, "data": hardware.devices // degree, "model": degree}
    mesh = make_topology_mesh(hardware, sizes)
    batch, size = Axis("batch", sizes["data"]), Axis("head_size", HEAD_SIZE)
    key_heads, groups = Axis("kv_head", heads[0]), Axis("q_heads_per_group", heads[1])
    keys = batch, key_heads, Axis("key_position", length), size
    queries = batch, key_heads, groups, Axis("position", length), size

    def struct(axes):
        sharding = NamedSharding(mesh, pspec_for_axis(axes, MAPPING))
        return hax.NamedArray(jax.ShapeDtypeStruct([a.size for a in axes], jnp.bfloat16, sharding=sharding), axes)

    def attend(q, k, v):
        return dot_product_attention(
            "position", "key_position", "head_size", q, k, v, mask, axis_mapping=MAPPING, kernel=kernel, **arguments
        )

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(attend).lower(struct(queries), struct(keys), struct(keys))
    module = lowered.compile()
    timing = model_step(parse(module.as_text()), Network(sizes, hardware, [0] * hardware.devices), hardware)
    received, counts = Counter(), Counter()
    for use in timing.uses:
        received[use.transfer.kind] += use.transfer.bytes * use.count
        counts[use.transfer.kind] += use.count
    return received, counts, module.memory_analysis().peak_memory_in_bytes


@pytest.mark.parametrize(
    "sizes",
    [
        (192, 128),
        *(pytest.param((size, size), marks=pytest.mark.whole) for size in (64, 80, 96, 100, 128, 256)),
    ],
    ids=str,
)
def test_kernels_take_every_head_size(sizes):
    """The compiler accepts the kernels of the forward and the backward pass, for keys and values of different sizes.

    Positions are not sharded; key heads are.
    """
    mesh = make_topology_mesh(parse_slice("v5p-8"), {"replica": 1, "data": 2, "model": 2})
    mapping = {"batch": "data", "kv_head": "model"}
    batch, key_heads, groups = Axis("batch", 2), Axis("kv_head", 2), Axis("q_heads_per_group", 2)
    head_size, value_size = Axis("head_size", sizes[0]), Axis("value_size", sizes[1])
    keys = batch, key_heads, Axis("key_position", 1024)
    queries = batch, key_heads, groups, Axis("position", 1024), head_size

    def struct(axes):
        sharding = NamedSharding(mesh, pspec_for_axis(axes, mapping))
        return hax.NamedArray(jax.ShapeDtypeStruct([a.size for a in axes], jnp.bfloat16, sharding=sharding), axes)

    def loss(arrays):
        out = dot_product_attention(
            "position", "key_position", "head_size", *arrays, CAUSAL, heads="kv_head", axis_mapping=mapping,
            strategy="none", kernel="splash",
        )  # fmt: skip
        return hax.sum(out.astype(jnp.float32)).scalar()

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        arrays = struct(queries), struct((*keys, head_size)), struct((*keys, value_size))
        module = jax.jit(jax.grad(loss)).lower(arrays).compile()
    # one kernel for the outputs, one for the gradients of queries, and one for those of keys and values
    assert module.as_text().count('custom_call_target="tpu_custom_call"') == 3


SLICES = [pytest.param("v4-256", marks=pytest.mark.whole), "v5p-128"]


@pytest.mark.parametrize("slice_name", SLICES)
@pytest.mark.parametrize("heads", [pytest.param((8, 4), marks=pytest.mark.whole), (2, 8)], ids=str)
@pytest.mark.parametrize(
    ("strategy", "ulysses"),
    [
        pytest.param("all_gather", 1, marks=pytest.mark.whole),
        pytest.param("ring", 1, marks=pytest.mark.whole),
        ("ulysses", DEGREE),
        pytest.param("hybrid", 4, marks=pytest.mark.whole),
        pytest.param("hybrid", 2, marks=pytest.mark.whole),
    ],
)
def test_bytes_are_those_of_the_formulas(slice_name, heads, strategy, ulysses):
    """Received per device, in units of batch x head size: all_gather and ring 2 Hkv (S/P)(P-1); Ulysses and the
    all-to-alls of hybrid (2 Hq + 2 Hkv)(S/P)(U-1)/U, with Hkv at least U; the ring of hybrid 2 Hkv (S/P)(R-1)."""
    received, _, _ = compile_attention(slice_name, heads, strategy=strategy, ulysses=ulysses)
    unit = LENGTH // DEGREE * HEAD_SIZE * BFLOAT16
    key_heads, query_heads, ring = heads[0], heads[0] * heads[1], DEGREE // ulysses
    sent = max(key_heads, ulysses)
    exchange = (2 * query_heads + 2 * sent) * unit * (ulysses - 1) / ulysses
    hops = 2 * sent * unit * (ring - 1)
    expected = {
        "all_gather": {"all-gather": hops},
        "ring": {"collective-permute": hops},
        "ulysses": {"all-to-all": exchange},
        "hybrid": {"all-to-all": exchange, "collective-permute": hops},
    }[strategy]
    assert {kind: size for kind, size in received.items() if size > 0.01 * received.total()} == pytest.approx(
        expected, rel=0.02
    )
    if ulysses > 1:
        assert "all-gather" not in received


@pytest.mark.whole
@pytest.mark.parametrize("slice_name", SLICES)
def test_only_hops_that_the_mask_needs(slice_name):
    """A window that reaches into one neighbour needs one permute each of keys and values; one document or one chunk per
    device needs none."""
    window = AttentionMask.causal(sliding_window=4096)
    assert compile_attention(slice_name, (2, 4), window, strategy="ring")[1]["collective-permute"] == 2
    chunked = with_chunks(CAUSAL, LENGTH // DEGREE, Axis("position", LENGTH))
    assert "collective-permute" not in compile_attention(slice_name, (2, 4), chunked, strategy="ring")[1]
    documents = (LENGTH // DEGREE,) * DEGREE
    assert "collective-permute" not in compile_attention(slice_name, (2, 4), strategy="ring", documents=documents)[1]


@pytest.mark.whole
@pytest.mark.parametrize(("strategy", "ulysses"), [("ring", 1), ("hybrid", 8)])
def test_memory_grows_linearly_with_the_length(strategy, ulysses):
    """Peak bytes per token stay within a tenth from 128K to 1M tokens over all of v5p-128, with the heads of 8B."""
    lengths = [n * 1024 for n in (128, 256, 512, 1024)]
    arguments = {"degree": 64, "strategy": strategy, "ulysses": ulysses, "layout": "zigzag"}
    by_token = [compile_attention("v5p-128", (8, 4), length=n, **arguments)[2] / n for n in lengths]
    assert by_token == pytest.approx([by_token[0]] * len(lengths), rel=0.1)
