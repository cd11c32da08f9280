"""Phi 1, 1.5 and 2: attention and MLP in parallel after a shared norm, and an output head with a bias.

Source: https://arxiv.org/abs/2309.05463.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import ACTIVATIONS, architecture, read_heads
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import Rules, attention_rules, layer_norm_rules, mlp_rules, top_rules
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig, NormKind


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("phi-1.5", None), "config.json"))
    >>> fields["segments"][0].layers[0].wiring.value, fields["has_head_bias"]
    ('n = N(x); x += A(n) + M(n)', True)
    """
    keys.only("tie_word_embeddings", [False])  # the bias needs an output head of its own
    heads = read_heads(keys)
    norm = NormConfig(NormKind.LAYER, keys.number("layer_norm_eps", default=1e-5), has_bias=True)
    attention = replace(
        heads,
        rotary=read_rotary(keys, heads.head_size, partial=0.5),
        has_bias=True,
        has_output_bias=True,
        head_norm=HeadNorm(norm) if keys.flag("qk_layernorm", default=False) else None,
    )
    activation = keys.choice("hidden_act", choices=ACTIVATIONS, default="gelu_new")
    mlp = MlpConfig(keys.integer("intermediate_size"), activation, has_bias=True)
    layer = LayerConfig(attention, mlp, norm, Wiring.PARALLEL_SHARED)
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm, has_head_bias=True)


def rules(config: Architecture, vocab: int) -> Rules:
    """Return the rules that make parameters outside of layers from checkpoint tensors, by path.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> found = rules(DecoderConfig.from_hf_config(read_config("phi-1.5", None)), vocab=51200)
    >>> found["norm.weight"].name, found["lm_head.bias"].name
    ('model.final_layernorm.weight', 'lm_head.bias')
    """
    return top_rules(config, vocab, norm="final_layernorm")


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("phi-1.5", None))
    >>> found = layer_rules(config, config.segments[0].layers[0], 0)
    >>> found["self_attn.o_proj.weight"].name, found["mlp.up_proj.weight"].name
    ('model.layers.0.self_attn.dense.weight', 'model.layers.0.mlp.fc1.weight')
    """
    at, embed = f"model.layers.{index}", config.embed
    names, norms = ("q_proj", "k_proj", "v_proj", "dense"), ("q_layernorm", "k_layernorm")
    return {
        **attention_rules(layer.grouped_attention, f"{at}.self_attn", embed, names, norms),
        **mlp_rules(layer.dense_mlp, f"{at}.mlp", embed, ("", "fc1", "fc2")),
        **layer_norm_rules(layer, at, embed),
    }


FAMILY = Family(read, layer_rules, rules)
