"""A hundred training steps with sequence-parallel attention have the losses of Levanter's own model on one device."""

from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import levanter.models.llama
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.models.loss import maybe_fused_next_token_loss

from shardplan.attention import (
    Method,
    SequenceLayout,
    next_token_losses,
    shard_sequence,
    with_sequence_parallel,
)

STEPS, BATCH, LENGTH = 100, 2, 94
COUNT = BATCH * (LENGTH - 1)
"""Tokens of a batch that have a next token."""
HEADS = 12
"""Number of query heads and of key heads, as in the smaller GPT-NeoX models."""
OPTIMIZER = optax.adamw(1e-3)


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        max_seq_len=96, hidden_dim=48, intermediate_dim=96, num_layers=2, num_heads=HEADS, num_kv_heads=HEADS,
        attn_backend=AttentionBackend.VANILLA,
    )  # fmt: skip
    return config.build(hax.Axis("vocab", 128), key=jax.random.PRNGKey(0))


@pytest.fixture(scope="module")
def batches():
    """Source text of Levanter, one token per byte: int32[step, batch, position]."""
    text = Path(levanter.models.llama.__file__).read_bytes()
    tokens = np.frombuffer(text, np.uint8).astype(np.int32) % 128
    return np.resize(tokens, (STEPS, BATCH, LENGTH))


def training_losses(model, batches, loss):
    """Train on the batches; return the mean loss of each, float64[step]."""

    @eqx.filter_jit
    def step(model, state, tokens):
        value, gradients = eqx.filter_value_and_grad(loss)(model, hax.named(tokens, ("batch", "position")))
        updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    state, values = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array)), []
    for tokens in batches:
        model, state, value = step(model, state, tokens)
        values.append(value)
    return np.asarray(values, np.float64)


@pytest.fixture(scope="module")
def expected(model, batches):
    def loss(model, tokens):
        stream = model.activations(tokens, AttentionMask.causal())
        return maybe_fused_next_token_loss(
            hax.Axis("position", LENGTH), model.Embed, model.Vocab, stream, model.get_lm_head(), tokens, reduction=None,
        ).sum().scalar() / COUNT  # fmt: skip

    return training_losses(model, batches, loss)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("devices", "strategy", "ulysses", "kind"),
    [
        (3, "ulysses", 3, "contiguous"),
        (4, "ring", 1, "zigzag"),
        (6, "hybrid", 3, "zigzag"),
        (8, "hybrid", 4, "contiguous"),
        (8, "hybrid", 2, "zigzag"),
        (8, "hybrid", None, "zigzag"),
    ],
)
def test_losses_of_training(model, batches, expected, devices, strategy, ulysses, kind):
    """Ulysses, a ring, and hybrids; the last has the default Ulysses degree, the gcd of heads and devices."""
    degree = np.gcd(HEADS, devices) if ulysses is None else ulysses
    layout = SequenceLayout(LENGTH, devices // int(degree), int(degree), kind)
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(1, -1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(model, tokens):
        example = LmExample(tokens, hax.ones(tokens.axes), attn_mask=AttentionMask.causal())
        return next_token_losses(model, hax.auto_sharded(shard_sequence(example, layout))).sum().scalar() / COUNT

    parallel = with_sequence_parallel(model, Method(strategy, ulysses, layout=layout))
    with jax.set_mesh(mesh), hax.axis_mapping({"position": "model"}):
        losses = training_losses(parallel, batches, loss)
    print(strategy, ulysses, np.abs(losses - expected).max(), losses[0], losses[-1])
    np.testing.assert_allclose(losses, expected, atol=1e-4)
    assert losses[-10:].mean() < 0.8 * losses[0]  # the model learns
