"""StarCoder2: layer norms, biases, and ungated MLPs. Source: https://arxiv.org/abs/2402.19173."""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import ACTIVATIONS, architecture, read_heads
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import Rules, attention_rules, layer_norm_rules, mlp_rules
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig, NormKind


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> layer = read(ConfigKeys(read_config("starcoder2-3b", None), "config.json"))["segments"][0].layers[0]
    >>> layer.attention.window, layer.attention.has_bias, layer.mlp.is_gated
    (4096, True, False)
    """
    keys.only("mlp_type", ["default"])
    keys.only("norm_type", ["layer_norm"])
    keys.only("scale_attn_weights", [True])
    # transformers ignores these other names of keys below, and these keys for the dtype of scores
    keys.take("activation_function", "layer_norm_epsilon")
    keys.take("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    heads = read_heads(keys, kv_heads=2)
    norm = NormConfig(NormKind.LAYER, keys.number("norm_epsilon", default=1e-5), has_bias=True)
    bias = keys.flag("use_bias", default=True)
    activation = keys.choice("hidden_act", choices=ACTIVATIONS, default="gelu_pytorch_tanh")
    mlp = MlpConfig(keys.integer("intermediate_size"), activation, has_bias=bias)
    attention = replace(
        heads,
        rotary=read_rotary(keys, heads.head_size),
        has_bias=bias,
        has_output_bias=bias,
        window=keys.integer_or_null("sliding_window", None),
    )
    layers = [LayerConfig(attention, mlp, norm)] * keys.integer("num_hidden_layers")
    return architecture(keys, layers, norm, is_tied=True, positions=4096)


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("starcoder2-3b", None))
    >>> rules = layer_rules(config, config.segments[0].layers[0], 0)
    >>> [rules[f"mlp.{part}.weight"].name for part in ("up_proj", "down_proj")]
    ['model.layers.0.mlp.c_fc.weight', 'model.layers.0.mlp.c_proj.weight']
    """
    at, embed = f"model.layers.{index}", config.embed
    return {
        **attention_rules(layer.grouped_attention, f"{at}.self_attn", embed),
        **mlp_rules(layer.dense_mlp, f"{at}.mlp", embed, ("", "c_fc", "c_proj")),
        **layer_norm_rules(layer, at, embed),
    }


FAMILY = Family(read, layer_rules)
