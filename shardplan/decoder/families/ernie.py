"""ERNIE 4.5 with experts, some of them shared; neighbouring channels of heads are rotated.

Source: https://ernie.baidu.com/blog/posts/ernie4.5, and modelling code of transformers.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.expert_keys import gated_experts, read_counts, read_mlps
from shardplan.decoder.families.common.expert_rules import ExpertNames, expert_layer_rules
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, every, only, read_heads, read_rms_norm
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import Rules, in_halves
from shardplan.decoder.names import StoredTensor
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.router import RouterConfig

NAMES = ExpertNames(correction="moe_statics.e_score_correction_bias")
ONLY = {
    "compression_ratio": 1.0, "is_quantized": False, "moe_gate": "topk", "moe_use_aux_free": True, "use_bias": False,
    "use_rmsnorm": True,
}  # fmt: skip
"""Key -> the only value that the decoder supports."""


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("ernie-4.5-21b-a3b", None), "config.json"))
    >>> mlp = fields["segments"][1].layers[0].mlp
    >>> mlp.router.experts, mlp.router.experts_per_token, mlp.size, mlp.shared.size
    (64, 6, 1536, 3072)
    """
    only(keys, ONLY)
    keys.take("moe_capacity")  # of training: no token is dropped
    heads, norm = read_heads(keys, kv_heads=4), read_rms_norm(keys, 1e-5)
    attention = replace(heads, rotary=read_rotary(keys, heads.head_size, 500000.0))
    experts, per_token = read_counts(
        keys, ("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok"), (64, 6)
    )
    min_sum = keys.number("moe_norm_min", default=1e-12)
    router = RouterConfig(experts, per_token, has_correction=True, min_sum=min_sum)
    size, shared = keys.integer("moe_intermediate_size", default=1536), 0
    if not keys.is_null("moe_num_shared_experts"):
        shared = keys.integer("moe_num_shared_experts", default=2, least=0)
    mlps = read_mlps(keys, gated_experts(keys, router, size, shared), _read_kinds_of_mlp(keys))
    layers = [LayerConfig(attention, mlp, norm) for mlp in mlps]
    return architecture(keys, layers, norm, is_tied=True, positions=131072)


def _read_kinds_of_mlp(keys: ConfigKeys) -> list[bool]:
    """Read which layers have experts: the last of each period, within a range of layers."""
    layers = keys.integer("num_hidden_layers")
    first, end = keys.integer("moe_layer_start_index", default=1, least=0), layers - 1
    if keys.take("moe_layer_end_index", default=-1) != -1:  # -1 is the last layer
        end = keys.integer("moe_layer_end_index", least=0)
    is_last = every(keys.integer("moe_layer_interval", default=1))
    return [is_last(i) and first <= i <= end for i in range(layers)]


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("ernie-4.5-21b-a3b", None))
    >>> layer_rules(config, config.segments[1].layers[0], 1)["mlp.router.correction"]
    StoredTensor(name='model.layers.1.mlp.moe_statics.e_score_correction_bias', shape=(1, 64))
    """
    found = expert_layer_rules(config, layer, index, NAMES)
    correction = found.get("mlp.router.correction")
    if isinstance(correction, StoredTensor):  # a row, as of one group of experts
        found["mlp.router.correction"] = replace(correction, shape=(1, *correction.shape))
    return {**found, **in_halves(found, layer.grouped_attention, config.embed)}


FAMILY = Family(read, layer_rules)
