"""A model with windows in some layers runs with a method for each kind of attention, as its plan says."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionMask
from windowed_model import WindowedConfig, WindowedModel

from shardplan.attention.levanter import Method, with_sequence_parallel
from shardplan.attention.sequence import restore_order, sequence_activations, shard_sequence
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder

LENGTH, DEVICES = 64, 4
FULL, WINDOW = "causal, head size 16", "causal, window 8, head size 16"


@pytest.fixture(scope="module")
def windowed():
    """A small model, tokens, and its residual stream on one device."""
    config = WindowedConfig(
        max_seq_len=LENGTH, hidden_dim=32, intermediate_dim=48, num_heads=8, num_kv_heads=4, head_dim=16, window=8,
        local=2, groups=2, tail=1,
    )  # fmt: skip
    model = WindowedModel.init(hax.Axis("vocab", 64), config, key=jax.random.PRNGKey(0))
    tokens = hax.named(jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, LENGTH))), ("batch", "position"))
    return model, tokens, model.activations(tokens, AttentionMask.causal())


@pytest.mark.parametrize(
    ("order", "full", "window"),
    [
        ("zigzag", "ring", "all_gather"),
        ("contiguous", "ulysses", "ring"),
        ("contiguous", "all_gather", "ulysses"),
    ],
)
def test_each_kind_by_its_method(windowed, order, full, window, monkeypatch):
    """The result is that of one device, and each strategy computes the layers of its kind."""
    model, tokens, expected = windowed
    layout = SequenceLayout(LENGTH, DEVICES, 1, SequenceOrder(order))
    used = []
    import shardplan.attention.levanter as module

    original = module.dot_product_attention

    def noted(*arguments, **settings):
        used.append((settings["strategy"], arguments[6].sliding_window))
        return original(*arguments, **settings)

    monkeypatch.setattr(module, "dot_product_attention", noted)
    given = layout if order == "zigzag" else None
    method = Method(full, layout=given, kinds=((WINDOW, Method(window, layout=given)),))
    parallel = with_sequence_parallel(model, method)
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",), axis_types=(AxisType.Auto,))

    @hax.named_jit(axis_resources={"position": "data"})
    def stream(model, tokens):
        if given is None:
            return model.activations(tokens, AttentionMask.causal())
        sequence = shard_sequence(example(tokens), layout)
        return restore_order(sequence_activations(model, sequence), sequence)

    with jax.set_mesh(mesh), hax.axis_mapping({"position": "data"}):
        result = stream(parallel, tokens)
    np.testing.assert_allclose(result.rearrange(expected.axes).array, expected.array, atol=2e-5)
    assert set(used) == {(full, None), (window, 8)}


def example(tokens):
    """The training example of tokens, with a causal mask."""
    from levanter.models.lm_model import LmExample

    return LmExample(tokens, hax.ones(tokens.axes), AttentionMask.causal())
