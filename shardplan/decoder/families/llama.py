"""Llama 2 to 3.3, and the many models with the same architecture. Source: https://arxiv.org/abs/2407.21783."""

from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, read_attention, read_gated_mlp, read_rms_norm
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import standard_layer_rules
from shardplan.decoder.parts.block import LayerConfig


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> keys = {
    ...     "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    ...     "intermediate_size": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    ... }
    >>> fields = read(ConfigKeys(keys, "config.json"))
    >>> fields["segments"][0].repeats, fields["segments"][0].layers[0].mlp.size
    (2, 128)
    """
    attention, norm = read_attention(keys), read_rms_norm(keys)
    attention = replace(attention, rotary=read_rotary(keys, attention.head_size))
    layer = LayerConfig(attention, read_gated_mlp(keys, keys.flag("mlp_bias", default=False)), norm)
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm)


FAMILY = Family(read, standard_layer_rules)
