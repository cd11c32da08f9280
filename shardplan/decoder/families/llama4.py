"""Llama 4: one shared and one routed expert; most layers have rotary embeddings and attention within chunks.

The layers without rotary embeddings attend to all positions, and their queries grow with their position. Source:
https://ai.meta.com/blog/llama-4-multimodal-intelligence, and modelling code of transformers.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import ACTIVATIONS, FULL, architecture, read_attention, read_rms_norm
from shardplan.decoder.families.common.rotary_keys import read_rotary, read_rotated_layers
from shardplan.decoder.families.common.rules import (
    Rules,
    attention_rules,
    in_halves,
    layer_norm_rules,
    linear_rules,
    mlp_rules,
)
from shardplan.decoder.names import Sliced, StoredTensor
from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention, HeadNorm, QueryTemperature
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.experts import ExpertsConfig, GatedActivation
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.mlp.router import RouterConfig, Scoring
from shardplan.decoder.parts.norm import NormConfig

CHUNKED = "chunked_attention"
"""Value in `layer_types` of layers with chunked attention."""


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("llama-4-scout", None), "config.json"))
    >>> attentions = [layer.attention for layer in fields["segments"][0].layers]
    >>> [(attention.chunk, attention.rotary is not None) for attention in attentions]
    [(8192, True), (8192, True), (8192, True), (None, False)]
    """
    # of training, and of tools that quantise
    keys.take("for_llm_compressor", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    norm = read_rms_norm(keys, 1e-5)
    has_experts = _read_moe_layers(keys)
    activation = keys.choice("hidden_act", choices=ACTIVATIONS, default="silu")
    dense = MlpConfig(keys.integer("intermediate_size_mlp", default=16384), activation, is_gated=True)
    experts = _read_experts(keys, activation)
    layers = []
    for i, attention in enumerate(_read_attentions(keys, norm)):
        layers.append(LayerConfig(attention, experts if i in has_experts else dense, norm))
    return architecture(keys, layers, norm, positions=131072)


def _read_attentions(keys: ConfigKeys, norm: NormConfig) -> list[GroupedAttention]:
    """Read the attention of every layer."""
    heads = read_attention(keys, 128, 8)
    rotary = read_rotary(keys, heads.head_size, 500000.0)
    head_norm = None
    if keys.flag("use_qk_norm", default=True):
        if rotary.frequencies.magnitude != 1.0:
            keys.refuse("use_qk_norm", True, "false, beside rotary embeddings that multiply queries and keys")
        # transformers normalises what is rotated, which is as long as what is not
        head_norm = HeadNorm(replace(norm, has_weight=False))
    temperature, is_tuned = None, keys.take("attn_temperature_tuning", default=True)
    if not isinstance(is_tuned, int):
        keys.refuse("attn_temperature_tuning", is_tuned, "true or false")
    if is_tuned:  # the first releases have 4 in place of true
        positions = keys.integer("floor_scale", default=8192)
        temperature = QueryTemperature(keys.number("attn_scale", default=0.1), positions, first=1)
    keys.take("floor_scale", "attn_scale")

    rotated = read_rotated_layers(keys)
    with_rope = replace(heads, rotary=rotary, head_norm=head_norm)
    without = replace(heads, temperature=temperature)
    attentions = []
    for is_rotated, chunk in zip(rotated, _read_chunks(keys, rotated), strict=True):
        attentions.append(replace(with_rope if is_rotated else without, chunk=chunk))
    return attentions


def _read_chunks(keys: ConfigKeys, rotated: list[bool]) -> list[int | None]:
    """Read the chunk size of every layer; None for layers that attend to all earlier positions."""
    size, kinds = keys.integer_or_null("attention_chunk_size", 8192), keys.take("layer_types")
    if kinds is None:
        return [size if is_rotated else None for is_rotated in rotated]
    expected = f"a list of {len(rotated)} times {FULL} or {CHUNKED}"
    if not isinstance(kinds, list) or len(kinds) != len(rotated) or not all(each in (FULL, CHUNKED) for each in kinds):
        keys.refuse("layer_types", kinds, expected)
    if CHUNKED in kinds and size is None:
        keys.refuse("attention_chunk_size", None, f"a number of tokens, for the layers with {CHUNKED}")
    return [size if each == CHUNKED else None for each in kinds]


def _read_moe_layers(keys: ConfigKeys) -> list[int]:
    """Read the indices of the layers that have experts."""
    count, period = keys.integer("num_hidden_layers"), keys.integer("interleave_moe_layer_step", default=1)
    given = keys.take("moe_layers", default=list(range(period - 1, count, period)))
    if not isinstance(given, list) or not all(type(each) is int and 0 <= each < count for each in given):
        keys.refuse("moe_layers", given, f"a list of numbers of layers, from 0 to {count - 1}")
    return given


def _read_experts(keys: ConfigKeys, activation: str) -> ExpertsConfig:
    """Read the routed experts, and the shared expert of the same size."""
    experts, per_token = keys.integer("num_local_experts", default=16), keys.integer("num_experts_per_tok", default=1)
    if per_token > experts:
        keys.refuse("num_experts_per_tok", per_token, f"at most num_local_experts, {experts}")
    size = keys.integer("intermediate_size", default=8192)  # layers without experts have `intermediate_size_mlp`
    return ExpertsConfig(
        RouterConfig(experts, per_token, Scoring.SIGMOID, is_normalised=False),
        size,
        GatedActivation(activation),
        weighs_inputs=True,
        shared=MlpConfig(size, activation, is_gated=True),
    )


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("llama-4-scout", None))
    >>> gate = layer_rules(config, config.segments[0].layers[0], 0)["mlp.experts.gate"]
    >>> gate.stop, gate.rule
    (8192, StoredTensor(name='model.layers.0.feed_forward.experts.gate_up_proj', shape=(16, 5120, 16384)))
    """
    at, embed, mlp = f"model.layers.{index}", config.embed, layer.mlp
    found = attention_rules(layer.grouped_attention, f"{at}.self_attn", embed)
    return {
        **found,
        **in_halves(found, layer.grouped_attention, embed),
        **layer_norm_rules(layer, at, embed),
        **(
            mlp_rules(mlp, f"{at}.feed_forward", embed)
            if isinstance(mlp, MlpConfig)
            else _expert_rules(mlp, f"{at}.feed_forward", embed)
        ),
    }


def _expert_rules(mlp: ExpertsConfig, name: str, embed: int) -> Rules:
    """Return the loading rules of experts in two tensors with inputs first; one tensor has gate and up projections."""
    experts, size = mlp.router.experts, mlp.size
    both = StoredTensor(f"{name}.experts.gate_up_proj", (experts, embed, 2 * size))
    found: Rules = {
        **linear_rules("mlp.router", f"{name}.router", experts, embed, has_bias=False),
        "mlp.experts.gate": Sliced(both, 2, 0, size),
        "mlp.experts.up": Sliced(both, 2, size, 2 * size),
        "mlp.experts.down": StoredTensor(f"{name}.experts.down_proj", (experts, size, embed)),
    }
    assert mlp.shared is not None
    for path, rule in mlp_rules(mlp.shared, f"{name}.shared_expert", embed).items():
        found[path.replace("mlp.", "mlp.shared.", 1)] = rule
    return found


FAMILY = Family(read, layer_rules)
