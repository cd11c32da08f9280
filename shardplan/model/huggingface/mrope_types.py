"""Reads text models with three-part rotary positions (mrope) as the supported types that equal them for pure text.

A token of an image has a time, a row and a column, each of which rotates some channels of a head. The three positions
of a token of text are equal, so that every channel is rotated by the ordinary position, whichever part it belongs to:
with no image, each of these models computes what a supported type computes. Source: `apply_multimodal_rotary_pos_emb`,
`apply_interleaved_mrope` and the text models of transformers 5.12.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardplan.errors import ConfigError

ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""Keys of a config.json that describe rotary embeddings."""
PART_KEYS = ("mrope_section", "mrope_interleaved")
"""Keys of rotary embeddings that assign channels to the three parts of a position."""


@dataclass(frozen=True)
class MropeType:
    """The supported type that gives the same results on pure text as a type with mrope."""

    type: str
    """A key of `SUPPORTED_TYPES`."""
    defaults: Mapping[str, Any]
    """Values of absent keys in transformers, where they differ from the supported type's defaults."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the supported type reads and this type lacks -> the value that this type computes with."""
    derives_head_size: bool = False
    """Whether head_dim is hidden_size / num_attention_heads, unlike the supported type's default."""


QWEN2_VL = MropeType(
    "qwen2",
    {
        "hidden_size": 8192, "intermediate_size": 29568, "max_position_embeddings": 32768, "max_window_layers": 80,
        "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "sliding_window": 4096, "vocab_size": 152064,
    },
)  # fmt: skip
QWEN3_VL = MropeType(
    "qwen3",
    {
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 22016, "max_position_embeddings": 128000,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6,
        "rope_theta": 5e5, "vocab_size": 151936,
    },
    {"use_sliding_window": False},
)  # fmt: skip
GLM4V = MropeType(
    "glm4",
    {
        "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "vocab_size": 151552,
    },
    {"attention_bias": True},
    derives_head_size=True,
)  # fmt: skip
GLM4V_MOE = MropeType(
    "glm4_moe",
    {
        "attention_bias": True, "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944,
        "max_position_embeddings": 65536, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "routed_scaling_factor": 1.0, "topk_group": 1, "vocab_size": 151424,
    },
    {"use_qk_norm": False},
)  # fmt: skip
MROPE_TYPES = {
    "glm4v_moe_text": GLM4V_MOE, "glm4v_text": GLM4V, "qwen2_5_vl_text": QWEN2_VL, "qwen2_vl_text": QWEN2_VL,
    "qwen3_vl_text": QWEN3_VL,
}  # fmt: skip
"""Model type of a text model with mrope -> how its pure text is computed."""


def read_mrope_type(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate a text model's mrope keys to the supported type; return other configurations unchanged.

    >>> rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    >>> read_mrope_type({"model_type": "qwen2_vl_text", "rope_scaling": rope}, "config.json")["rope_scaling"]
    {'type': 'default'}

    Args:
        values: the keys of a text model, with a `model_type`.
        where: name of the file, for messages.

    Raises:
        ConfigError: a key has a value that this type does not have.
    """
    own = MROPE_TYPES.get(values["model_type"])
    if own is None:
        return dict(values)
    result = {**own.defaults, **values, "model_type": own.type}
    fixed = {**own.fixed, **({"head_dim": _head_size(result, where)} if own.derives_head_size else {})}
    for key, value in fixed.items():
        if values.get(key) not in (None, value):
            raise ConfigError(
                f"{where}: {key} is {values[key]!r}, and transformers computes a {values['model_type']!r} with "
                f"{value!r}; remove it"
            )
    result |= fixed
    for key in ROPE_KEYS:
        if isinstance(result.get(key), Mapping):
            result[key] = _without_parts(result[key])
    return result


def _head_size(values: Mapping[str, Any], where: str) -> int:
    """Return hidden_size / num_attention_heads."""
    embed, heads = values["hidden_size"], values["num_attention_heads"]
    if type(embed) is not int or type(heads) is not int or heads < 1 or embed % heads:
        raise ConfigError(f"{where}: num_attention_heads is {heads!r}; it must be a divisor of hidden_size, {embed!r}")
    return embed // heads


def _without_parts(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary embeddings with one position for all channels."""
    kinds = {key: "default" for key in ("rope_type", "type") if rope.get(key) == "mrope"}
    return {key: value for key, value in rope.items() if key not in PART_KEYS} | kinds
