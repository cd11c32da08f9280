"""DeepSeek V2 to V3.2, R1 and Kimi K2: latent attention, and routed experts beside shared ones.

Moonlight is a `deepseek_v3` as well. Sources: https://arxiv.org/abs/2405.04434, https://arxiv.org/abs/2412.19437.
"""

from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.expert_keys import (
    ExpertDefaults,
    read_experts,
    read_kinds_of_mlp,
    read_mlps,
    read_router,
)
from shardplan.decoder.families.common.expert_rules import separate_expert_rules
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.indexer_keys import INDEXER_TENSORS, read_indexer
from shardplan.decoder.families.common.keys import architecture, read_rms_norm
from shardplan.decoder.families.common.latent_keys import LatentSizes, read_latent_attention
from shardplan.decoder.families.common.latent_rules import latent_attention_rules
from shardplan.decoder.families.common.rules import Rules, layer_norm_rules
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.router import Scoring

SIZES = LatentSizes(query_rank=1536, kv_rank=512, unrotated=128, rotated=64, value=128)
V2 = ExpertDefaults(experts=64, per_token=None, size=1407, shared=2, scale=1.0)
V3 = ExpertDefaults(experts=256, per_token=8, size=2048, shared=1, scale=2.5, groups=8, chosen_groups=4)
GREEDY, IN_GROUPS = "greedy", "group_limited_greedy"
"""Values of `topk_method` in V2: the best experts of all, or of the groups that have the best ones."""


def read_v2(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of V2.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_v2(ConfigKeys(read_config("deepseek-v2", None), "config.json"))
    >>> router = fields["segments"][1].layers[0].mlp.router
    >>> router.experts, router.experts_per_token, router.groups
    (160, 6, ExpertGroups(groups=8, chosen=3, best=1))
    """
    keys.only("scoring_func", ["softmax"])
    keys.only("norm_topk_prob", [False])
    keys.only("mlp_bias", [False])
    best_of_group = keys.choice("topk_method", choices={GREEDY: None, IN_GROUPS: 1}, default=GREEDY)
    if best_of_group is None:
        keys.take("n_group", "topk_group")  # which are given all the same
    router = read_router(keys, V2, Scoring.SOFTMAX, best_of_group, is_normalised=False)
    attention, norm = read_latent_attention(keys, SIZES), read_rms_norm(keys)
    mlps = read_mlps(keys, read_experts(keys, V2, router), read_kinds_of_mlp(keys, 0))
    return architecture(keys, [LayerConfig(attention, mlp, norm) for mlp in mlps], norm)


def read_v3(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of V3 or Kimi K2.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_v3(ConfigKeys(read_config("deepseek-v3", None), "config.json"))
    >>> router = fields["segments"][1].layers[0].mlp.router
    >>> router.has_correction, router.scale, router.groups
    (True, 2.5, ExpertGroups(groups=8, chosen=4, best=2))
    """
    return read_with_sigmoid(keys, SIZES, V3, first=3, positions=4096)


def read_v32(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of V3.2.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_v32(ConfigKeys(read_config("deepseek-v3.2", None), "config.json"))
    >>> fields["index_topk"], fields["max_seq_len"]
    (2048, 2048)
    """
    fields = read_with_sigmoid(keys, SIZES, V3, first=3, positions=163840)
    return read_indexer(keys, fields)


def read_with_sigmoid(
    keys: ConfigKeys, sizes: LatentSizes, defaults: ExpertDefaults, *, first: int, positions: int, epsilon: float = 1e-6
) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of a model with the router of V3.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> keys = ConfigKeys(read_config("moonlight-16b", None), "config.json")
    >>> fields = read_with_sigmoid(keys, SIZES, V3, first=3, positions=4096)
    >>> [(segment.repeats, type(segment.layers[0].mlp).__name__) for segment in fields["segments"]]
    [(1, 'MlpConfig'), (26, 'ExpertsConfig')]

    Args:
        first: default of `first_k_dense_replace`.
        positions: default of `max_position_embeddings`.
        epsilon: default of `rms_norm_eps`.
    """
    keys.only("scoring_func", ["sigmoid"])
    keys.only("topk_method", ["noaux_tc"])
    router = read_router(keys, defaults, Scoring.SIGMOID, 2, has_correction=True)
    attention, norm = read_latent_attention(keys, sizes), read_rms_norm(keys, epsilon)
    mlps = read_mlps(keys, read_experts(keys, defaults, router), read_kinds_of_mlp(keys, first))
    return architecture(keys, [LayerConfig(attention, mlp, norm) for mlp in mlps], norm, positions=positions)


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("moonlight-16b", None))
    >>> stacked = layer_rules(config, config.segments[1].layers[0], 1)["mlp.experts.up"]
    >>> len(stacked.rules), stacked.rules[63].rule.name
    (64, 'model.layers.1.mlp.experts.63.up_proj.weight')
    """
    at, embed = f"model.layers.{index}", config.embed
    return {
        **latent_attention_rules(layer.latent_attention, f"{at}.self_attn", embed),
        **separate_expert_rules(layer.mlp, f"{at}.mlp", embed),
        **layer_norm_rules(layer, at, embed),
    }


DEEPSEEK_V2 = Family(read_v2, layer_rules)
DEEPSEEK_V3 = Family(read_v3, layer_rules)
DEEPSEEK_V32 = Family(read_v32, layer_rules, dispensable=INDEXER_TENSORS)
