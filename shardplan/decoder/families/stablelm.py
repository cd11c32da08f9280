"""StableLM: layer norms, and a quarter of each head is rotated; the 12B model has one norm a layer, and head norms.

Source: https://arxiv.org/abs/2402.17834.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, read_gated_mlp, read_heads
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import Rules, standard_layer_rules
from shardplan.decoder.names import Stacked, StoredTensor
from shardplan.decoder.parts.attention.grouped_attention import HeadNorm, NormExtent
from shardplan.decoder.parts.block import LayerConfig, Wiring
from shardplan.decoder.parts.norm import NormConfig, NormKind


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> layer = read(ConfigKeys(read_config("stablelm-2-1.6b", None), "config.json"))["segments"][0].layers[0]
    >>> layer.norm.kind.value, layer.attention.head_size, 2 * layer.attention.rotary.frequencies.pairs
    ('layer', 64, 16)
    """
    heads, epsilon = read_heads(keys), keys.number("layer_norm_eps", default=1e-5)
    norm, of_heads = NormConfig(NormKind.LAYER, epsilon, has_bias=True), NormConfig(NormKind.LAYER, epsilon)
    has_head_norms = keys.flag("qk_layernorm", default=False)
    attention = replace(
        heads,
        rotary=read_rotary(keys, heads.head_size, partial=0.25, theta_keys=("rope_theta", "rotary_emb_base")),
        has_bias=keys.flag("use_qkv_bias", default=False),
        head_norm=HeadNorm(of_heads, NormExtent.EACH_HEAD) if has_head_norms else None,
    )
    wiring = Wiring.PARALLEL_SHARED if keys.flag("use_parallel_residual", default=False) else Wiring.PRE
    layer = LayerConfig(attention, read_gated_mlp(keys), norm, wiring)
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm, positions=4096)


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config({**read_config("stablelm-2-1.6b", None), "qk_layernorm": True})
    >>> norms = layer_rules(config, config.segments[0].layers[0], 0)["self_attn.q_norm.weight"]
    >>> len(norms.rules), norms.rules[31]
    (32, StoredTensor(name='model.layers.0.self_attn.q_layernorm.norms.31.weight', shape=(64,)))
    """
    found, attention = standard_layer_rules(config, layer, index), layer.grouped_attention
    if attention.head_norm is not None:
        for part, heads in (("q", attention.heads), ("k", attention.kv_heads)):
            name = f"model.layers.{index}.self_attn.{part}_layernorm.norms"
            weights = (StoredTensor(f"{name}.{head}.weight", (attention.head_size,)) for head in range(heads))
            found[f"self_attn.{part}_norm.weight"] = Stacked(tuple(weights))
    return found


FAMILY = Family(read, layer_rules)
