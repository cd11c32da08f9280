"""Attention with axes and meshes of any names and order, and with masks and sinks that leave queries no keys."""

from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import K, Q, V, mesh_of
from dense_attention import dense_attention
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionMask

from shardplan.attention import dot_product_attention

SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names("context")


@pytest.mark.quick
def test_two_mesh_axes_and_heads_on_a_third():
    """A ring along one mesh axis, Ulysses along the other; arrays with axes in another order; under named_jit."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("replica", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    mapping = {"position": ("replica", "data"), "kv_head": "model"}
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((2, 4, 2, 32, 16), (2, 4, 32, 16), (2, 4, 32, 24)))
    expected = dense_attention(q, k, v, np.tri(32, dtype=bool), np.zeros((2, 4, 2, 32, 24)))
    names = ("q_heads_per_group", "position", "batch", "head_size", "kv_head")
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, V))]
    arrays[0] = arrays[0].rearrange(names)

    def run(q, k, v):
        return dot_product_attention(
            "position",
            "key_position",
            "head_size",
            q,
            k,
            v,
            AttentionMask.causal(),
            strategy="hybrid",
            ulysses=2,
            block=8,
        )

    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        out = hax.named_jit(run, axis_resources=mapping)(*arrays)
        assert out.array.sharding.spec == hax.partitioning.pspec_for_axis(out.axes, mapping)
        actual = out.rearrange((*Q[:4], "value_size")).array
    np.testing.assert_allclose(np.asarray(actual), expected.out, atol=2e-6)


@pytest.mark.parametrize(("strategy", "u"), [("ring", 1), ("ulysses", 4)])
def test_names_of_axes_mean_nothing(strategy, u):
    """Heads are the last axis that keys share with queries, or those that the caller names; never those of a name."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((2, 4, 2, 32, 16), (2, 4, 32, 16), (2, 4, 32, 24)))
    expected = dense_attention(q, k, v, np.tri(32, dtype=bool), np.zeros((2, 4, 2, 32, 24)))
    names = {
        "batch": "heads", "kv_head": "batch", "q_heads_per_group": "model", "position": "embed", "key_position": "x",
        "head_size": "kv_head", "value_size": "data",
    }  # fmt: skip
    arrays = [
        hax.named(jnp.asarray(x, jnp.float32), [names[axis] for axis in axes])
        for x, axes in ((q, Q), (k, K), (v, V))
    ]  # fmt: skip
    last = arrays[1].rearrange(("batch", "heads", "x", "kv_head")), arrays[2].rearrange(("batch", "heads", "x", "data"))
    for keys, heads in ((arrays[1:], None), (last, "batch")):
        with jax.set_mesh(mesh_of(4)):
            options = {
                "strategy": strategy,
                "ulysses": u,
                "heads": heads,
                "axis_mapping": {"embed": "model"},
                "block": 8,
            }
            attend = partial(dot_product_attention, "embed", "x", "kv_head", mask=AttentionMask.causal(), **options)
            out = jax.jit(attend)(arrays[0], *keys)
        actual = out.rearrange([names[axis] for axis in (*Q[:4], "value_size")]).array
        np.testing.assert_allclose(np.asarray(actual), expected.out, atol=2e-6)


