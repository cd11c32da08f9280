"""Lists keys of config.json that change the computation of some models, and that most supported types do not have.

transformers ignores a key that a type does not have. But if the key means another architecture, like `num_experts` in a
dense model, the file does not describe a model of its `model_type`: with the key ignored, another model would be
planned and evaluated. Keys that do not change the architecture are ignored, as in transformers.

Imports no JAX, because configurations are checked before it is imported.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


def _is_true(value: Any) -> bool:
    return value is True or (not isinstance(value, bool) and bool(value))


def _is_more_than_one(value: Any) -> bool:
    """Return whether a value is larger than 1: a number, or any number in a list with one per layer."""
    values = value if isinstance(value, list) else [value]
    return any(isinstance(each, int | float) and each > 1 for each in values)


def _is_not_one(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 1


def _is_given(value: Any) -> bool:
    return value is not None


def _has_zero(value: Any) -> bool:
    return isinstance(value, list) and 0 in value


def _has_windows(value: Any) -> bool:
    return isinstance(value, list) and any(each != "full_attention" for each in value)


@dataclass(frozen=True)
class ForeignKey:
    """A key that changes the computation, and the model types that have it."""

    changes: Callable[[Any], bool]
    """Returns whether a value of the key changes the computation."""
    meaning: str
    """Name of the feature that the key gives a model."""
    owners: tuple[str, ...] = ()
    """Supported model types that have this feature, or whose configuration reads the key."""


EXPERTS = "routed experts"
LATENT = "latent attention"
WINDOWS = "windows in some layers"
NO_ROPE = "layers without rotary embeddings"
MULTIPLIER = "a multiplier"
QK_NORM = "norms of queries and keys"
RECURRENT = "recurrent layers"
PARALLEL = "attention and MLP in parallel"
SINKS = "attention sinks"
SHARED = "shared experts"

LATENT_TYPES = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "mistral4",
)  # fmt: skip
"""Types with latent attention, whose experts have DeepSeek's keys."""

FOREIGN_KEYS = {
    "num_experts": ForeignKey(
        _is_more_than_one,
        EXPERTS,
        ("gpt_oss", "hunyuan_v1_moe", "hy_v3", "mixtral", "olmoe", "qwen3_moe", *LATENT_TYPES),
    ),
    "num_local_experts": ForeignKey(
        _is_more_than_one, EXPERTS, ("gpt_oss", "llama4_text", "minimax_m2", "mixtral", *LATENT_TYPES)
    ),
    "n_routed_experts": ForeignKey(_is_more_than_one, EXPERTS, ("dots1", "glm4_moe", *LATENT_TYPES)),
    "moe_num_experts": ForeignKey(_is_more_than_one, EXPERTS, ("ernie4_5_moe",)),
    "num_moe_experts": ForeignKey(_is_more_than_one, EXPERTS),
    "num_experts_per_tok": ForeignKey(
        _is_more_than_one,
        EXPERTS,
        (
            "dots1",
            "glm4_moe",
            "gpt_oss",
            "hy_v3",
            "llama4_text",
            "minimax_m2",
            "mixtral",
            "olmoe",
            "qwen3_moe",
            *LATENT_TYPES,
        ),
    ),
    "n_shared_experts": ForeignKey(_is_true, SHARED, ("dots1", "glm4_moe", *LATENT_TYPES)),
    "num_shared_experts": ForeignKey(_is_true, SHARED, ("hy_v3",)),
    "shared_expert_intermediate_size": ForeignKey(_is_true, SHARED),
    "first_k_dense_replace": ForeignKey(
        _is_true, "first layers without experts", ("dots1", "glm4_moe", "hy_v3", *LATENT_TYPES)
    ),
    "mlp_only_layers": ForeignKey(_is_true, "some layers without experts", ("qwen3_moe",)),
    "kv_lora_rank": ForeignKey(_is_true, LATENT, LATENT_TYPES),
    "q_lora_rank": ForeignKey(_is_true, LATENT, LATENT_TYPES),
    "qk_rope_head_dim": ForeignKey(_is_true, LATENT, LATENT_TYPES),
    "layer_types": ForeignKey(_has_windows, "layers of several kinds", ("gpt_oss", "llama4_text")),
    "sliding_window_pattern": ForeignKey(_is_given, WINDOWS),
    "_sliding_window_pattern": ForeignKey(_is_given, WINDOWS),
    "attention_chunk_size": ForeignKey(_is_given, "attention within chunks", ("llama4_text",)),
    "no_rope_layers": ForeignKey(_has_zero, NO_ROPE, ("llama4_text",)),
    "no_rope_layer_interval": ForeignKey(_is_true, NO_ROPE, ("llama4_text",)),
    "rope_interleaved": ForeignKey(_is_true, "rotary embeddings of neighbouring pairs"),
    "use_mrope": ForeignKey(_is_true, "rotary positions in three parts"),
    "rope_local_base_freq": ForeignKey(_is_given, "rotary embeddings of two bases"),
    "partial_rotary_factor": ForeignKey(
        _is_not_one, "rotary embeddings of a part of each head", ("glm4_moe", "gpt2", "minimax_m2")
    ),
    "rotary_pct": ForeignKey(_is_not_one, "rotary embeddings of a part of each head", ("gpt2",)),
    "attention_sinks": ForeignKey(_is_true, SINKS),
    "attention_sink": ForeignKey(_is_true, SINKS),
    "use_attention_sinks": ForeignKey(_is_true, SINKS),
    "attn_sinks": ForeignKey(_is_true, SINKS),
    "attn_temperature_tuning": ForeignKey(_is_true, "queries that are scaled by their position", ("llama4_text",)),
    "logit_scale": ForeignKey(_is_not_one, MULTIPLIER),
    "logits_scaling": ForeignKey(_is_not_one, MULTIPLIER),
    "lm_head_multiplier": ForeignKey(_is_not_one, MULTIPLIER),
    "embedding_multiplier": ForeignKey(_is_not_one, MULTIPLIER),
    "residual_multiplier": ForeignKey(_is_not_one, MULTIPLIER),
    "attention_multiplier": ForeignKey(_is_given, MULTIPLIER),
    "scale_emb": ForeignKey(_is_not_one, MULTIPLIER),
    "scale_depth": ForeignKey(_is_given, MULTIPLIER),
    "final_logit_softcapping": ForeignKey(_is_true, "a soft cap of logits", ("gemma2",)),
    "attn_logit_softcapping": ForeignKey(_is_true, "a soft cap of attention", ("gemma2",)),
    "query_pre_attn_scalar": ForeignKey(_is_given, "another scale of attention", ("gemma2",)),
    "qk_norm": ForeignKey(_is_true, QK_NORM, ("hy_v3", "olmo2", "qwen3")),
    "use_qk_norm": ForeignKey(
        _is_true, QK_NORM, ("glm4_moe", "hunyuan_v1_moe", "llama4_text", "minimax_m2", "olmo2", "qwen3")
    ),
    "qk_layernorm": ForeignKey(_is_true, QK_NORM, ("olmo2", "qwen3")),
    "clip_qkv": ForeignKey(_is_given, "clipped queries, keys and values"),
    "qkv_bias": ForeignKey(_is_true, "biases of queries, keys and values", ("gpt2", "qwen2")),
    "use_parallel_residual": ForeignKey(_is_true, PARALLEL),
    "use_parallel_block": ForeignKey(_is_true, PARALLEL),
    "parallel_attn": ForeignKey(_is_true, PARALLEL),
    "alibi": ForeignKey(_is_true, "ALiBi in place of position embeddings"),
    "swiglu_limit": ForeignKey(_is_true, "a clamped activation", ("gpt_oss",)),
    "use_bidirectional_attention": ForeignKey(_is_true, "attention to later tokens"),
    "is_encoder_decoder": ForeignKey(_is_true, "an encoder"),
    "add_cross_attention": ForeignKey(_is_true, "cross-attention"),
    "cross_attention_layers": ForeignKey(_is_true, "cross-attention"),
    "num_kv_shared_layers": ForeignKey(_is_true, "layers that share keys and values"),
    "use_cla": ForeignKey(_is_true, "layers that share keys and values"),
    "hidden_size_per_layer_input": ForeignKey(_is_true, "embeddings for each layer"),
    "per_layer_config": ForeignKey(_is_true, "layers of different sizes"),
    "block_configs": ForeignKey(_is_true, "layers of different sizes"),
    "pruned_heads": ForeignKey(_is_true, "layers of different sizes"),
    "linear_num_key_heads": ForeignKey(_is_true, "linear attention"),
    "full_attention_interval": ForeignKey(_is_true, "linear attention"),
    "hybrid_override_pattern": ForeignKey(_is_true, RECURRENT),
    "mamba_d_state": ForeignKey(_is_true, RECURRENT),
    "ssm_state_size": ForeignKey(_is_true, RECURRENT),
    "ssm_cfg": ForeignKey(_is_true, RECURRENT),
}
"""Key -> the values that change the computation, their meaning, and the supported types that have the key."""


