"""GPT-2: learned position embeddings, and weights stored as {inputs, outputs}. Source: Radford et al., 2019."""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture, PositionTable
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import ACTIVATIONS
from shardplan.decoder.families.common.rules import Rules, layer_norm_rules, top_rules
from shardplan.decoder.names import Sliced, StoredTensor, Transposed
from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig, NormKind
from shardplan.decoder.parts.segments import divide_layers


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("gpt2", None), "config.json"))
    >>> fields["position_table"], fields["segments"][0].layers[0].attention.rotary
    (PositionTable(rows=1024, first=0), None)
    """
    keys.only("add_cross_attention", [False])
    keys.take("reorder_and_upcast_attn")  # scores are float32 anyway
    embed, heads = keys.integer("n_embd", "hidden_size"), keys.integer("n_head", "num_attention_heads")
    positions = keys.integer("n_positions", "max_position_embeddings", default=1024)
    norm = NormConfig(NormKind.LAYER, keys.number("layer_norm_epsilon", default=1e-5), has_bias=True)
    if embed % heads:
        keys.refuse("n_head", heads, f"a divisor of n_embd, {embed}")
    scale = (embed // heads) ** -0.5 if keys.flag("scale_attn_weights", default=True) else 1.0
    attention = GroupedAttention(heads, heads, embed // heads, has_bias=True, has_output_bias=True, scale=scale)
    activation = keys.choice("activation_function", choices=ACTIVATIONS, default="gelu_new")
    mlp = MlpConfig(keys.integer("n_inner", default=4 * embed), activation, has_bias=True)
    layers = [LayerConfig(attention, mlp, norm)] * keys.integer("n_layer", "num_hidden_layers")
    if keys.flag("scale_attn_by_inverse_layer_idx", default=False):  # layers count from 1 here
        layers = [replace(layer, attention=replace(attention, scale=scale / i)) for i, layer in enumerate(layers, 1)]
    return {
        "max_seq_len": positions,
        "embed": embed,
        "segments": divide_layers(layers),
        "norm": norm,
        "is_tied": keys.flag("tie_word_embeddings", default=True),
        "position_table": PositionTable(positions),
    }


def rules(config: Architecture, vocab: int) -> Rules:
    """Return the rules that make parameters outside of layers from checkpoint tensors, by path.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> rules(DecoderConfig.from_hf_config(read_config("gpt2", None)), vocab=50257)["position_embedding"]
    StoredTensor(name='transformer.wpe.weight', shape=(1024, 768))
    """
    found = top_rules(config, vocab, "transformer", "wte", "ln_f")
    found["position_embedding"] = StoredTensor("transformer.wpe.weight", (config.max_seq_len, config.embed))
    return found


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("gpt2", None))
    >>> k_proj = layer_rules(config, config.segments[0].layers[0], 0)["self_attn.k_proj.weight"]
    >>> k_proj.start, k_proj.stop, k_proj.rule.rule
    (768, 1536, StoredTensor(name='transformer.h.0.attn.c_attn.weight', shape=(768, 2304)))
    """
    at, embed = f"transformer.h.{index}", config.embed
    norms = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    joint_weight = Transposed(StoredTensor(f"{at}.attn.c_attn.weight", (embed, 3 * embed)), (1, 0))
    joint_bias = StoredTensor(f"{at}.attn.c_attn.bias", (3 * embed,))
    found = layer_norm_rules(layer, at, embed, norms)
    for i, part in enumerate(("q_proj", "k_proj", "v_proj")):
        found[f"self_attn.{part}.weight"] = Sliced(joint_weight, 0, i * embed, (i + 1) * embed)
        found[f"self_attn.{part}.bias"] = Sliced(joint_bias, 0, i * embed, (i + 1) * embed)
    found |= _linear_rules("self_attn.o_proj", f"{at}.attn.c_proj", embed, embed)
    found |= _linear_rules("mlp.up_proj", f"{at}.mlp.c_fc", layer.dense_mlp.size, embed)
    return found | _linear_rules("mlp.down_proj", f"{at}.mlp.c_proj", embed, layer.dense_mlp.size)


def _linear_rules(path: str, name: str, outputs: int, inputs: int) -> Rules:
    """Return the loading rules of a projection whose weight is stored as {inputs, outputs}."""
    weight = Transposed(StoredTensor(f"{name}.weight", (inputs, outputs)), (1, 0))
    return {f"{path}.weight": weight, f"{path}.bias": StoredTensor(f"{name}.bias", (outputs,))}


FAMILY = Family(read, layer_rules, rules, stores_inputs_first=True)