@pytest.mark.parametrize(("strategy", "u"), [("ring", 1), ("hybrid", 2), ("ulysses", 8)])
def test_mesh_axes_in_another_order_than_the_mesh(strategy, u):
    """Positions on (model, data) of a mesh (data, model); values have another head size under the same name."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((1, 2, 4, 32, 16), (1, 2, 32, 16), (1, 2, 32, 24)))
    expected = dense_attention(q, k, v, np.tri(32, dtype=bool), np.zeros((1, 2, 4, 32, 24)))
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, K))]

    def run(q, k, v):
        mapping = {"position": ("model", "data")}
        return dot_product_attention(
            "position", "key_position", "head_size", q, k, v, AttentionMask.causal(), strategy=strategy, ulysses=u,
            axis_mapping=mapping, block=8,
        )  # fmt: skip

    with jax.set_mesh(mesh):
        out = jax.jit(run)(*arrays)
    np.testing.assert_allclose(np.asarray(out.array), expected.out, atol=2e-6)


@pytest.mark.parametrize(("policy", "repeated"), [(jax.checkpoint_policies.nothing_saveable, 3), (SAVE_ATTENTION, 0)])
def test_checkpoint_policy_saves_residuals(policy, repeated):
    """With outputs saved by name the gradient repeats no hop of the forward pass. On four devices a pass has three hops
    of keys and of values; the backward pass has them too, and four of both gradients."""
    q, k = (hax.zeros(hax.make_axes(kv_head=2, head_size=16, **{name: 8})) for name in ("position", "key_position"))

    @partial(jax.checkpoint, policy=policy)
    def attend(q, k):
        names, mapping = ("position", "key_position", "head_size"), {"position": "model"}
        return dot_product_attention(*names, q, k, k, strategy="ring", axis_mapping=mapping).array

    with jax.set_mesh(mesh_of(4)):
        text = str(jax.make_jaxpr(jax.grad(lambda *inputs: attend(*inputs).sum(), argnums=(0, 1)))(q, k))
    assert text.count("ppermute[") == 2 * (3 + repeated + 3 + 3 + 1)


def test_explicit_mask_of_padding_keys():
    """The mask has only the axes of batch and keys, and the sink takes no weight."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((2, 2, 4, 16, 16), (2, 2, 16, 16), (2, 2, 16, 24)))
    is_token = np.arange(16) < np.array([9, 0])[:, None]
    expected = dense_attention(q, k, v, is_token[:, None, None, None], np.zeros((2, 2, 4, 16, 24)))
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, (*V[:3], "value_size")))]
    mask, sink = hax.named(jnp.asarray(is_token), ("batch", "key_position")), hax.full(arrays[0].axes[1:3], -jnp.inf)
    names, mapping = ("position", "key_position", "head_size"), {"position": "model"}
    arguments = {"strategy": "ring", "attn_sink": sink, "axis_mapping": mapping}
    attend = jax.jit(lambda *arrays: dot_product_attention(*names, *arrays, mask, **arguments))
    with jax.set_mesh(mesh_of(4)):
        out = attend(*arrays)
    np.testing.assert_allclose(np.asarray(out.array), expected.out, atol=2e-6)


def test_gradients_without_keys_and_sinks():
    """Gradients are not NaN where queries have no keys and sinks take no weight."""
    rng = np.random.default_rng(1)
    q, k, v, out_gradient = (
        rng.normal(size=size) for size in ((2, 2, 4, 16, 16), (2, 2, 16, 16), (2, 2, 16, 24), (2, 2, 4, 16, 24))
    )
    expected = dense_attention(q, k, v, np.tri(16, k=-3, dtype=bool), out_gradient)
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, V))]
    sink = hax.full(arrays[0].axes[1:3], -jnp.inf)
    names, mapping = ("position", "key_position", "head_size"), {"position": "model"}

    def loss(q, k, v, sink):
        mask = AttentionMask.causal(offset=-3)
        arguments = {"strategy": "ring", "attn_sink": sink, "axis_mapping": mapping}
        return (dot_product_attention(*names, q, k, v, mask, **arguments).array * out_gradient).sum()

    with jax.set_mesh(mesh_of(4)):
        *gradients, sink_gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays, sink)
    for gradient, wanted in zip(gradients, expected.gradients, strict=False):
        np.testing.assert_allclose(gradient.array, wanted, atol=1e-5)
    assert not sink_gradient.array.any()


@pytest.mark.parametrize(
    ("names", "hardware"), [(("data", "fsdp", "sequence", "tensor"), "v5p-16"), (("dp", "sp"), None)]
)
def test_auto_on_meshes_with_other_axis_names(names, hardware):
    """Names as in MaxText; positions on the last axis but one."""
    sizes = [1] * (len(names) - 2) + [4, 2]
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((2, 2, 4, 16, 16), (2, 2, 16, 16), (2, 2, 16, 24)))
    expected = dense_attention(q, k, v, np.tri(16, dtype=bool), np.zeros((2, 2, 4, 16, 24)))
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, V))]

    @jax.jit
    def attend(q, k, v):
        return dot_product_attention(
            "position", "key_position", "head_size", q, k, v, AttentionMask.causal(), strategy="auto",
            axis_mapping={"position": names[-2], "kv_head": names[-1]}, hardware=hardware,
        ).array  # fmt: skip

    with jax.set_mesh(mesh):
        out = attend(*arrays)
    np.testing.assert_allclose(np.asarray(out), expected.out, atol=2e-6)
