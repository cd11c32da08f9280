"""Mixtral: Mistral with experts in place of its MLPs. Source: https://arxiv.org/abs/2401.04088."""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    ACTIVATIONS,
    architecture,
    read_heads,
    read_rms_norm,
    read_uniform_window,
)
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import Rules, attention_rules, layer_norm_rules
from shardplan.decoder.names import Stacked, StoredTensor, Transposed
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.experts import ExpertsConfig, GatedActivation
from shardplan.decoder.parts.router import RouterConfig, Scoring

WEIGHTS = {"gate": "w1", "up": "w3", "down": "w2"}
"""Parameter of the experts -> its name in checkpoints."""
TRAINING_KEYS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Keys that only affect training."""


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Return the fields of the `Architecture` of a config.json."""
    keys.take(*TRAINING_KEYS)
    heads, norm = read_heads(keys, kv_heads=8), read_rms_norm(keys, 1e-5)
    rotary = read_rotary(keys, heads.head_size, 1e6)
    attention = replace(heads, rotary=rotary, window=read_uniform_window(keys, None))
    experts = keys.integer("num_local_experts", "num_experts", default=8)
    per_token = keys.integer("num_experts_per_tok", default=2)
    if per_token > experts:
        keys.refuse("num_experts_per_tok", per_token, f"at most num_local_experts, {experts}")
    activation = keys.choice("hidden_act", choices=ACTIVATIONS, default="silu")
    router = RouterConfig(experts, per_token, Scoring.SOFTMAX_OF_CHOSEN, is_normalised=False)
    mlp = ExpertsConfig(router, keys.integer("intermediate_size"), GatedActivation(activation))
    layers = [LayerConfig(attention, mlp, norm)] * keys.integer("num_hidden_layers")
    return architecture(keys, layers, norm, positions=131072)


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return path of a parameter in a layer -> its rule: every expert has tensors of its own."""
    at, embed, mlp = f"model.layers.{index}", config.embed, layer.mlp
    assert isinstance(mlp, ExpertsConfig)
    found: Rules = {
        **attention_rules(layer.attention, f"{at}.self_attn", embed),
        **layer_norm_rules(layer, at, embed),
        "mlp.router.weight": StoredTensor(f"{at}.block_sparse_moe.gate.weight", (mlp.router.experts, embed)),
    }
    for parameter, name in WEIGHTS.items():
        shape = (embed, mlp.size) if parameter == "down" else (mlp.size, embed)
        each = [f"{at}.block_sparse_moe.experts.{expert}.{name}.weight" for expert in range(mlp.router.experts)]
        found[f"mlp.experts.{parameter}"] = Stacked(
            tuple(Transposed(StoredTensor(tensor, shape), (1, 0)) for tensor in each)
        )
    return found


FAMILY = Family(read, layer_rules)
