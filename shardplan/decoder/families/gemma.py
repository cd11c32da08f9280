"""Gemma 1 to 3: wide heads, norms that multiply by weight + 1, and from Gemma 2 on windows in some layers.

Sources: https://arxiv.org/abs/2403.08295, https://arxiv.org/abs/2408.00118, https://arxiv.org/abs/2503.19786.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    WINDOW_PERIOD,
    architecture,
    every,
    read_attention,
    read_rms_norm,
    read_windows,
    with_windows,
)
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import standard_layer_rules
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig

HEAD_SIZE = 256
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
"""Names of GELU approximated by tanh."""


def read_gemma(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Gemma 1.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_gemma(ConfigKeys(read_config("gemma-7b", None), "config.json"))
    >>> fields["embed"], round(fields["embedding_multiplier"] ** 2), fields["norm"].is_around_one
    (3072, 3072, True)
    """
    heads, norm = read_attention(keys, HEAD_SIZE), read_rms_norm(keys, is_around_one=True)
    attention = replace(heads, rotary=read_rotary(keys, heads.head_size))
    # files of the first releases have gelu, but the models were trained with its approximation
    keys.only("hidden_act", ["gelu", *TANH_GELU])
    keys.only("hidden_activation", TANH_GELU)
    layer = LayerConfig(attention, MlpConfig(keys.integer("intermediate_size"), "gelu_tanh", is_gated=True), norm)
    return _architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm, 8192)


def read_gemma2(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Gemma 2: every second layer has a window.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_gemma2(ConfigKeys(read_config("gemma-2-9b", None), "config.json"))
    >>> [(layer.attention.window, layer.attention.soft_cap) for layer in fields["segments"][0].layers]
    [(4096, 50.0), (None, 50.0)]
    """
    layer = _read_sandwich(keys, 50.0)
    attention = replace(layer.grouped_attention, rotary=read_rotary(keys, layer.grouped_attention.head_size))
    layers = with_windows(replace(layer, attention=attention), read_windows(keys, every(2), 4096))
    soft_cap = keys.number_or_null("final_logit_softcapping", 30.0)
    return _architecture(keys, layers, layer.norm, 8192, logit_soft_cap=soft_cap)


def read_gemma3(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Gemma 3: five of six layers have a window.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_gemma3(ConfigKeys(read_config("gemma-3-27b", None), "config.json"))
    >>> [(segment.repeats, len(segment.layers)) for segment in fields["segments"]]
    [(10, 6), (2, 1)]
    >>> [layer.attention.window for layer in fields["segments"][0].layers]
    [1024, 1024, 1024, 1024, 1024, None]
    """
    layer = _read_sandwich(keys, None)
    size = layer.grouped_attention.head_size
    # a scaling in the form of transformers 4 is for the layers without a window alone
    full = read_rotary(keys, size, 1e6, layer_type=FULL)
    sliding = read_rotary(keys, size, layer_type=SLIDING, theta_keys=("rope_local_base_freq",), is_scaled=False)
    layers = []
    for window in read_windows(keys, every(keys.integer(*WINDOW_PERIOD, default=6)), 4096):
        rotary = full if window is None else sliding
        attention = replace(layer.grouped_attention, rotary=rotary, head_norm=HeadNorm(layer.norm), window=window)
        layers.append(replace(layer, attention=attention))
    soft_cap = keys.number_or_null("final_logit_softcapping", None)
    return _architecture(keys, layers, layer.norm, 131072, logit_soft_cap=soft_cap)


def _read_sandwich(keys: ConfigKeys, soft_cap: float | None) -> LayerConfig:
    """Read a layer of Gemma 2 or 3; the caller adds rotary embeddings and the window.

    Args:
        soft_cap: default bound of scores.
    """
    keys.only("use_bidirectional_attention", [False])
    attention = replace(
        read_attention(keys, HEAD_SIZE, 4),
        scale=keys.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        soft_cap=keys.number_or_null("attn_logit_softcapping", soft_cap),
    )
    activation = keys.choice("hidden_activation", "hidden_act", choices=ACTIVATIONS, default="gelu_pytorch_tanh")
    keys.take("hidden_act")  # it is ignored if both are given
    mlp = MlpConfig(keys.integer("intermediate_size"), activation, is_gated=True)
    return LayerConfig(attention, mlp, read_rms_norm(keys, is_around_one=True), Wiring.SANDWICH)


def _architecture(
    keys: ConfigKeys, layers: list[LayerConfig], norm: NormConfig, positions: int, **more: Any
) -> dict[str, Any]:
    """Return the fields of an `Architecture`; `positions` is the default of `max_position_embeddings`."""
    multiplier = keys.integer("hidden_size") ** 0.5
    return architecture(keys, layers, norm, is_tied=True, positions=positions, embedding_multiplier=multiplier, **more)


GEMMA = Family(read_gemma, standard_layer_rules)
GEMMA2 = Family(read_gemma2, standard_layer_rules)
GEMMA3 = Family(read_gemma3, standard_layer_rules)
