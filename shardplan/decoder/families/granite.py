"""Granite 3: Llama with multipliers of embeddings, scores, residuals and logits.

Source: modelling code of transformers.
"""

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

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("granite-3.1-8b", None), "config.json"))
    >>> layer = fields["segments"][0].layers[0]
    >>> fields["embedding_multiplier"], layer.attention.scale, layer.residual_multiplier, fields["logit_multiplier"]
    (12.0, 0.0078125, 0.22, 0.0625)
    """
    attention, norm = read_attention(keys), read_rms_norm(keys)
    scale = keys.number("attention_multiplier", default=1.0)
    attention = replace(attention, rotary=read_rotary(keys, attention.head_size), scale=scale)
    mlp = read_gated_mlp(keys, keys.flag("mlp_bias", default=False))
    layer = LayerConfig(attention, mlp, norm, residual_multiplier=keys.number("residual_multiplier", default=1.0))
    return architecture(
        keys,
        [layer] * keys.integer("num_hidden_layers"),
        norm,
        embedding_multiplier=keys.number("embedding_multiplier", default=1.0),
        logit_multiplier=1.0 / keys.number("logits_scaling", default=1.0),  # the key is a divisor
    )


FAMILY = Family(read, standard_layer_rules)
