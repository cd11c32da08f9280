"""Hunyuan with experts: Hunyuan-A13B normalises queries and keys after they are rotated, Hy3 before.

Sources: https://github.com/Tencent-Hunyuan/Hunyuan-A13B, and modelling code of transformers.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.expert_keys import (
    MIN_SUM,
    gated_experts,
    read_counts,
    read_kinds_of_mlp,
    read_mlps,
)
from shardplan.decoder.families.common.expert_rules import ExpertNames, expert_layer_rules
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, only, read_attention, read_rms_norm
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import Rules, attention_rules
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.router import RouterConfig, Scoring

V1_NAMES = ExpertNames(router="gate.wg.weight", shared="shared_mlp")
V3_NAMES = ExpertNames(router="router.gate.weight", correction="expert_bias", shared="shared_mlp")
V1_ONLY = {
    "add_classification_head": False, "group_limited_greedy": False, "mamba": False, "mlp_bias": False,
    "moe_drop_tokens": False, "moe_layer_num_skipped": 0, "norm_topk_prob": True, "norm_type": "rms",
    "position_embedding_xdrope": False, "routed_scaling_factor": 1.0, "use_cla": False, "use_mixed_mlp_moe": True,
    "use_mla": False, "use_qk_norm": True, "use_rotary_pos_emb": True,
}  # fmt: skip
"""Key of Hunyuan-A13B -> the only value that the decoder supports."""
V1_UNUSED = (
    "anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "cla_share_factor", "class_num",
    "dense_list", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "kv_lora_rank", "mask_init_id",
    "moe_random_routing_dropped_token", "num_media_embeds", "org_vocab_size", "pad_id", "pool_type", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "skip_cls_token", "text_end_id", "text_start_id", "v_head_dim",
    "video_end_id", "video_start_id", "vit_add_patchemb_bias", "vit_input_resolution", "vit_mapping_type",
    "vit_norm_type", "vit_patch", "vit_remove_prenorm", "vit_token", "vit_type", "vit_used_rms_norm",
)  # fmt: skip
"""Unused keys of Hunyuan-A13B: they are about parts that `V1_ONLY` excludes, about images, or about tokens."""
V3_ONLY = {
    "mlp_bias": False, "moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True, "qk_norm": True,
    "route_norm": True,
}  # fmt: skip
"""Key of Hy3 -> the only value that the decoder supports."""
V3_UNUSED = (
    "enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine", "eod_token_id", "use_grouped_mm",
)  # fmt: skip
"""Unused keys of Hy3: they say in which precision, or by which kernel, something is computed."""


def read_v1(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Hunyuan-A13B.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> layer = read_v1(ConfigKeys(read_config("hunyuan-a13b", None), "config.json"))["segments"][0].layers[0]
    >>> layer.attention.head_norm.is_after_rotary, layer.mlp.router.experts, layer.mlp.router.experts_per_token
    (True, 64, 8)
    """
    only(keys, V1_ONLY)
    keys.take(*V1_UNUSED)
    norm, size = read_rms_norm(keys, 1e-5), keys.integer("intermediate_size")
    heads = replace(read_attention(keys), head_norm=HeadNorm(norm, is_after_rotary=True))
    keys.only("attention_head_dim", [heads.head_size])  # the release gives the size twice
    attention = replace(heads, rotary=read_rotary(keys, heads.head_size, has_alpha=True))
    for name, expected in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if any(each != expected for each in _each_layer(keys, (name,), expected)):
            keys.refuse(name, keys.take(name), f"{expected} in every layer")
    experts = keys.integer("num_experts", "num_local_experts", default=1)
    layers = []
    for per_token in _each_layer(keys, ("moe_topk", "num_experts_per_tok"), 1):
        if per_token > experts:
            keys.refuse("moe_topk", per_token, f"at most num_experts, {experts}")
        mlp = gated_experts(keys, RouterConfig(experts, per_token), size, 1)
        layers.append(LayerConfig(attention, mlp, norm))
    return architecture(keys, layers, norm)


def _each_layer(keys: ConfigKeys, names: tuple[str, ...], default: int) -> list[int]:
    """Read a positive number for each layer, or one for all layers."""
    layers, value = keys.integer("num_hidden_layers"), keys.take(*names, default=default)
    values = value if isinstance(value, list) else [value] * layers
    if len(values) != layers or not all(type(each) is int and each > 0 for each in values):
        keys.refuse(names[0], value, f"a positive integer, or a list of {layers}")
    return values


def v1_layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make parameters of a Hunyuan-A13B layer from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("hunyuan-a13b", None))
    >>> rules = v1_layer_rules(config, config.segments[0].layers[0], 0)
    >>> rules["self_attn.q_norm.weight"].name, rules["mlp.router.weight"].name
    ('model.layers.0.self_attn.query_layernorm.weight', 'model.layers.0.mlp.gate.wg.weight')
    """
    at, norms = f"model.layers.{index}.self_attn", ("query_layernorm", "key_layernorm")
    found = expert_layer_rules(config, layer, index, V1_NAMES)
    return {**found, **attention_rules(layer.grouped_attention, at, config.embed, norms=norms)}


def read_v3(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of Hy3.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_v3(ConfigKeys(read_config("hy3-preview", None), "config.json"))
    >>> router = fields["segments"][1].layers[0].mlp.router
    >>> router.experts, router.experts_per_token, router.scale
    (192, 8, 2.826)
    """
    only(keys, V3_ONLY)
    keys.take(*V3_UNUSED)
    norm = read_rms_norm(keys, 1e-5)
    heads = replace(read_attention(keys, 128, 8), head_norm=HeadNorm(norm))
    attention = replace(heads, rotary=read_rotary(keys, heads.head_size, 11158840.0))
    experts, per_token = read_counts(keys, ("num_experts", "num_local_experts"), ("num_experts_per_tok",), (192, 8))
    router = RouterConfig(
        experts,
        per_token,
        Scoring.SIGMOID,
        has_correction=True,
        min_sum=MIN_SUM,
        scale=keys.number("router_scaling_factor", default=2.826),
    )
    size = keys.integer("moe_intermediate_size", "expert_hidden_dim", default=1536)
    keys.only("expert_hidden_dim", [size])  # where a file has both keys
    mlp = gated_experts(keys, router, size, keys.integer("num_shared_experts", default=1))
    layers = [LayerConfig(attention, each, norm) for each in read_mlps(keys, mlp, read_kinds_of_mlp(keys, 1))]
    return architecture(keys, layers, norm, positions=131072)


V1_MOE = Family(read_v1, v1_layer_rules)
V3 = Family(read_v3, partial(expert_layer_rules, names=V3_NAMES))
