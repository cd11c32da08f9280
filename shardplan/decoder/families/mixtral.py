"""Mixtral: Mistral with experts in place of its MLPs. Source: https://arxiv.org/abs/2401.04088."""

from dataclasses import replace
from functools import partial
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.expert_keys import gated_experts, read_counts
from shardplan.decoder.families.common.expert_rules import ExpertNames, expert_layer_rules
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, read_heads, read_rms_norm, read_uniform_window
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.router import RouterConfig, Scoring

NAMES = ExpertNames(projections=("w1", "w3", "w2"))


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> mlp = read(ConfigKeys(read_config("mixtral-8x7b", None), "config.json"))["segments"][0].layers[0].mlp
    >>> mlp.router.experts, mlp.router.experts_per_token, mlp.router.scoring.value, mlp.size
    (8, 2, 'softmax over the chosen experts', 14336)
    """
    heads, norm = read_heads(keys, kv_heads=8), read_rms_norm(keys, 1e-5)
    rotary = read_rotary(keys, heads.head_size, 1e6)
    attention = replace(heads, rotary=rotary, window=read_uniform_window(keys, None))
    experts, per_token = read_counts(keys, ("num_local_experts", "num_experts"), ("num_experts_per_tok",), (8, 2))
    router = RouterConfig(experts, per_token, Scoring.SOFTMAX_OF_CHOSEN, is_normalised=False)
    mlp = gated_experts(keys, router, keys.integer("intermediate_size"))
    layers = [LayerConfig(attention, mlp, norm)] * keys.integer("num_hidden_layers")
    return architecture(keys, layers, norm, positions=131072)


FAMILY = Family(read, partial(expert_layer_rules, names=NAMES, mlp="block_sparse_moe"))
