"""FLOPs and parameters that Levanter's trainer asks for, against counts of what models compute and hold."""

import dataclasses
import math

import haliax as hax
import jax
import pytest
from decoder_families import CONSTANTS, FAMILIES, ON_ONE_DEVICE, config_of, saved_tensors
from levanter.layers.attention import AttentionBackend

from shardplan.decoder.config import DecoderConfig
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import abstract_module, build_model

SHORT, LONG, WINDOW = 4, 48, 8
"""Tokens of texts: fewer than the windows of these families have, and more."""
HEAD_KEYS, LAYER_KEYS = ("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer")


def matmul_flops(jaxpr):
    """Count the FLOPs of all matmuls of a program; those of a loop as often as it runs.

    Rows of experts, sorted by expert, are one matmul, and further rounds of them are in a loop of unknown length.
    """
    flops = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[d] for d in contracted)
            flops += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        if equation.primitive.name == "ragged_dot_general":  # each row is multiplied by the matrix of one group
            flops += 2 * equation.invars[0].aval.shape[-1] * math.prod(equation.outvars[0].aval.shape)
        for name in ("jaxpr", "call_jaxpr"):
            inside = equation.params.get(name)
            if inside is not None:
                flops += equation.params.get("length", 1) * matmul_flops(getattr(inside, "jaxpr", inside))
    return flops


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.whole] if i % 4 else [])
        for i, name in enumerate([*FAMILIES, *ON_ONE_DEVICE])
    ],
)
def test_flops_are_those_of_the_matmuls_of_a_forward_pass(name):
    """Of texts that are shorter than the windows; Levanter counts three more for each score, for mask and softmax.

    Its kernels compute channels of zeros where values have fewer than keys, or more, which are not counted.
    """
    values = config_of(name)
    config = DecoderConfig.from_hf_config(values)
    config = dataclasses.replace(config, attn_backend=AttentionBackend.VANILLA, gradient_checkpointing=False)
    model = abstract_module(config, hax.Axis("vocab", values["vocab_size"]))
    tokens = hax.NamedArray(jax.ShapeDtypeStruct((SHORT,), "int32"), (hax.Axis("position", SHORT),))
    matmuls = matmul_flops(jax.make_jaxpr(lambda model, tokens: model(tokens))(model, tokens).jaxpr)
    heads, layers = (next(values[key] for key in keys if key in values) for keys in (HEAD_KEYS, LAYER_KEYS))
    if values["model_type"] == "gpt_oss":  # Levanter's plain attention has its sinks as one more key of each head
        matmuls -= 4 * SHORT * values["head_dim"] * heads * layers
    sizes = [values.get(key, 0) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    zeros = 2 * abs(sizes[0] + sizes[1] - sizes[2])
    expected = matmuls + (3 - zeros) * SHORT**2 * heads * layers
    assert config.flops_per_token(values["vocab_size"], SHORT) * SHORT == expected


@pytest.mark.parametrize(
    ("name", "windowed"),
    [("cohere2", 4), ("exaone4", 4), ("gemma3_text", 7), ("gpt_neox", 0), ("gpt_oss", 2), ("olmo3", 3)],
)
def test_flops_of_windows_are_those_of_the_keys_within(name, windowed):
    """A layer with a window has as much attention for longer texts as for texts of the window's length."""
    values = config_of(name)
    config = DecoderConfig.from_hf_config(values)
    layer = config.segments[0].layers[0].attention
    growth = config.flops_per_token(100, LONG) - config.flops_per_token(100, WINDOW)
    unwindowed = values["num_hidden_layers"] - windowed
    assert growth == unwindowed * (LONG - WINDOW) * layer.heads * (4 * layer.head_size + 3)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b"])
def test_a_model_is_counted_as_levanter_counts_it(name):
    config, levanter = (build_model(read_config(name, None, kind), 2048).config for kind in (None, LEVANTER))
    for length in (2048, 8192):
        assert config.flops_per_token(128256, length) == levanter.flops_per_token(128256, length)
    assert config.total_trainable_params(128256) == levanter.total_trainable_params(128256)


@pytest.mark.parametrize(
    "name", ["apertus", "cohere2", "gemma3_text", "glm4_moe", "gpt_neox", "opt_350m", "stablelm_12b"]
)
def test_parameters_are_those_of_the_checkpoint(name):
    values = config_of(name)
    stored = {key: tensor for key, tensor in saved_tensors(name).items() if not key.endswith(CONSTANTS)}
    expected = sum(tensor.size for tensor in stored.values())
    assert DecoderConfig.from_hf_config(values).total_trainable_params(values["vocab_size"]) == expected
