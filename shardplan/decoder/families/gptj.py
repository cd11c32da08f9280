"""GPT-J: attention and MLP in parallel after a shared norm, and an output head with a bias.

Source: https://github.com/kingoflolz/mesh-transformer-jax; keys and tensors have the names of transformers.
"""

from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import ACTIVATIONS
from shardplan.decoder.families.common.rules import (
    Rules,
    attention_rules,
    in_halves,
    layer_norm_rules,
    mlp_rules,
    top_rules,
)
from shardplan.decoder.parts.attention.frequencies import unscaled
from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention
from shardplan.decoder.parts.attention.rotary import Rotary
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig, NormKind
from shardplan.decoder.parts.segments import divide_layers


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("gpt-j-6b", None), "config.json"))
    >>> attention = fields["segments"][0].layers[0].attention
    >>> attention.head_size, 2 * attention.rotary.frequencies.pairs, fields["has_head_bias"]
    (256, 64, True)
    """
    keys.only("tie_word_embeddings", [False])  # the bias needs an output head of its own
    keys.only("rotary", [True])
    keys.only("scale_attn_weights", [True])
    embed, heads = keys.integer("n_embd", "hidden_size"), keys.integer("n_head", "num_attention_heads")
    norm = NormConfig(NormKind.LAYER, keys.number("layer_norm_epsilon", default=1e-5), has_bias=True)
    if embed % heads:
        keys.refuse("n_head", heads, f"a divisor of n_embd, {embed}")
    rotated = keys.integer("rotary_dim", default=64)
    if keys.is_null("rotary_dim") or rotated % 2 or rotated > embed // heads:
        value = None if keys.is_null("rotary_dim") else rotated
        keys.refuse("rotary_dim", value, f"the number of channels that are rotated: even, at most {embed // heads}")
    attention = GroupedAttention(heads, heads, embed // heads, Rotary(unscaled(10000.0, rotated)))
    activation = keys.choice("activation_function", choices=ACTIVATIONS, default="gelu_new")
    mlp = MlpConfig(keys.integer("n_inner", default=4 * embed), activation, has_bias=True)
    layer = LayerConfig(attention, mlp, norm, Wiring.PARALLEL_SHARED)
    return {
        "max_seq_len": keys.integer("n_positions", "max_position_embeddings", default=2048),
        "embed": embed,
        "segments": divide_layers([layer] * keys.integer("n_layer", "num_hidden_layers")),
        "norm": norm,
        "is_tied": False,
        "has_head_bias": True,
    }


def rules(config: Architecture, vocab: int) -> Rules:
    """Return the rules that make parameters outside of layers from checkpoint tensors, by path.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> found = rules(DecoderConfig.from_hf_config(read_config("gpt-j-6b", None)), vocab=50400)
    >>> [rule.name for rule in found.values()]
    ['transformer.wte.weight', 'transformer.ln_f.weight', 'transformer.ln_f.bias', 'lm_head.weight', 'lm_head.bias']
    """
    return top_rules(config, vocab, "transformer", "wte", "ln_f")


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("gpt-j-6b", None))
    >>> found = layer_rules(config, config.segments[0].layers[0], 0)
    >>> found["self_attn.o_proj.weight"].name, found["mlp.up_proj.weight"].name
    ('transformer.h.0.attn.out_proj.weight', 'transformer.h.0.mlp.fc_in.weight')
    """
    at, embed = f"transformer.h.{index}", config.embed
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    found = {
        **attention_rules(layer.grouped_attention, f"{at}.attn", embed, names),
        **mlp_rules(layer.dense_mlp, f"{at}.mlp", embed, ("", "fc_in", "fc_out")),
        **layer_norm_rules(layer, at, embed, {"attention_norm": "ln_1"}),
    }
    return {**found, **in_halves(found, layer.grouped_attention, embed)}


FAMILY = Family(read, layer_rules, rules)
