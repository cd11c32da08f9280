"""Levanter's own losses under mappings, against those of transformers, and what `patch_levanter` makes of them."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import levanter_losses, transformers_losses
from jax.sharding import Mesh
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from shardplan import load_pretrained
from shardplan.model.levanter_compat import INSTALLED_SCHEMA, LOSS_WEIGHT_FIELD, loss_takes_sharded_vocab


def levanter_loss(golden, mapping):
    """float32[sequence, token]: the losses of the golden tokens, on two devices along model and four along data."""
    tokens = np.tile(np.load(golden / "llama" / "golden.npz")["tokens"], (2, 1))  # a multiple of the data axis
    axes = hax.Axis("batch", len(tokens)), hax.Axis("position", tokens.shape[1])
    example = LmExample(
        hax.named(jnp.asarray(tokens), axes), attn_mask=AttentionMask.causal(), **{LOSS_WEIGHT_FIELD: hax.ones(axes)}
    )
    with jax.set_mesh(Mesh(np.array(jax.devices()).reshape(1, 4, 2), ("replica", "data", "model"))):
        model = load_pretrained(str(golden / "llama"), axis_mapping={}, dtype="float32")
        # a function of its own: what the patch replaces may be compiled already
        losses = hax.named_jit(lambda *arguments: levanter_losses(*arguments), axis_resources=mapping)(model, example)
    return np.asarray(losses.array)[: len(tokens) // 2, :-1]


@pytest.mark.parametrize(
    "mapping",
    [{"batch": "data", "mlp": "model"}, {"vocab": "model"}, {"batch": "data", "vocab": "model"}, {"embed": "model"}],
    ids=str,
)
@pytest.mark.usefixtures("patched_levanter")
def test_losses_equal_transformers_with_the_patch(golden, mapping):
    np.testing.assert_allclose(levanter_loss(golden, mapping), transformers_losses(golden / "llama"), atol=2e-5)


def test_levanters_loss_with_a_sharded_vocabulary(golden):
    """That of marin-levanter is the loss among the tokens of one shard; see `loss_takes_sharded_vocab`."""
    error = np.abs(levanter_loss(golden, {"vocab": "model"}) - transformers_losses(golden / "llama")).max()
    assert (error < 2e-5) == loss_takes_sharded_vocab(INSTALLED_SCHEMA) and (error < 2e-5 or error > 0.5)
