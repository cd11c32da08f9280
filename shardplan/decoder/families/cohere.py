"""Cohere's Command R, R+ and A: attention and MLP in parallel after a shared norm, and scaled logits.

In Command A, three of four layers have a window, and the fourth has no rotary embeddings. Source: modelling code of
transformers; https://arxiv.org/abs/2504.00698.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    WINDOW_PERIOD,
    architecture,
    every,
    only,
    read_attention,
    read_gated_mlp,
    read_windows,
)
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import interleaved_layer_rules
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm, NormExtent
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.norm import NormConfig, NormKind


def read_cohere(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Command R or R+.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_cohere(ConfigKeys(read_config("command-r", None), "config.json"))
    >>> fields["segments"][0].layers[0].wiring.value, fields["logit_multiplier"]
    ('n = N(x); x += A(n) + M(n)', 0.0625)
    """
    norm, heads = _norm(keys), read_attention(keys)
    head_norm = HeadNorm(norm, NormExtent.EACH_HEAD) if keys.flag("use_qk_norm", default=False) else None
    attention = replace(heads, rotary=read_rotary(keys, heads.head_size, 500000.0), head_norm=head_norm)
    layer = LayerConfig(attention, read_gated_mlp(keys), norm, Wiring.PARALLEL_SHARED)
    return _architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm)


def read_cohere2(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Command A.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_cohere2(ConfigKeys(read_config("command-a", None), "config.json"))
    >>> attentions = [layer.attention for layer in fields["segments"][0].layers]
    >>> [(attention.window, attention.rotary is not None) for attention in attentions]
    [(4096, True), (4096, True), (4096, True), (None, False)]
    """
    only(
        keys,
        {
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
        },
    )
    keys.only("use_qk_norm", [False])
    keys.take("use_parallel_embedding", "layer_switch")  # a setting of training, and the period under another name
    norm, attention, mlp = _norm(keys), read_attention(keys), read_gated_mlp(keys)
    rotary = read_rotary(keys, attention.head_size)
    layers = []
    for window in read_windows(keys, every(keys.integer(*WINDOW_PERIOD, default=4)), 4096):
        with_window = replace(attention, rotary=None if window is None else rotary, window=window)
        layers.append(LayerConfig(with_window, mlp, norm, Wiring.PARALLEL_SHARED))
    return _architecture(keys, layers, norm)


def _norm(keys: ConfigKeys) -> NormConfig:
    return NormConfig(NormKind.LAYER, keys.number("layer_norm_eps", default=1e-5))


def _architecture(keys: ConfigKeys, layers: list[LayerConfig], norm: NormConfig) -> dict[str, Any]:
    multiplier = keys.number("logit_scale", default=0.0625)
    return architecture(keys, layers, norm, is_tied=True, positions=8192, logit_multiplier=multiplier)


COHERE = Family(read_cohere, interleaved_layer_rules)
COHERE2 = Family(read_cohere2, interleaved_layer_rules)
