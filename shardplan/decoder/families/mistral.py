"""Mistral and Ministral 3: all layers have the same window, or none. Source: https://arxiv.org/abs/2310.06825."""

from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    architecture,
    read_gated_mlp,
    read_heads,
    read_rms_norm,
    read_uniform_window,
)
from shardplan.decoder.families.common.rotary_keys import read_rotary, read_temperature, require_rope
from shardplan.decoder.families.common.rules import standard_layer_rules
from shardplan.decoder.parts.block import LayerConfig


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Mistral.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> releases = [read(ConfigKeys(read_config(f"mistral-7b-{n}", None), "config.json")) for n in ("v0.1", "v0.3")]
    >>> [fields["segments"][0].layers[0].attention.window for fields in releases]
    [4096, None]
    """
    heads, norm = read_heads(keys, kv_heads=8), read_rms_norm(keys)
    window = read_uniform_window(keys, 4096)
    attention = replace(heads, rotary=read_rotary(keys, heads.head_size), window=window)
    layer = LayerConfig(attention, read_gated_mlp(keys), norm)
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm, positions=131072)


def read_ministral3(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Ministral 3: queries grow with their position.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_ministral3(ConfigKeys(read_config("ministral-3-8b", None), "config.json"))
    >>> fields["segments"][0].layers[0].attention.temperature
    QueryTemperature(beta=0.1, positions=16384, first=0)
    """
    require_rope(keys)
    heads, norm = read_heads(keys, 128, 8), read_rms_norm(keys, 1e-5)
    attention = replace(
        heads,
        rotary=read_rotary(keys, heads.head_size, has_temperature=True),
        temperature=read_temperature(keys),
        window=read_uniform_window(keys, None),
    )
    layer = LayerConfig(attention, read_gated_mlp(keys), norm)
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm, positions=262144)


FAMILY = Family(read, standard_layer_rules)
MINISTRAL3 = Family(read_ministral3, standard_layer_rules)
