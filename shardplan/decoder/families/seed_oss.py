"""Seed-OSS: Llama with biases of queries, keys and values. Source: modelling code of transformers."""

from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, read_gated_mlp, read_heads, read_rms_norm
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import standard_layer_rules
from shardplan.decoder.parts.block import LayerConfig


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("seed-oss-36b", None), "config.json"))
    >>> attention = fields["segments"][0].layers[0].attention
    >>> attention.has_bias, attention.has_output_bias
    (True, False)
    """
    heads, norm = read_heads(keys, 128, 8), read_rms_norm(keys)
    attention = replace(
        heads,
        rotary=read_rotary(keys, heads.head_size),
        has_bias=keys.flag("attention_bias", default=True),
        has_output_bias=keys.flag("attention_out_bias", default=False),
    )
    layer = LayerConfig(attention, read_gated_mlp(keys, keys.flag("mlp_bias", default=False)), norm)
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm, positions=524288)


FAMILY = Family(read, standard_layer_rules)
