"""Phi-3, Phi-3.5 and Phi-4: one tensor for queries, keys and values, and LongRoPE in models for long texts.

Source: https://arxiv.org/abs/2404.14219.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    architecture,
    only,
    read_gated_mlp,
    read_heads,
    read_rms_norm,
)  # fmt: skip
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import Rules, gate_and_up_rules, layer_norm_rules, linear_rules
from shardplan.decoder.names import Sliced, StoredTensor
from shardplan.decoder.parts.block import LayerConfig


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("phi-3.5-mini", None), "config.json"))
    >>> frequencies = fields["segments"][0].layers[0].attention.rotary.frequencies
    >>> fields["max_seq_len"], frequencies.original_positions, round(frequencies.magnitude, 2)
    (131072, 4096, 1.19)
    """
    only(
        keys,
        {
            "attention_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
        },
    )
    heads, norm = read_heads(keys), read_rms_norm(keys, 1e-5)
    rotary, window = read_rotary(keys, heads.head_size, partial=1.0), keys.integer_or_null("sliding_window", None)
    layer = LayerConfig(replace(heads, rotary=rotary, window=window), read_gated_mlp(keys), norm)
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm, positions=4096)


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("phi-4", None))
    >>> rules = layer_rules(config, config.segments[0].layers[0], 0)
    >>> [(rules[f"self_attn.{part}_proj.weight"].start, rules[f"self_attn.{part}_proj.weight"].stop) for part in "qkv"]
    [(0, 5120), (5120, 6400), (6400, 7680)]
    """
    at, attention, embed = f"model.layers.{index}", layer.grouped_attention, config.embed
    queries, keys = attention.heads * attention.head_size, attention.kv_heads * attention.head_size
    joint = StoredTensor(f"{at}.self_attn.qkv_proj.weight", (queries + 2 * keys, embed))
    return {
        "self_attn.q_proj.weight": Sliced(joint, 0, 0, queries),
        "self_attn.k_proj.weight": Sliced(joint, 0, queries, queries + keys),
        "self_attn.v_proj.weight": Sliced(joint, 0, queries + keys, queries + 2 * keys),
        **linear_rules("self_attn.o_proj", f"{at}.self_attn.o_proj", embed, queries, has_bias=False),
        **gate_and_up_rules(layer.dense_mlp, f"{at}.mlp.gate_up_proj", embed),
        **linear_rules("mlp.down_proj", f"{at}.mlp.down_proj", embed, layer.dense_mlp.size, has_bias=False),
        **layer_norm_rules(layer, at, embed),
    }


FAMILY = Family(read, layer_rules)
