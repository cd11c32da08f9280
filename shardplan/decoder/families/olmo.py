"""OLMo 2 and 3, and OLMoE: norms of queries and keys over all heads.

OLMo 2 and 3 have norms behind attention and MLP; OLMo 3 has windows in three of four layers; OLMoE has experts in place
of its MLPs. Sources: https://arxiv.org/abs/2501.00656, https://arxiv.org/abs/2409.02060.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.expert_keys import gated_experts, read_counts
from shardplan.decoder.families.common.expert_rules import expert_layer_rules
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    FULL,
    SLIDING,
    architecture,
    every,
    read_attention,
    read_gated_mlp,
    read_rms_norm,
    read_windows,
)
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import standard_layer_rules
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm, NormExtent
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.mlp.router import RouterConfig

THETA = 500000.0


def read_olmo2(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of OLMo 2.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> layer = read_olmo2(ConfigKeys(read_config("olmo2-7b", None), "config.json"))["segments"][0].layers[0]
    >>> layer.wiring.value, layer.attention.head_norm.extent.value
    ('x += N(A(x)); x += N(M(x))', 'the channels of all heads')
    """
    layer = _read_layer(keys)
    attention = replace(layer.grouped_attention, rotary=read_rotary(keys, layer.grouped_attention.head_size))
    layers = [replace(layer, attention=attention)] * keys.integer("num_hidden_layers")
    return architecture(keys, layers, layer.norm)


def read_olmo3(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of OLMo 3.

    As in transformers, a scaling and a base at the top level hold only for layers without a window.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> layers = read_olmo3(ConfigKeys(read_config("olmo-3-7b", None), "config.json"))["segments"][0].layers
    >>> [layer.attention.window for layer in layers]
    [4096, 4096, 4096, None]
    """
    layer = _read_layer(keys)
    size = layer.grouped_attention.head_size
    full = read_rotary(keys, size, THETA, layer_type=FULL)
    sliding = read_rotary(keys, size, THETA, layer_type=SLIDING, theta_keys=(), is_scaled=False)
    layers = []
    for window in read_windows(keys, every(4), 4096):
        rotary = full if window is None else sliding
        layers.append(replace(layer, attention=replace(layer.grouped_attention, rotary=rotary, window=window)))
    return architecture(keys, layers, layer.norm)


def read_olmoe(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of OLMoE, whose releases clip nothing.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> mlp = read_olmoe(ConfigKeys(read_config("olmoe-1b-7b", None), "config.json"))["segments"][0].layers[0].mlp
    >>> mlp.router.experts, mlp.router.experts_per_token, mlp.router.is_normalised
    (64, 8, False)
    """
    clip = keys.take("clip_qkv")
    if clip is not None:
        keys.refuse("clip_qkv", clip, "null: queries, keys and values are not clipped")
    norm = read_rms_norm(keys, 1e-5)
    heads = replace(read_attention(keys), head_norm=HeadNorm(norm, NormExtent.ALL_HEADS))
    attention = replace(heads, rotary=read_rotary(keys, heads.head_size))
    experts, per_token = read_counts(keys, ("num_experts", "num_local_experts"), ("num_experts_per_tok",), (64, 8))
    router = RouterConfig(experts, per_token, is_normalised=keys.flag("norm_topk_prob", default=False))
    mlp = gated_experts(keys, router, keys.integer("intermediate_size", default=2048))
    layers = [LayerConfig(attention, mlp, norm)] * keys.integer("num_hidden_layers")
    return architecture(keys, layers, norm, positions=4096)


def _read_layer(keys: ConfigKeys) -> LayerConfig:
    """Read a layer; the caller adds rotary embeddings and the window."""
    norm = read_rms_norm(keys, 1e-5)
    attention = replace(read_attention(keys), head_norm=HeadNorm(norm, NormExtent.ALL_HEADS))
    return LayerConfig(attention, read_gated_mlp(keys), norm, Wiring.POST)


OLMO2 = Family(read_olmo2, standard_layer_rules)
OLMO3 = Family(read_olmo3, standard_layer_rules)
OLMOE = Family(read_olmoe, expert_layer_rules)
