"""A decoder with Native Sparse Attention: its config.json, its parameters in checkpoints, its masks, its FLOPs."""

import json

import draccus
import haliax as hax
import jax
import jax.numpy as jnp
import nsa_oracle as oracle
import numpy as np
import pytest
from haliax import Axis
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmConfig

from shardplan.decoder import SelectedMethod
from shardplan.decoder.config import DecoderConfig
from shardplan.decoder.layers.sparse_layers import selected_method, with_selected_method
from shardplan.decoder.model import expected_shapes
from shardplan.decoder.section import DecoderSection
from shardplan.errors import ConfigError
from shardplan.model.registry import build_model

SETTINGS = {
    "block": 8, "stride": 4, "selection_block": 8, "selected": 4, "window": 10,
}  # fmt: skip
SIZES = {
    "model_type": "llama_nsa", "vocab_size": 64, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "v_head_dim": 6, "max_position_embeddings": 64,
    "native_sparse_attention": SETTINGS,
}  # fmt: skip
Vocab, Batch, Pos = Axis("vocab", 64), Axis("batch", 2), Axis("position", 40)


def config_of(**changes):
    return DecoderConfig.from_hf_config({**SIZES, **changes})


def with_settings(**changes):
    return config_of(native_sparse_attention={**SETTINGS, **changes})


@pytest.fixture(scope="module")
def model():
    made = config_of().build(Vocab, key=jax.random.PRNGKey(0))
    # larger weights, so that attention is not flat; norms and biases stay as they are
    return jax.tree.map(lambda array: array * 10 if array.std() > 0 else array, made)


@pytest.fixture(scope="module")
def tokens():
    return hax.random.randint(jax.random.PRNGKey(1), (Batch, Pos), 0, 64)


def parameters_of(model, index):
    """The parameters of a layer's attention, as the oracle has them."""
    stacked = model.segments[0].stacked.layers[0].self_attn.attention.parameters
    return {name: np.asarray(value["layers", index].array, np.float64) for name, value in stacked.items()}


def norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)


def attention(nsa, parameters, x):
    projected = oracle.project(nsa, parameters, x)
    return oracle.combine(parameters, projected, oracle.attend_loops(nsa, projected))


def oracle_logits(model, tokens):
    """The logits, in NumPy and float64, with the attention of the oracle."""
    nsa = oracle.Nsa(24, 2, 3, 8, 6, **SETTINGS)
    x = np.asarray(model.embedding.array, np.float64)[np.asarray(tokens.array)]
    layer = model.segments[0].stacked.layers[0]
    weights = [
        np.asarray(each.array, np.float64)
        for each in (layer.attention_norm.weight, layer.mlp_norm.weight, layer.mlp.gate_proj.weight,
                     layer.mlp.up_proj.weight, layer.mlp.down_proj.weight)
    ]  # fmt: skip
    for i, (first, second, gate, up, down) in enumerate(zip(*weights, strict=True)):
        x = x + attention(nsa, parameters_of(model, i), norm(x, first))
        normed = norm(x, second)
        gated = normed @ gate.T
        x = x + (gated / (1 + np.exp(-gated)) * (normed @ up.T)) @ down.T
    x = norm(x, model.norm.weight.array)
    return x @ np.asarray(model.lm_head.weight.array, np.float64).T


@pytest.mark.parametrize("method", SelectedMethod)
def test_logits_are_those_of_the_oracle(model, tokens, method):
    config = config_of()
    changed = with_selected_method(config.segments, method)
    assert selected_method(changed) is method
    like = DecoderConfig(**{**vars(config), "segments": changed}).build(Vocab, key=jax.random.PRNGKey(0))
    same = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(model))
    logits = np.asarray(hax.named_jit(lambda m, t: m(t))(same, tokens).rearrange((Batch, Pos, Vocab)).array)
    expected = oracle_logits(model, tokens)
    assert np.abs(logits - expected).max() < 2e-4 * np.abs(expected).max()


