"""gpt-oss: experts with biases and a clamped activation, sinks of attention, and windows in every other layer.

Source: https://arxiv.org/abs/2508.10925, and modelling code of transformers. Checkpoints have the gates and the
projections up of all experts of a layer in one tensor, whose columns they share by turns.
"""

from dataclasses import replace
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import (
    architecture,
    every,
    read_heads,
    read_rms_norm,
    read_windows,
    with_windows,
)
from shardplan.decoder.families.common.rotary_keys import read_rotary, require_rope
from shardplan.decoder.families.common.rules import Rules, attention_rules, layer_norm_rules, linear_rules
from shardplan.decoder.names import Reshaped, Sliced, StoredTensor
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.experts import ClampedSwish, ExpertsConfig
from shardplan.decoder.parts.mlp.router import RouterConfig, Scoring


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("gpt-oss-20b", None), "config.json"))
    >>> [(layer.attention.window, layer.attention.has_sinks) for layer in fields["segments"][0].layers]
    [(128, True), (None, True)]
    >>> fields["segments"][0].layers[0].mlp.activation
    ClampedSwish(alpha=1.702, limit=7.0)
    """
    # of training, and the positions of the first training, which rope_scaling has as well
    keys.take("initial_context_length", "output_router_logits", "router_aux_loss_coef")
    require_rope(keys)
    heads, norm = read_heads(keys, 64, 8), read_rms_norm(keys, 1e-5)
    has_bias = keys.flag("attention_bias", default=True)
    rotary = read_rotary(keys, heads.head_size, 150000.0)
    attention = replace(heads, rotary=rotary, has_bias=has_bias, has_output_bias=has_bias, has_sinks=True)
    layer = LayerConfig(attention, _read_experts(keys), norm)
    return architecture(keys, with_windows(layer, read_windows(keys, every(2), 128)), norm, positions=131072)


def _read_experts(keys: ConfigKeys) -> ExpertsConfig:
    experts = keys.integer("num_local_experts", "num_experts", default=128)
    per_token = keys.integer("num_experts_per_tok", default=4)
    if per_token > experts:
        keys.refuse("num_experts_per_tok", per_token, f"at most num_local_experts, {experts}")
    alias = keys.take("experts_per_token", default=per_token)
    if alias != per_token:
        keys.refuse("experts_per_token", alias, f"num_experts_per_tok, {per_token}")
    keys.only("hidden_act", ["silu"])
    router = RouterConfig(experts, per_token, Scoring.SOFTMAX_OF_CHOSEN, has_bias=True, is_normalised=False)
    activation = ClampedSwish(keys.number("swiglu_alpha", default=1.702), keys.number("swiglu_limit", default=7.0))
    return ExpertsConfig(router, keys.integer("intermediate_size"), activation, has_bias=True)


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("gpt-oss-20b", None))
    >>> up = layer_rules(config, config.segments[0].layers[0], 0)["mlp.experts.up"].rule
    >>> up.dimension, up.start, up.rule.shape
    (3, 1, (32, 2880, 2880, 2))
    """
    at, embed, mlp = f"model.layers.{index}", config.embed, layer.mlp
    assert isinstance(mlp, ExpertsConfig)
    experts = mlp.router.experts
    return {
        **attention_rules(layer.grouped_attention, f"{at}.self_attn", embed),
        **layer_norm_rules(layer, at, embed),
        **linear_rules("mlp.router", f"{at}.mlp.router", experts, embed, has_bias=True),
        **_in_turns(f"{at}.mlp.experts.gate_up_proj", (experts, embed), mlp.size),
        **_in_turns(f"{at}.mlp.experts.gate_up_proj_bias", (experts,), mlp.size, "_bias"),
        "mlp.experts.down": StoredTensor(f"{at}.mlp.experts.down_proj", (experts, mlp.size, embed)),
        "mlp.experts.down_bias": StoredTensor(f"{at}.mlp.experts.down_proj_bias", (experts, embed)),
    }


def _in_turns(name: str, shape: tuple[int, ...], size: int, suffix: str = "") -> Rules:
    """Return the loading rules of gate and up projections that alternate in the last dimension of a tensor.

    Args:
        shape: the shape of the tensor without its last dimension.
        size: elements of the hidden state of an expert.
        suffix: what follows the names of the parameters.
    """
    pairs = Reshaped(StoredTensor(name, (*shape, 2 * size)), (*shape, size, 2))
    last = len(shape) + 1
    return {
        f"mlp.experts.{parameter}{suffix}": Reshaped(Sliced(pairs, last, i, i + 1), (*shape, size))
        for i, parameter in enumerate(("gate", "up"))
    }


FAMILY = Family(read, layer_rules)
