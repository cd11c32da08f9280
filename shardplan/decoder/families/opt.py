"""OPT: learned position embeddings, and biases; the 350M model has narrower token embeddings, and norms after sums.

Source: https://arxiv.org/abs/2205.01068.
"""

from typing import Any

from shardplan.decoder.architecture import Architecture, PositionTable
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import ACTIVATIONS, architecture
from shardplan.decoder.families.common.rules import (
    Rules,
    attention_rules,
    layer_norm_rules,
    linear_rules,
    mlp_rules,
    top_rules,
)
from shardplan.decoder.names import StoredTensor
from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig, NormKind

FIRST_ROW = 2
"""Row of position 0 in the table of position embeddings."""


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("opt-125m", None), "config.json"))
    >>> fields["max_seq_len"], fields["position_table"]
    (2048, PositionTable(rows=2050, first=2))
    """
    keys.only("layer_norm_elementwise_affine", [True])
    embed, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if embed % heads:
        keys.refuse("num_attention_heads", heads, f"a divisor of hidden_size, {embed}")
    is_before = keys.flag("do_layer_norm_before", default=True)
    has_last_norm = is_before and not keys.flag("_remove_final_layer_norm", default=False)
    keys.take("_remove_final_layer_norm")  # `and` above does not read it where `is_before` is false
    bias = keys.flag("enable_bias", default=True)
    norm = NormConfig(NormKind.LAYER, 1e-5, has_bias=True)  # PyTorch's epsilon: config.json has none
    attention = GroupedAttention(heads, heads, embed // heads, None, has_bias=bias, has_output_bias=bias)
    activation = keys.choice("activation_function", choices=ACTIVATIONS, default="relu")
    mlp = MlpConfig(keys.integer("ffn_dim"), activation, has_bias=bias)
    layer = LayerConfig(attention, mlp, norm, Wiring.PRE if is_before else Wiring.AFTER_SUM)
    token_embed = keys.integer("word_embed_proj_dim", default=embed)
    positions = keys.integer("max_position_embeddings", default=2048)
    return architecture(
        keys,
        [layer] * keys.integer("num_hidden_layers"),
        norm if has_last_norm else None,
        is_tied=True,
        position_table=PositionTable(positions + FIRST_ROW, FIRST_ROW),
        token_embed=None if token_embed == embed else token_embed,
    )


def rules(config: Architecture, vocab: int) -> Rules:
    """Return the rules that make parameters outside of layers from checkpoint tensors, by path.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> rules(DecoderConfig.from_hf_config(read_config("opt-125m", None)), vocab=50272)["position_embedding"]
    StoredTensor(name='model.decoder.embed_positions.weight', shape=(2050, 768))
    """
    found = top_rules(config, vocab, "model.decoder", norm="final_layer_norm")
    if config.position_table is not None:
        shape = (config.position_table.rows, config.embed)
        found["position_embedding"] = StoredTensor("model.decoder.embed_positions.weight", shape)
    if config.token_embed is not None:
        found |= linear_rules("project_in", "model.decoder.project_in", config.embed, config.token_embed, False)
        found |= linear_rules("project_out", "model.decoder.project_out", config.token_embed, config.embed, False)
    return found


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("opt-125m", None))
    >>> found = layer_rules(config, config.segments[0].layers[0], 0)
    >>> {path: found[f"{path}.weight"].name for path in ("mlp.up_proj", "mlp_norm")}
    {'mlp.up_proj': 'model.decoder.layers.0.fc1.weight', 'mlp_norm': 'model.decoder.layers.0.final_layer_norm.weight'}
    """
    at, embed = f"model.decoder.layers.{index}", config.embed
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    norms = dict(zip(layer.wiring.norms, ("self_attn_layer_norm", "final_layer_norm"), strict=True))
    return {
        **attention_rules(layer.grouped_attention, f"{at}.self_attn", embed, names),
        **mlp_rules(layer.dense_mlp, at, embed, ("", "fc1", "fc2")),
        **layer_norm_rules(layer, at, embed, norms),
    }


FAMILY = Family(read, layer_rules, rules)