def test_checkpoint_round_trip(model):
    stored = model.to_state_dict()
    assert {name: array.shape for name, array in stored.items()} == expected_shapes(model)
    prefix = "model.layers.1.self_attn"
    assert stored[f"{prefix}.q_proj.weight"].shape == (48, 24)
    assert stored[f"{prefix}.gate_proj.weight"].shape == (18, 24)
    assert stored[f"{prefix}.k_compression.w1"].shape == (2, 8, 8, 16)
    own = parameters_of(model, 1)
    assert np.array_equal(stored[f"{prefix}.v_win_proj.weight"], own["v_win"].reshape(24, 12).T)
    assert np.array_equal(stored[f"{prefix}.o_proj.weight"], own["o"].reshape(36, 24).T)
    empty = jax.tree.map(jnp.zeros_like, model)
    read = empty.from_state_dict(stored)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(model), strict=True))


def test_a_sequence_without_batch(model, tokens):
    alone = model.activations(tokens[Batch, 1]).array
    assert np.abs(alone - model.activations(tokens)[Batch, 1].array).max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 4}, "num_experts 4"),
        ({"native_sparse_attention": None}, "native_sparse_attention is null; it must be a mapping"),
        ({"native_sparse_attention": {**SETTINGS, "selectd": 3}}, "has no key 'selectd'; did you mean 'selected'"),
        ({"native_sparse_attention": {**SETTINGS, "window": "10"}}, "window is '10'; it must be an integer"),
        ({"native_sparse_attention": {**SETTINGS, "compression": "max"}}, "compression is 'max'"),
        ({"native_sparse_attention": {**SETTINGS, "stride": 3}}, "block is 8; it must be a multiple of stride, 3"),
        ({"native_sparse_attention": {"block": 8, "stride": 4}}, "lacks selection_block, selected, window; add them"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "give rope_theta alone"),
        ({"attention_bias": True}, "attention_bias is True; it must be False"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4; it must be a divisor"),
    ],
)
def test_refused_keys(changes, words):
    with pytest.raises(ConfigError) as caught:
        config_of(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (AttentionMask.causal().with_segment_ids(hax.arange(Pos) // 20), "has documents (segment ids)"),
        (AttentionMask.causal(sliding_window=5), "must be causal, and nothing else"),
        (AttentionMask(), "must be causal, and nothing else"),
        (hax.named(jnp.tri(40) > 0, (Pos, Pos.alias("key_position"))), "must be causal, and nothing else"),
    ],
)
def test_refused_masks(model, tokens, mask, words):
    with pytest.raises(ConfigError) as caught:
        model.activations(tokens, mask)
    assert words in str(caught.value)


def test_flops_of_a_token():
    """As the sum over all arrays of a layer's matmuls, for the sizes of the oracle's tests."""
    config = config_of(num_hidden_layers=1, intermediate_size=8)
    heads, channels, context = 6, 8 + 6, 64
    projections = 24 * (heads * channels + 3 * 2 * channels + 3 * heads)
    compression = sum(8 * size * 2 * size + 2 * size * size for size in (8, 6)) * 2 // 4
    keys = (64 - 8) // 4 + 1 + 4 * 8 + 10
    attention = keys * heads * (2 * channels + 3)
    embedding, mlp = 24 * 64, 3 * 24 * 8
    counted = 2 * (projections + compression + embedding + mlp) + attention
    assert config.flops_per_token(64, context) == counted


def test_section_of_levanter(raises_message):
    """The section of a Levanter configuration has the method, and is read as it is written."""
    config = DecoderSection(hf_config=SIZES, selected_method="gathered_blocks")
    assert selected_method(config.segments) is SelectedMethod.GATHERED_BLOCKS
    text = draccus.dump(config)
    read = draccus.decode(LmConfig, json.loads(json.dumps(draccus.encode(config))))
    assert "selected_method: gathered_blocks" in text
    assert read == config
    dense = {name: value for name, value in SIZES.items() if name not in ("native_sparse_attention", "v_head_dim")}
    dense["model_type"] = "llama"
    with raises_message(ConfigError):
        DecoderSection(hf_config=dense, selected_method="dense_mask")


def test_the_registry_builds_it():
    model = build_model(dict(SIZES), 64)
    assert model.is_decoder
    assert model.config.total_trainable_params(64) == sum(x.size for x in jax.tree.leaves(model.template))
