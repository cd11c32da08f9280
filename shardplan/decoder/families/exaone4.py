"""EXAONE 4: norms after attention and MLP; if some layers have windows, the others have no rotary embeddings.

Source: https://arxiv.org/abs/2507.11407.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    architecture,
    every,
    read_gated_mlp,
    read_heads,
    read_rms_norm,
    read_windows,
)
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import standard_layer_rules
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm
from shardplan.decoder.parts.block import LayerConfig, Wiring


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("exaone-4.0-32b", None), "config.json"))
    >>> attentions = [layer.attention for layer in fields["segments"][0].layers]
    >>> [(attention.window, attention.rotary is not None) for attention in attentions]
    [(4096, True), (4096, True), (4096, True), (None, False)]
    """
    norm, mlp = read_rms_norm(keys, 1e-5), read_gated_mlp(keys)
    attention = replace(read_heads(keys), head_norm=HeadNorm(norm))
    rotary = read_rotary(keys, attention.head_size)
    has_windows = not keys.is_null("sliding_window")
    is_full = _read_pattern(keys) if has_windows else every(1)
    keys.take("sliding_window_pattern")  # it has no meaning without windows
    layers = []
    for window in read_windows(keys, is_full, 4096):
        is_rotated = window is not None or not has_windows
        of_layer = replace(attention, rotary=rotary if is_rotated else None, window=window)
        layers.append(LayerConfig(of_layer, mlp, norm, Wiring.POST))
    return architecture(keys, layers, norm)


def _read_pattern(keys: ConfigKeys) -> Callable[[int], bool]:
    """Read which layers have no window, from a number n (every n-th layer) or the G's in a pattern such as LLLG."""
    pattern = keys.take("sliding_window_pattern", default=4)
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        return lambda layer: pattern[layer % len(pattern)] == "G"
    return every(keys.integer("sliding_window_pattern", default=4))


FAMILY = Family(read, standard_layer_rules)
