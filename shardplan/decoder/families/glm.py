"""GLM 4 and 4.5: half of each head is rotated.

GLM 4 rotates neighbouring pairs; GLM-4-0414 has norms behind attention and MLP as well; GLM 4.5 to 4.7 have experts
behind their first layers. Sources: https://arxiv.org/abs/2406.12793, https://arxiv.org/abs/2508.06471, and modelling
code of transformers.
"""

from dataclasses import replace
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
from shardplan.decoder.families.common.expert_rules import expert_layer_rules
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, read_gated_mlp, read_heads, read_rms_norm
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import (
    NORM_NAMES,
    Rules,
    attention_rules,
    gate_and_up_rules,
    in_halves,
    layer_norm_rules,
    linear_rules,
)
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.mlp.router import Scoring

NORM_NAMES_0414 = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}
DEFAULTS = ExpertDefaults(experts=128, per_token=8, size=1408, shared=1, scale=1.0)


def read_glm(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of the first GLM-4.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> layer = read_glm(ConfigKeys(read_config("glm-4-9b", None), "config.json"))["segments"][0].layers[0]
    >>> layer.attention.head_size, 2 * layer.attention.rotary.frequencies.pairs
    (128, 64)
    """
    return _read(keys, Wiring.PRE)


def read_glm4(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of GLM-4-0414.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_glm4(ConfigKeys(read_config("glm-4-9b-0414", None), "config.json"))
    >>> fields["segments"][0].layers[0].wiring.value
    'x += N(A(N(x))); x += N(M(N(x)))'
    """
    return _read(keys, Wiring.SANDWICH)


def read_glm4_moe(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json of GLM 4.5, 4.6 or 4.7.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read_glm4_moe(ConfigKeys(read_config("glm-4.5-air", None), "config.json"))
    >>> [(segment.repeats, type(segment.layers[0].mlp).__name__) for segment in fields["segments"]]
    [(1, 'MlpConfig'), (45, 'ExpertsConfig')]
    """
    keys.only("scoring_func", ["sigmoid"])
    keys.only("topk_method", ["noaux_tc"])
    keys.only("moe_router_dtype", ["float32"])
    heads, norm = read_heads(keys, kv_heads=8), read_rms_norm(keys, 1e-5)
    attention = replace(
        heads,
        rotary=read_rotary(keys, heads.head_size, partial=0.5),
        has_bias=keys.flag("attention_bias", default=False),
        head_norm=HeadNorm(norm) if keys.flag("use_qk_norm", default=False) else None,
    )
    router = read_router(keys, DEFAULTS, Scoring.SIGMOID, best_of_group=2, has_correction=True)
    experts = read_experts(keys, DEFAULTS, router)
    layers = [LayerConfig(attention, mlp, norm) for mlp in read_mlps(keys, experts, read_kinds_of_mlp(keys, 1))]
    return architecture(keys, layers, norm, positions=131072)


def _read(keys: ConfigKeys, wiring: Wiring) -> dict[str, Any]:
    heads, norm = read_heads(keys, 128, 2), read_rms_norm(keys, 1.5625e-07)
    attention = replace(
        heads,
        rotary=read_rotary(keys, heads.head_size, partial=0.5),
        has_bias=keys.flag("attention_bias", default=True),
    )
    layer = LayerConfig(attention, read_gated_mlp(keys), norm, wiring)
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm, positions=131072)


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("glm-4-9b-0414", None))
    >>> rules = layer_rules(config, config.segments[0].layers[0], 0)
    >>> rules["mlp_out_norm.weight"].name, rules["mlp.up_proj.weight"].rule.name
    ('model.layers.0.post_mlp_layernorm.weight', 'model.layers.0.mlp.gate_up_proj.weight')
    """
    at, embed = f"model.layers.{index}", config.embed
    norms = NORM_NAMES_0414 if layer.wiring is Wiring.SANDWICH else NORM_NAMES[layer.wiring]
    found = {
        **attention_rules(layer.grouped_attention, f"{at}.self_attn", embed),
        **gate_and_up_rules(layer.dense_mlp, f"{at}.mlp.gate_up_proj", embed),
        **linear_rules("mlp.down_proj", f"{at}.mlp.down_proj", embed, layer.dense_mlp.size, has_bias=False),
        **layer_norm_rules(layer, at, embed, norms),
    }
    return {**found, **in_halves(found, layer.grouped_attention, embed)}


GLM = Family(read_glm, layer_rules)
GLM4 = Family(read_glm4, layer_rules)
GLM4_MOE = Family(read_glm4_moe, expert_layer_rules)
