"""Attention by TPU kernels in JAX's interpreter: errors of outputs and gradients, and what Levanter's own call does."""

from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, K, Q, check, mesh_of
from dense_attention import dense_attention
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.layers.attention import dot_product_attention as levanter_attention

from shardplan.attention import dot_product_attention
from shardplan.attention.kernels import splash, splash_blocks
from shardplan.runtime import private_jax


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels of shardplan run in the interpreter of JAX, on CPUs."""
    monkeypatch.setattr(splash, "INTERPRET", True)


@pytest.fixture
def small_blocks(interpreted, monkeypatch):
    """They compute blocks of 128 positions, so that some hops have no block."""
    monkeypatch.setattr(splash_blocks, "KERNEL_BLOCK", 128)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(2, "all_gather", 1, "window and documents", "12q/2kv", 512, "contiguous", "", "splash"),
            marks=pytest.mark.whole,
        ),
        pytest.param(
            Case(4, "ulysses", 4, "documents", "8q/1kv", 512, "contiguous", "sink", "splash"), marks=pytest.mark.whole
        ),
        Case(3, "ring", 1, "causal", "12q/2kv", 384, "zigzag", "", "splash"),
        pytest.param(
            Case(3, "ring", 1, "window", "8q/1kv", 384, "striped", "soft cap", "splash"), marks=pytest.mark.whole
        ),
        pytest.param(
            Case(4, "hybrid", 2, "offset", "12q/2kv", 512, "contiguous", "sink", "splash"), marks=pytest.mark.whole
        ),
        pytest.param(Case(3, "ring", 1, "prefix", "8q/1kv", 384, "contiguous", "", "splash"), marks=pytest.mark.whole),
        pytest.param(
            Case(2, "ring", 1, "known documents", "8q/1kv", 256, "contiguous", "", "splash"), marks=pytest.mark.whole
        ),
        pytest.param(Case(2, "ring", 1, "full", "8q/1kv", 256, "contiguous", "", "splash"), marks=pytest.mark.whole),
        pytest.param(
            Case(3, "ring", 1, "window to both sides", "8q/1kv", 384, kernel="splash"), marks=pytest.mark.whole
        ),
        Case(2, "all_gather", 1, "chunk", "8q/1kv", 256, kernel="splash"),
        pytest.param(Case(3, "ring", 1, "chunk", "12q/2kv", 384, "zigzag", kernel="splash"), marks=pytest.mark.whole),
        pytest.param(
            Case(2, "all_gather", 1, "chunk and documents", "12q/2kv", 512, kernel="splash"), marks=pytest.mark.whole
        ),
        pytest.param(
            Case(3, "ring", 1, "chunk and known documents", "8q/1kv", 384, "documents", kernel="splash"),
            marks=pytest.mark.whole,
        ),
    ],
    ids=str,
)
def test_splash(small_blocks, case):
    """Every strategy with the TPU kernels."""
    out, gradients = check(case)
    assert out <= 1e-5 and max(gradients) <= 1e-5, (out, gradients)


@pytest.mark.whole
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(2, "ring", 1, "causal", "8q/1kv", 512, "zigzag", "", "splash"), marks=pytest.mark.whole),
        Case(2, "ulysses", 2, "documents", "8q/1kv", 512, "contiguous", "sink", "splash"),
    ],
    ids=str,
)
def test_splash_in_chunks(small_blocks, monkeypatch, case):
    """Queries are split into chunks when scalar memory cannot hold all blocks of a long sequence."""
    monkeypatch.setattr(splash, "MAX_BLOCKS", 2)
    out, gradients = check(case)
    assert out <= 1e-5 and max(gradients) <= 1e-5, (out, gradients)


@pytest.mark.parametrize("max_blocks", [splash.MAX_BLOCKS, 2])
def test_splash_without_log_sum_exp(small_blocks, monkeypatch, max_blocks):
    """The kernel does not write it if it is unused; gradients of a function traced so, as scans are, are right too."""
    monkeypatch.setattr(splash, "MAX_BLOCKS", max_blocks)
    rng = np.random.default_rng(0)
    q, k, out_gradient = (rng.normal(size=(1, 1, *g, 256, 32)) for g in ((2,), (), (2,)))
    expected = dense_attention(q, k, k, np.tri(256, dtype=bool), out_gradient)
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K))]

    @jax.jit
    def attend(q, k):
        names, mapping = ("position", "key_position", "head_size"), {"position": "model"}
        arguments = {"strategy": "all_gather", "kernel": "splash", "axis_mapping": mapping}
        return dot_product_attention(*names, q, k, k, AttentionMask.causal(), **arguments).array

    with jax.set_mesh(mesh_of(2)):
        assert "no_residuals" in str(jax.make_jaxpr(attend)(*arrays))
        out, transpose = jax.vjp(attend, *arrays)
        q_gradient, k_gradient = transpose(jnp.asarray(out_gradient, jnp.float32))
    np.testing.assert_allclose(out, expected.out, atol=1e-5)
    np.testing.assert_allclose(q_gradient.array, expected.gradients[0], atol=1e-4)
    np.testing.assert_allclose(k_gradient.array, expected.gradients[1] + expected.gradients[2], atol=1e-4)


def test_levanters_splash_with_sharded_positions(interpreted, monkeypatch):
    """It is right, and gathers the keys on every device."""
    kernels = private_jax.splash
    monkeypatch.setattr(kernels, "make_splash_mha", partial(kernels.make_splash_mha, interpret=True))
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=size) for size in ((1, 2, 2, 512, 128), (1, 2, 512, 128), (1, 2, 512, 128)))
    expected = dense_attention(q, k, v, np.tri(512, dtype=bool), np.zeros(q.shape)).out
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, K))]
    names, mapping = ("position", "key_position", "head_size"), {"position": "model"}

    def levanter_splash(q, k, v):
        return levanter_attention(*names, q, k, v, AttentionMask.causal(), attn_backend=AttentionBackend.SPLASH)

    def shardplan_splash(q, k, v):
        return dot_product_attention(*names, q, k, v, AttentionMask.causal(), strategy="all_gather", kernel="splash")

    with jax.set_mesh(mesh_of(4)), hax.axis_mapping(mapping):
        functions = levanter_splash, shardplan_splash
        theirs, ours = (hax.named_jit(each)(*arrays).rearrange(Q).array for each in functions)
    np.testing.assert_allclose(theirs, expected, atol=1e-5)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("axis", ["q_heads_per_group", "head_size"])
def test_levanters_splash_with_sharded_heads_of_a_group_is_wrong(monkeypatch, axis):
    """It computes on each device as if that had all heads of a group, or everything along head_size."""
    kernels = private_jax.splash
    monkeypatch.setattr(kernels, "make_splash_mha", partial(kernels.make_splash_mha, interpret=True))
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=size) for size in ((1, 2, 4, 256, 256), (1, 2, 256, 256), (1, 2, 256, 256)))
    expected = dense_attention(q, k, v, np.tri(256, dtype=bool), np.zeros(q.shape)).out
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, K))]

    def levanter_splash(q, k, v):
        names = "position", "key_position", "head_size"
        return levanter_attention(*names, q, k, v, AttentionMask.causal(), attn_backend=AttentionBackend.SPLASH)

    with jax.set_mesh(mesh_of(2)), hax.axis_mapping({axis: "model"}):
        result = hax.named_jit(levanter_splash)(*arrays).rearrange(Q).array
    assert np.abs(result - expected).max() > 0.5
