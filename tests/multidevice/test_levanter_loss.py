"""Levanter's own losses under mappings, against those of transformers, and what `patch_levanter` makes of them."""

from importlib import import_module

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import transformers_losses
from jax.sharding import Mesh
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from shardplan import load_pretrained
from shardplan.model.logits import levanter_loss


def golden_losses(folder, mapping):
    """float32[sequence, token]: the losses of the golden tokens, on two devices along model and four along data."""
    tokens = np.tile(np.load(folder / "golden.npz")["tokens"], (2, 1))  # a multiple of the data axis
    axes = hax.Axis("batch", len(tokens)), hax.Axis("position", tokens.shape[1])
    example = LmExample(
        hax.named(jnp.asarray(tokens), axes), attn_mask=AttentionMask.causal(), loss_weight=hax.ones(axes)
    )
    with jax.set_mesh(Mesh(np.array(jax.devices()).reshape(1, 4, 2), ("replica", "data", "model"))):
        model = load_pretrained(str(folder), axis_mapping={}, dtype="float32")
        # a function of its own: what the patch replaces may be compiled already
        losses = hax.named_jit(
            lambda model, example: model.compute_next_token_loss(example, reduction=None), axis_resources=mapping
        )(model, example)
    return np.asarray(losses.array)[: len(tokens) // 2, :-1]


@pytest.mark.parametrize(
    "mapping",
    [{"batch": "data", "mlp": "model"}, {"vocab": "model"}, {"batch": "data", "vocab": "model"}, {"embed": "model"}],
    ids=str,
)
@pytest.mark.usefixtures("patched_levanter")
def test_losses_equal_transformers_with_the_patch(golden, mapping):
    folder = golden / "llama"
    np.testing.assert_allclose(golden_losses(folder, mapping), transformers_losses(folder), atol=2e-5)


@pytest.mark.parametrize("mapping", [{"batch": "data", "vocab": "model"}, {"embed": "model"}], ids=str)
@pytest.mark.usefixtures("patched_levanter")
def test_losses_of_a_head_with_a_bias(golden, mapping):
    folder = golden.parent / "families" / "phi"
    np.testing.assert_allclose(golden_losses(folder, mapping), transformers_losses(folder), atol=2e-5)


def test_levanters_loss_with_a_sharded_vocabulary(golden):
    """Without the patch it is the loss among the tokens of one shard."""
    error = np.abs(golden_losses(golden / "llama", {"vocab": "model"}) - transformers_losses(golden / "llama")).max()
    assert error > 0.5


@pytest.mark.parametrize(
    ("shape", "mapping"),
    [
        ((1, 1, 3), {"vocab": "model"}),
        ((1, 2, 2), {"batch": "data", "vocab": "model"}),
        ((2, 1, 3), {"vocab": ("replica", "model")}),
        ((2, 2, 2), {"batch": ("replica", "data"), "vocab": "model"}),
        ((1, 5, 1), {"batch": "data"}),
    ],
    ids=str,
)
def test_losses_in_blocks_and_their_gradients(monkeypatch, shape, mapping):
    """Losses of shards of the vocabulary, in blocks that do not divide them, against float64."""
    kernel = import_module(f"{levanter_loss.KERNELS}.xla")
    monkeypatch.setattr(kernel, "infer_xla_v_block_size", lambda *_, **__: 7)
    Batch, Pos, Embed, Vocab = hax.make_axes(batch=20, position=6, embed=5, vocab=60)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(20, 6, 5)), rng.normal(size=(5, 60))
    targets, weights = rng.integers(0, 60, (20, 6)), rng.integers(0, 2, (20, 6)).astype(np.float32)
    cap, penalty = 3.0, 0.01

    def loss_of(arrays, dot):
        x, w = arrays
        logits = cap * jnp.tanh(dot(x, w) / cap)
        total = jax.nn.logsumexp(logits, -1)
        chosen = jnp.take_along_axis(logits, jnp.asarray(targets)[..., None], -1)[..., 0]
        return ((total - chosen + penalty * total**2) * weights).sum()

    with jax.enable_x64(True):
        expected = jax.value_and_grad(loss_of)((jnp.asarray(x), jnp.asarray(w)), jnp.matmul)

    def computed(x, w):
        return levanter_loss.fused_loss(
            x, w, Embed, Vocab, hax.named(jnp.asarray(targets), (Batch, Pos)), reduction=hax.sum,
            weight=hax.named(jnp.asarray(weights), (Batch, Pos)), logsumexp_weight=penalty, logit_soft_cap=cap,
        ).scalar()  # fmt: skip

    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    with jax.set_mesh(Mesh(devices, ("replica", "data", "model"))):
        arguments = hax.named(jnp.float32(x), (Batch, Pos, Embed)), hax.named(jnp.float32(w), (Embed, Vocab))
        actual = hax.named_jit(jax.value_and_grad(computed, (0, 1)), axis_resources=mapping)(*arguments)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    for gradient, wanted in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(gradient.array, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
