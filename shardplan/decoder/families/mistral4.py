"""Mistral Small 4: latent attention whose queries grow with their position, and experts in stacked tensors.

Source: modelling code of transformers.
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
from shardplan.decoder.families.common.expert_rules import stacked_expert_rules
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, read_rms_norm
from shardplan.decoder.families.common.latent_keys import LatentSizes, read_latent_attention_with_temperature
from shardplan.decoder.families.common.latent_rules import latent_attention_rules
from shardplan.decoder.families.common.rotary_keys import require_rope
from shardplan.decoder.families.common.rules import Rules, layer_norm_rules
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.router import Scoring

SIZES = LatentSizes(query_rank=1024, kv_rank=256, unrotated=64, rotated=64, value=128)
EXPERTS = ExpertDefaults(experts=128, per_token=4, size=2048, shared=1, scale=1.0)


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> mlp = read(ConfigKeys(read_config("mistral-small-4-119b", None), "config.json"))["segments"][0].layers[0].mlp
    >>> mlp.router.experts, mlp.router.experts_per_token, mlp.router.scoring.value, mlp.shared.size
    (128, 4, 'softmax over all experts', 2048)
    """
    require_rope(keys)
    router = read_router(keys, EXPERTS, Scoring.SOFTMAX, 2)
    attention, norm = read_latent_attention_with_temperature(keys, SIZES), read_rms_norm(keys)
    mlps = read_mlps(keys, read_experts(keys, EXPERTS, router), read_kinds_of_mlp(keys, 0))
    return architecture(keys, [LayerConfig(attention, mlp, norm) for mlp in mlps], norm, positions=1048576)


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("mistral-small-4-119b", None))
    >>> gate = layer_rules(config, config.segments[0].layers[0], 0)["mlp.experts.gate"]
    >>> gate.rule.rule
    StoredTensor(name='model.layers.0.mlp.experts.gate_up_proj', shape=(128, 4096, 4096))
    """
    at, embed = f"model.layers.{index}", config.embed
    return {
        **latent_attention_rules(layer.latent_attention, f"{at}.self_attn", embed),
        **stacked_expert_rules(layer.mlp, f"{at}.mlp", embed),
        **layer_norm_rules(layer, at, embed),
    }


FAMILY = Family(read, layer_rules)
