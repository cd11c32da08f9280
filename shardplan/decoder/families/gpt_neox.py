"""GPT-NeoX-20B and Pythia: attention and MLP in parallel, and a quarter of each head is rotated.

Source: https://arxiv.org/abs/2204.06745; keys and tensors have the names of transformers.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import ACTIVATIONS, architecture
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import Rules, layer_norm_rules, linear_rules, mlp_rules, norm_rules
from shardplan.decoder.names import Reshaped, Rule, Shape, Sliced, StoredTensor
from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig, NormKind


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> layer = read(ConfigKeys(read_config("pythia-160m", None), "config.json"))["segments"][0].layers[0]
    >>> layer.wiring.value, layer.attention.head_size, 2 * layer.attention.rotary.frequencies.pairs
    ('x += A(N(x)) + M(N(x))', 64, 16)
    """
    count, embed = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    if embed % count:
        keys.refuse("num_attention_heads", count, f"a divisor of hidden_size, {embed}")
    heads = GroupedAttention(count, count, embed // count)
    norm = NormConfig(NormKind.LAYER, keys.number("layer_norm_eps", default=1e-5), has_bias=True)
    bias = keys.flag("attention_bias", default=True)
    rotary = read_rotary(keys, heads.head_size, partial=0.25, theta_keys=("rotary_emb_base", "rope_theta"))
    attention = replace(heads, rotary=rotary, has_bias=bias, has_output_bias=bias)
    activation = keys.choice("hidden_act", choices=ACTIVATIONS, default="gelu")
    mlp = MlpConfig(keys.integer("intermediate_size"), activation, has_bias=True)
    is_parallel = keys.flag("use_parallel_residual", default=True)
    layer = LayerConfig(attention, mlp, norm, Wiring.PARALLEL if is_parallel else Wiring.PRE)
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm)


def rules(config: Architecture, vocab: int) -> Rules:
    """Return the rules that make parameters outside of layers from checkpoint tensors, by path.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> found = rules(DecoderConfig.from_hf_config(read_config("pythia-160m", None)), vocab=50304)
    >>> found["embedding"].name, found["lm_head.weight"].name
    ('gpt_neox.embed_in.weight', 'embed_out.weight')
    """
    found: Rules = {"embedding": StoredTensor("gpt_neox.embed_in.weight", (vocab, config.embed))}
    if config.norm is not None:
        found |= norm_rules("norm", "gpt_neox.final_layer_norm", config.norm, config.embed)
    if not config.is_tied:
        found["lm_head.weight"] = StoredTensor("embed_out.weight", (vocab, config.embed))
    return found


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("pythia-160m", None))
    >>> k_proj = layer_rules(config, config.segments[0].layers[0], 0)["self_attn.k_proj.weight"]
    >>> k_proj.dimension, k_proj.start, k_proj.rule.shape
    (1, 1, (12, 3, 64, 768))
    """
    at, attention, embed = f"gpt_neox.layers.{index}", layer.grouped_attention, config.embed
    found: Rules = {}
    for i, part in enumerate(("q_proj", "k_proj", "v_proj")):
        name = f"{at}.attention.query_key_value"
        found[f"self_attn.{part}.weight"] = _part_of_heads(f"{name}.weight", i, attention, (embed,))
        if attention.has_bias:
            found[f"self_attn.{part}.bias"] = _part_of_heads(f"{name}.bias", i, attention, ())
    output = f"{at}.attention.dense"
    return {
        **found,
        **linear_rules("self_attn.o_proj", output, embed, embed, attention.has_output_bias),
        **mlp_rules(layer.dense_mlp, f"{at}.mlp", embed, ("", "dense_h_to_4h", "dense_4h_to_h")),
        **layer_norm_rules(layer, at, embed),
    }


def _part_of_heads(name: str, part: int, attention: GroupedAttention, inputs: Shape) -> Rule:
    """Slice the queries (0), keys (1) or values (2) out of a tensor that holds all three, head by head."""
    heads, size = attention.heads, attention.head_size
    stored = StoredTensor(name, (heads * 3 * size, *inputs))
    return Sliced(Reshaped(stored, (heads, 3, size, *inputs)), 1, part, part + 1)


FAMILY = Family(read, layer_rules, rules)