def foreign_keys(config: Config, model_type: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, meaning) for each key of a config.json that changes the computation and is foreign to `model_type`.

    >>> list(foreign_keys({"num_experts": 8, "qk_norm": True}, "qwen3"))
    [('num_experts', 'routed experts')]
    """
    for name, key in FOREIGN_KEYS.items():
        is_foreign = name in config and model_type not in key.owners and key.changes(config[name])
        if is_foreign and not _is_neutral(name, config, model_type):
            yield name, key.meaning


READ_BY_OTHERS = frozenset(
    {
        "attention_bias", "max_window_layers", "mlp_bias", "rope_parameters", "rope_scaling", "rope_theta",
        "sliding_window", "use_sliding_window",
    }
)  # fmt: skip
"""Keys that transformers reads for some model types only; in configurations of other types, they have no effect."""


def changes_nothing(name: str, config: Config) -> bool:
    """Return whether a key is known, and either belongs to the model type or has a value that changes nothing.

    >>> changes_nothing("logit_scale", {"model_type": "llama", "logit_scale": 1.0})
    True
    """
    key, model_type = FOREIGN_KEYS.get(name), config["model_type"]
    if key is None:
        return False
    return model_type in key.owners or not key.changes(config[name]) or _is_neutral(name, config, model_type)


def _is_neutral(name: str, config: Config, model_type: str) -> bool:
    """Return whether the value of a key equals the model's built-in behaviour, so that it changes nothing."""
    match name:
        case "query_pre_attn_scalar":  # attention is scaled by the head size
            return bool(config[name] == config.get("head_dim", 256 if model_type == "gemma" else None))
        case "layer_types" if model_type in ("gemma2", "qwen2", "qwen3"):
            return all(each in ("full_attention", "sliding_attention") for each in config[name])
        case "layer_types" if model_type in ("mistral", "mixtral"):  # every layer has the window
            return all(each == "sliding_attention" for each in config[name])
        case "sliding_window_pattern":  # every second layer of Gemma 2 has a window
            return model_type == "gemma2" and config[name] == 2
        case _:
            return False
