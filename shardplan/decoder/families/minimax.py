"""MiniMax M2: norms of queries and keys over all heads, a part of each head is rotated, and experts in all layers.

Source: modelling code of transformers.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.expert_keys import gated_experts, read_counts
from shardplan.decoder.families.common.expert_rules import ExpertNames, expert_layer_rules
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, only, read_heads, read_rms_norm
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm, NormExtent
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.router import RouterConfig, Scoring

NAMES = ExpertNames(correction="e_score_correction_bias", projections=("w1", "w3", "w2"))
ONLY = {
    "layernorm_full_attention_alpha": 1.0, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_alpha": 1.0,
    "layernorm_mlp_beta": 1.0, "postnorm": False, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "use_qk_norm": True, "use_routing_bias": True,
}  # fmt: skip
"""Key -> the only value that the decoder supports."""
UNUSED = ("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp")
"""Unused keys: they are about parts that no layer has, or about additional heads."""


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("minimax-m2", None), "config.json"))
    >>> attention = fields["segments"][0].layers[0].attention
    >>> attention.head_norm.extent.name, attention.head_size, 2 * attention.rotary.frequencies.pairs
    ('ALL_HEADS', 128, 64)
    """
    only(keys, ONLY)
    keys.take(*UNUSED)
    layers = keys.integer("num_hidden_layers")
    kinds = keys.take("attn_type_list", default=[1] * layers)
    if kinds != [1] * layers:
        keys.refuse("attn_type_list", kinds, f"{layers} times 1, for layers without linear attention")
    heads, norm = read_heads(keys, 128, 8), read_rms_norm(keys)
    rotated = keys.integer("rotary_dim", default=heads.head_size)
    attention = replace(
        heads,
        rotary=read_rotary(keys, heads.head_size, 5e6, partial=rotated / heads.head_size),
        head_norm=HeadNorm(norm, NormExtent.ALL_HEADS),
    )
    experts, per_token = read_counts(keys, ("num_local_experts", "num_experts"), ("num_experts_per_tok",), (256, 8))
    router = RouterConfig(experts, per_token, Scoring.SIGMOID, has_correction=True)
    mlp = gated_experts(keys, router, keys.integer("intermediate_size", default=1536))
    return architecture(keys, [LayerConfig(attention, mlp, norm)] * layers, norm, positions=196608)


FAMILY = Family(read, partial(expert_layer_rules, names=NAMES, mlp="block_sparse_moe"))
