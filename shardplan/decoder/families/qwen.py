"""Qwen 2, 2.5 and 3: biases of queries, keys and values up to Qwen 2.5, and norms of queries and keys in Qwen 3.

Sources: https://arxiv.org/abs/2407.10671, https://arxiv.org/abs/2505.09388.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    SLIDING,
    architecture,
    read_attention,
    read_gated_mlp,
    read_heads,
    read_rms_norm,
    read_windows,
    with_windows,
)
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import standard_layer_rules
from shardplan.decoder.parts.attention import GroupedAttention, HeadNorm
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.norm import NormConfig


def read_qwen2(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Qwen 2: queries, keys and values have biases."""
    return _read(keys, replace(read_heads(keys), has_bias=True), read_rms_norm(keys))


def read_qwen3(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Qwen 3: queries and keys are normalised."""
    norm = read_rms_norm(keys)
    return _read(keys, replace(read_attention(keys, 128), head_norm=HeadNorm(norm)), norm)


def _read(keys: ConfigKeys, attention: GroupedAttention, norm: NormConfig) -> dict[str, Any]:
    attention = replace(attention, rotary=read_rotary(keys, attention.head_size))
    layer = LayerConfig(attention, read_gated_mlp(keys), norm)
    # a file may give the size of windows that it does not use
    uses_windows = keys.flag("use_sliding_window", default=False) and not keys.is_null("sliding_window")
    if not uses_windows and SLIDING in (keys.take("layer_types") or ()):
        keys.refuse("layer_types", keys.take("layer_types"), f"without {SLIDING}, as windows are not used")
    first = keys.integer("max_window_layers", default=28, least=0)
    windows = read_windows(keys, lambda i: not uses_windows or i < first, 4096)
    return architecture(keys, with_windows(layer, windows), norm, positions=32768)


QWEN2 = Family(read_qwen2, standard_layer_rules)
QWEN3 = Family(read_qwen3, standard_layer_rules)
