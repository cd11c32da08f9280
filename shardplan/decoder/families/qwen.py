"""Qwen 2, 2.5 and 3, and Qwen 3 with experts in place of most or all of its MLPs.

Sources: https://arxiv.org/abs/2407.10671, https://arxiv.org/abs/2505.09388.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.expert_keys import gated_experts, read_counts, read_mlps
from shardplan.decoder.families.common.expert_rules import expert_layer_rules
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    SLIDING,
    architecture,
    every,
    read_attention,
    read_gated_mlp,
    read_heads,
    read_rms_norm,
    read_windows,
    with_windows,
)
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import standard_layer_rules
from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention, HeadNorm
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.router import RouterConfig
from shardplan.decoder.parts.norm import NormConfig


def read_qwen2(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Qwen 2: queries, keys and values have biases.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> layer = read_qwen2(ConfigKeys(read_config("qwen2.5-7b", None), "config.json"))["segments"][0].layers[0]
    >>> layer.attention.has_bias, layer.attention.has_output_bias
    (True, False)
    """
    return _read(keys, replace(read_heads(keys), has_bias=True), read_rms_norm(keys))


def read_qwen3(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Qwen 3: queries and keys are normalised.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> layer = read_qwen3(ConfigKeys(read_config("qwen3-8b", None), "config.json"))["segments"][0].layers[0]
    >>> layer.attention.has_bias, layer.attention.head_norm.extent.value
    (False, 'the channels of a head; all heads have the same weights')
    """
    norm = read_rms_norm(keys)
    return _read(keys, replace(read_attention(keys, 128), head_norm=HeadNorm(norm)), norm)


def read_qwen3_moe(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Qwen 3 with experts; all layers have the window.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_qwen3_moe(ConfigKeys(read_config("qwen3-30b-a3b", None), "config.json"))
    >>> mlp = fields["segments"][0].layers[0].mlp
    >>> mlp.router.experts, mlp.router.experts_per_token, mlp.size, mlp.shared
    (128, 8, 768, None)
    """
    norm = read_rms_norm(keys)
    heads = replace(read_attention(keys, kv_heads=4), head_norm=HeadNorm(norm))
    window = None
    if keys.flag("use_sliding_window", default=False):
        window = keys.integer_or_null("sliding_window", 4096)
    else:
        keys.take("sliding_window", "max_window_layers")
    attention = replace(heads, rotary=read_rotary(keys, heads.head_size), window=window)
    experts, per_token = read_counts(keys, ("num_experts", "num_local_experts"), ("num_experts_per_tok",), (128, 8))
    router = RouterConfig(experts, per_token, is_normalised=keys.flag("norm_topk_prob", default=False))
    mlp = gated_experts(keys, router, keys.integer("moe_intermediate_size", default=768))
    layers = [LayerConfig(attention, each, norm) for each in read_mlps(keys, mlp, _read_kinds_of_mlp(keys))]
    return architecture(keys, layers, norm, positions=32768)


def _read_kinds_of_mlp(keys: ConfigKeys) -> list[bool]:
    """Read, for every layer, whether it has experts."""
    layers, period = keys.integer("num_hidden_layers"), keys.integer("decoder_sparse_step", default=1)
    dense = keys.take("mlp_only_layers", default=[])
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        keys.refuse("mlp_only_layers", dense, "a list of numbers of layers")
    is_last = every(period)
    return [is_last(i) and i not in dense for i in range(layers)]


def _read(keys: ConfigKeys, attention: GroupedAttention, norm: NormConfig) -> dict[str, Any]:
    attention = replace(attention, rotary=read_rotary(keys, attention.head_size))
    layer = LayerConfig(attention, read_gated_mlp(keys), norm)
    # a file may give the size of windows that it does not use
    uses_windows = keys.flag("use_sliding_window", default=False) and not keys.is_null("sliding_window")
    if not uses_windows and SLIDING in (keys.take("layer_types") or ()):
        keys.refuse("layer_types", keys.take("layer_types"), f"without {SLIDING}, as windows are not used")
    # the number of layers without a window, whatever its name says: transformers gives a window to all after them
    first = keys.integer("max_window_layers", default=28, least=0)
    windows = read_windows(keys, lambda i: not uses_windows or i < first, 4096)
    return architecture(keys, with_windows(layer, windows), norm, positions=32768)


QWEN2 = Family(read_qwen2, standard_layer_rules)
QWEN3 = Family(read_qwen3, standard_layer_rules)
QWEN3_MOE = Family(read_qwen3_moe, expert_layer_rules)
