"""Splash attention on each device where positions are not sharded, by the strategy none: heads and batch are."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import dense_attention
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionMask

from shardplan.attention import dot_product_attention
from shardplan.attention.kernels import splash

LENGTH, KEY_HEADS, GROUPS = 128, 2, 2
QUERY = ("batch", "kv_head", "group", "position", "head_size")
KEY = ("batch", "kv_head", "key_position", "head_size")
VALUE = ("batch", "kv_head", "key_position", "value_size")


@pytest.mark.parametrize(
    ("sizes", "heads_axis"),
    [
        ((64, 64), "kv_head"),
        ((192, 128), "group"),
        pytest.param((80, 80), "group", marks=pytest.mark.whole),
        pytest.param((96, 96), "kv_head", marks=pytest.mark.whole),
        pytest.param((256, 256), "kv_head", marks=pytest.mark.whole),
    ],
)
def test_outputs_and_gradients(monkeypatch, sizes, heads_axis):
    """The batch is sharded over one mesh axis, and key heads, or the query heads of each, over another."""
    monkeypatch.setattr(splash, "INTERPRET", True)
    rng = np.random.default_rng(0)
    head_size, value_size = sizes
    q = rng.normal(size=(2, KEY_HEADS, GROUPS, LENGTH, head_size))
    k = rng.normal(size=(2, KEY_HEADS, LENGTH, head_size))
    v = rng.normal(size=(2, KEY_HEADS, LENGTH, value_size))
    sink = rng.normal(size=(KEY_HEADS, GROUPS))
    out_gradient = rng.normal(size=(2, KEY_HEADS, GROUPS, LENGTH, value_size))
    expected = dense_attention(q, k, v, np.tri(LENGTH, dtype=bool), out_gradient, soft_cap=5.0, sink=sink)

    def attend(q, k, v, sink):
        return dot_product_attention(
            "position", "key_position", "head_size", q, k, v, AttentionMask.causal(), heads="kv_head", strategy="none",
            kernel="splash", axis_mapping={"batch": "data", heads_axis: "model"}, attn_sink=sink, logits_soft_cap=5.0,
        ).array  # fmt: skip

    @jax.jit
    def attend_and_differentiate(arrays, out_gradient):
        out, transpose = jax.vjp(attend, *arrays)
        return out, [gradient.array for gradient in transpose(out_gradient)]

    axes = (QUERY, KEY, VALUE, QUERY[1:3])
    arrays = [hax.named(jnp.asarray(x, jnp.float32), names) for x, names in zip((q, k, v, sink), axes, strict=True)]
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        out, gradients = attend_and_differentiate(arrays, jnp.asarray(out_gradient, jnp.float32))
    wanted = (expected.out, *expected.gradients)
    for actual, reference in zip((out, *gradients), wanted, strict=True):
        assert np.abs(actual - reference).max() <= 1e-5 * np.abs(reference).max()
