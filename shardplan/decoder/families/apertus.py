"""Apertus: ungated MLPs with xIELU, an activation with parameters. Source: https://arxiv.org/abs/2509.14233."""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import ACTIVATIONS, architecture, read_attention, read_rms_norm
from shardplan.decoder.families.common.rotary_keys import read_rotary, require_rope
from shardplan.decoder.families.common.rules import Rules, attention_rules, layer_norm_rules, mlp_rules
from shardplan.decoder.names import StoredTensor
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.mlp import XIELU, MlpConfig, Xielu


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("apertus-8b", None), "config.json"))
    >>> fields["segments"][0].layers[0].mlp
    MlpConfig(size=21504, activation='xielu', has_bias=False, is_gated=False, axis='mlp')
    """
    keys.only("post_norm", [False])
    keys.only("qk_norm", [True])
    require_rope(keys)
    heads, norm = read_attention(keys), read_rms_norm(keys, 1e-5)
    attention = replace(heads, rotary=read_rotary(keys, heads.head_size, 12e6), head_norm=HeadNorm(norm))
    activation = keys.choice("hidden_act", choices={**ACTIVATIONS, "xielu": XIELU}, default="xielu")
    keys.only("mlp_bias", [False])
    layer = LayerConfig(attention, MlpConfig(keys.integer("intermediate_size"), activation), norm)
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm, positions=65536)


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("apertus-8b", None))
    >>> rules = layer_rules(config, config.segments[0].layers[0], 0)
    >>> rules["mlp_norm.weight"].name, rules["mlp.xielu.alpha_p"].name
    ('model.layers.0.feedforward_layernorm.weight', 'model.layers.0.mlp.act_fn.alpha_p')
    """
    at, embed = f"model.layers.{index}", config.embed
    names = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
    found = {
        **attention_rules(layer.grouped_attention, f"{at}.self_attn", embed),
        **mlp_rules(layer.dense_mlp, f"{at}.mlp", embed),
        **layer_norm_rules(layer, at, embed, names),
    }
    if layer.dense_mlp.activation == XIELU:
        for parameter in ("alpha_p", "alpha_n"):
            found[f"mlp.xielu.{parameter}"] = StoredTensor(f"{at}.mlp.act_fn.{parameter}", (1,))
    return found


def constants(config: Architecture, layer: LayerConfig, index: int) -> dict[str, float]:
    """Return name -> value of xIELU's constants, which transformers reads from the checkpoint.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("apertus-8b", None))
    >>> constants(config, config.segments[0].layers[0], 31)
    {'model.layers.31.mlp.act_fn.beta': 0.5, 'model.layers.31.mlp.act_fn.eps': -1e-06}
    """
    if layer.mlp.activation != XIELU:
        return {}
    at = f"model.layers.{index}.mlp.act_fn"
    return {f"{at}.beta": Xielu.BETA, f"{at}.eps": Xielu.EPSILON}


FAMILY = Family(read, layer_rules, constants=constants)
