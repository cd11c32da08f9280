"""SmolLM3: Llama without rotary embeddings in every fourth layer. Source: https://huggingface.co/blog/smollm3."""

from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    SLIDING,
    architecture,
    read_attention,
    read_gated_mlp,
    read_rms_norm,
    read_windows,
)
from shardplan.decoder.families.common.rotary_keys import read_rotary, read_rotated_layers
from shardplan.decoder.families.common.rules import standard_layer_rules
from shardplan.decoder.parts.block import LayerConfig


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("smollm3-3b", None), "config.json"))
    >>> [layer.attention.rotary is not None for layer in fields["segments"][0].layers]
    [True, True, True, False]
    """
    attention, norm = read_attention(keys, kv_heads=4), read_rms_norm(keys)
    rotary = read_rotary(keys, attention.head_size, 2e6)
    mlp = read_gated_mlp(keys, keys.flag("mlp_bias", default=False))
    has_rotary = read_rotated_layers(keys)
    uses_windows = keys.flag("use_sliding_window", default=False) and not keys.is_null("sliding_window")
    if not uses_windows and SLIDING in (keys.take("layer_types") or ()):
        keys.refuse("layer_types", keys.take("layer_types"), f"without {SLIDING}, as windows are not used")
    keys.take("max_window_layers")  # a leftover of Qwen's files, which SmolLM3 does not read
    # layers with rotary embeddings attend to all positions
    windows = read_windows(keys, lambda i: not uses_windows or has_rotary[i])

    layers = []
    for window, is_rotated in zip(windows, has_rotary, strict=True):
        of_layer = replace(attention, rotary=rotary if is_rotated else None, window=window)
        layers.append(LayerConfig(of_layer, mlp, norm))
    return architecture(keys, layers, norm, is_tied=True, positions=32768)


FAMILY = Family(read, standard_layer_rules)
