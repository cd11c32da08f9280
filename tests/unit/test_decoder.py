"""Parts of the decoder: layers in segments, rules of names, rotary embeddings, and the keys of a config.json."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given
from hypothesis import strategies as st
from levanter.layers.attention import AttentionMask

from shardplan.decoder.architecture import PositionTable
from shardplan.decoder.config import DecoderConfig
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.model import ARRAYS
from shardplan.decoder.names import (
    Concatenated,
    Reshaped,
    Sliced,
    Stacked,
    StoredTensor,
    Transposed,
    evaluate,
    stored_tensors,
)
from shardplan.decoder.parts.attention.frequencies import Frequencies, unscaled
from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention, QueryTemperature
from shardplan.decoder.parts.attention.rotary import Positions, Rotary
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig, NormKind
from shardplan.decoder.parts.segments import divide_layers
from shardplan.errors import ConfigError

LAYER = LayerConfig(
    GroupedAttention(2, 2, 4, Rotary(unscaled(10000.0, 4)), has_bias=True),
    MlpConfig(8, "gelu", has_bias=True),
    NormConfig(NormKind.LAYER, 1e-5, has_bias=True),
    Wiring.PARALLEL,
)


def layers(text):
    """Layers that are equal where letters are."""
    return [dataclasses.replace(LAYER, mlp=MlpConfig(ord(letter), "gelu", has_bias=True)) for letter in text]


@given(st.text("ab", min_size=1, max_size=14))
def test_segments_have_all_layers_in_their_order(text):
    expected = layers(text)
    divided = [layer for segment in divide_layers(expected) for layer in segment.layers * segment.repeats]
    assert divided == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a" * 36, [(36, "a")]),
        ("aaaaab" * 10 + "aa", [(10, "aaaaab"), (2, "a")]),
        ("aaab" * 6, [(6, "aaab")]),
        ("aaa" + "b" * 58, [(3, "a"), (58, "b")]),
    ],
)
def test_segments_of_released_models(text, expected):
    """As Pythia, Gemma 3 27B, models with every fourth layer of another kind, and DeepSeek V3."""
    found = []
    for segment in divide_layers(layers(text)):
        found.append((segment.repeats, "".join(chr(layer.mlp.size) for layer in segment.layers)))
    assert found == expected


def test_rules_move_elements():
    tensors = {"a": np.arange(12.0).reshape(6, 2), "b": np.arange(12.0, 24.0).reshape(6, 2)}
    rules = [Sliced(Reshaped(StoredTensor(name, (6, 2)), (2, 3, 2)), 1, 1, 2) for name in tensors]
    rule = Concatenated((Transposed(Stacked(tuple(rules)), (1, 0, 2, 3)),) * 2, 3)
    value = evaluate(rule, lambda stored: jnp.asarray(tensors[stored.name]), ARRAYS)
    expected = np.stack([tensor.reshape(2, 3, 2)[:, 1:2] for tensor in tensors.values()]).transpose(1, 0, 2, 3)
    assert np.array_equal(value, np.concatenate([expected] * 2, 3))
    assert [stored.name for stored in stored_tensors(rule)] == ["a", "b"] * 2


def test_only_the_first_channels_are_rotated():
    """Channels i and i + half are a complex number that is multiplied by exp(1j * position * frequency)."""
    size, position = Axis("head_size", 8), Axis("position", 5)
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    rotary = Rotary(unscaled(100.0, 4))
    turned = rotary(hax.named(jnp.asarray(x), (position, size)), size, Positions.of(hax.arange(position))).array
    angles = np.arange(5)[:, None] * np.float64(rotary.frequencies.short)
    complex_numbers = (x[:, :2] + 1j * x[:, 2:4]) * np.exp(1j * angles)
    expected = np.concatenate([complex_numbers.real, complex_numbers.imag, x[:, 4:]], axis=1)
    assert np.abs(turned - expected).max() < 1e-6


@pytest.mark.parametrize(("start", "is_long"), [(0, False), (4, True)])
def test_long_texts_have_frequencies_of_their_own(start, is_long):
    """What counts is the largest position, whichever part of the text, padded or not, is in the array."""
    size, position = Axis("head_size", 2), Axis("position", 6)
    rotary = Rotary(Frequencies((0.5,), 1.0, (0.125,), original_positions=8))
    x = hax.named(jnp.tile(jnp.array([1.0, 0.0]), (6, 1)), (position, size))
    indices = hax.named(jnp.array([1, 2, 3, 4, 0, 0]) + start, position)
    turned = rotary(x, size, Positions.of(indices)).array
    angles = np.asarray(indices.array) * (0.125 if is_long else 0.5)
    assert np.abs(turned - np.stack([np.cos(angles), np.sin(angles)], axis=1)).max() < 1e-6


@pytest.mark.slow
def test_packed_texts_have_the_positions_of_their_own():
    """Where the mask has segment ids, chunks, tables and temperatures count from the beginning of each text."""
    attention = GroupedAttention(2, 2, 8, chunk=4, temperature=QueryTemperature(0.5, 2))
    config = DecoderConfig(
        max_seq_len=12, embed=16, segments=divide_layers([dataclasses.replace(LAYER, attention=attention)]),
        norm=LAYER.norm, is_tied=True, position_table=PositionTable(12), gradient_checkpointing=False,
        hf_config='{"model_type": "gpt2"}',
    )  # fmt: skip
    model = jax.tree.map(lambda array: array * 9, config.build(Axis("vocab", 32), key=jax.random.PRNGKey(0)))
    texts = hax.random.randint(jax.random.PRNGKey(1), (Axis("text", 2), Axis("position", 6)), 0, 32)
    ids = hax.named(np.repeat([7, 3], 6), "position")
    mask = AttentionMask.causal()
    activations = hax.named_jit(lambda tokens, mask: model.activations(tokens, mask))
    packed = activations(texts.flatten_axes(("text", "position"), "position"), mask.with_segment_ids(ids)).array
    alone = activations(texts, mask).array.reshape(packed.shape)
    assert np.abs(packed - alone).max() < 1e-4 < np.abs(packed).max()


def test_an_array_is_a_mask():
    """Layers narrow it, by windows and chunks, as they narrow a structured one."""
    Pos = Axis("position", 8)
    attention = GroupedAttention(2, 2, 8, window=3, chunk=4)
    layer = dataclasses.replace(LAYER, attention=attention)
    config = DecoderConfig(
        max_seq_len=8, embed=16, segments=divide_layers([layer]), norm=None, is_tied=True,
        gradient_checkpointing=False, hf_config='{"model_type": "gpt2"}',
    )  # fmt: skip
    model = config.build(Axis("vocab", 32), key=jax.random.PRNGKey(0))
    tokens = hax.arange(Pos)
    allowed = hax.named(jnp.tri(8) > 0, (Pos, Pos.alias("key_position")))
    given = model.activations(tokens, allowed).array
    assert np.abs(given - model.activations(tokens).array).max() < 1e-6


def test_norms_are_over_the_axes_of_their_weight():
    x = np.random.default_rng(0).normal(size=(3, 4, 5))
    heads, size = Axis("heads", 4), Axis("size", 5)
    named = hax.named(jnp.asarray(x, jnp.float32), ("position", heads, size))
    layer = NormConfig(NormKind.LAYER, 1e-5, has_bias=True).init(size)(named).array
    rms = NormConfig(NormKind.RMS, 1e-5).init(heads, size)(named).array
    around_one = NormConfig(NormKind.RMS, 1e-5, is_around_one=True).init(size, each=(heads,))
    of_each_head = around_one(named).array
    bare = NormConfig(NormKind.RMS, 1e-5, has_weight=False).init(heads, size)
    assert bare.weight is None and np.array_equal(bare(named).array, rms)
    assert around_one.weight.axes == (heads, size)
    centred = x - x.mean(-1, keepdims=True)
    assert np.abs(layer - centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)).max() < 1e-6
    assert np.abs(rms - x / np.sqrt((x**2).mean((1, 2), keepdims=True) + 1e-5)).max() < 1e-6
    assert np.abs(of_each_head - x / np.sqrt((x**2).mean(2, keepdims=True) + 1e-5)).max() < 1e-6


@pytest.mark.parametrize(
    ("method", "value", "problem"),
    [
        ("integer", 1.5, "is 1.5; it must be an integer from 1 to 2147483647"),
        ("integer", True, "is True; it must be an integer from 1 to 2147483647"),
        ("integer", None, "is null; it must be an integer from 1 to 2147483647"),
        ("number", -1, "is -1; it must be a positive number"),
        ("number", float("nan"), "is nan; it must be a positive number"),
    ],
)
def test_values_are_checked(method, value, problem):
    keys = ConfigKeys({"hidden_size": value}, "config.json")
    with pytest.raises(ConfigError, match=f"config.json: hidden_size {problem}"):
        getattr(keys, method)("hidden_size")


def test_keys_that_are_left_over_are_refused(raises_message):
    keys = ConfigKeys({"model_type": "x", "torch_dtype": "float32", "a": 1, "b": None, "alibi": True}, "config.json")
    assert keys.integer("a") == 1
    with raises_message(ConfigError):
        keys.finish()
