"""dots.llm1: Qwen 3's attention, and experts chosen as in DeepSeek V3 behind its first layers.

Source: https://arxiv.org/abs/2506.05767, and modelling code of transformers.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.expert_keys import (
    ExpertDefaults,
    read_experts,
    read_kinds_of_mlp,
    read_mlps,
    read_router,
)
from shardplan.decoder.families.common.expert_rules import expert_layer_rules
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, read_attention, read_rms_norm, read_windows
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.router import Scoring

DEFAULTS = ExpertDefaults(experts=None, per_token=None, size=1408, shared=None, scale=1.0)


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("dots.llm1", None), "config.json"))
    >>> [(segment.repeats, type(segment.layers[0].mlp).__name__) for segment in fields["segments"]]
    [(1, 'MlpConfig'), (61, 'ExpertsConfig')]
    """
    keys.only("scoring_func", ["noaux_tc", "sigmoid"])  # the releases name the choice of experts here
    keys.only("topk_method", ["noaux_tc"])
    norm = read_rms_norm(keys)
    heads = replace(read_attention(keys), head_norm=HeadNorm(norm))
    attention = replace(heads, rotary=read_rotary(keys, heads.head_size))
    first = keys.integer("max_window_layers", default=62, least=0)
    has_windows = not keys.is_null("sliding_window")
    windows = read_windows(keys, lambda i: not has_windows or i < first, 4096)
    is_normalised = keys.flag("norm_topk_prob", default=False)
    router = read_router(
        keys, DEFAULTS, Scoring.SIGMOID, best_of_group=2, has_correction=True, is_normalised=is_normalised
    )
    mlps = read_mlps(keys, read_experts(keys, DEFAULTS, router), read_kinds_of_mlp(keys, 0))
    layers = []
    for mlp, window in zip(mlps, windows, strict=True):
        layers.append(LayerConfig(replace(attention, window=window), mlp, norm))
    return architecture(keys, layers, norm)


FAMILY = Family(read, expert_layer_rules)
