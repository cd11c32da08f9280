"""Corrects what Levanter 1.2.dev1644 misreads in a Hugging Face configuration, and rejects what it cannot express.

This is the only module of `shardplan.model` that knows how Levanter versions differ. After an upgrade of Levanter,
revise every entry here; tests/unit/test_hf_config.py and tests/golden/test_logits.py check each of them. (The
differences between versions of Levanter's own configuration files are in `shardplan.levanter_config`.)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from shardplan.errors import ConfigError

FIXED_VALUES: dict[str, dict[str, Any]] = {
    "": {"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gpt2": {"scale_attn_weights": True},
}
"""Model type ("" for every type) -> keys that Levanter's models ignore, and the only value that they implement."""

UNIFORM_WINDOW_TYPES = ("mistral", "mixtral")
"""Model types with `sliding_window` in every layer; Levanter's models have no window in some layers only."""


def prepare_hf_config(hf: Any) -> Any:
    """Give the transformers configuration `hf` the attributes that Levanter reads.

    Raises:
        ConfigError: Levanter's model has another MLP size.
    """
    if hf.model_type == "qwen2":
        # QwenConfig.from_hf_config reads `no_bias`, which Qwen2Config never had. Qwen 2 has biases on q, k and v
        # (QwenConfig.attention_config adds those by itself) and none elsewhere.
        hf.no_bias = True
    if hf.model_type == "gpt2" and hf.n_inner not in (None, 4 * hf.n_embd):
        raise ConfigError(
            f"config.json: n_inner is {hf.n_inner}; Levanter's GPT-2 supports only 4 x n_embd = {4 * hf.n_embd}"
        )
    return hf


def correct_levanter_config(config: Any, hf: Any) -> Any:
    """Apply every correction for its model type to the Levanter configuration `config`, read from `hf`.

    Raises:
        ConfigError: Levanter's model cannot express what `hf` says.
    """
    for correct in (_apply_rope_scaling, *CORRECTIONS.get(hf.model_type, ())):
        config = correct(config, hf)
    return config


def sliding_window(hf: Any, position: int) -> int | None:
    """The width in tokens of the window that the attention mask must have; None if `position` tokens all fit in it.

    Raises:
        ConfigError: only some layers have the window.
    """
    window = getattr(hf, "sliding_window", None)
    if window is None or window >= position or not getattr(hf, "use_sliding_window", True):
        return None
    if hf.model_type in UNIFORM_WINDOW_TYPES:
        return window
    raise ConfigError(
        f"workload.position is {position}; some layers of {hf.model_type} attend to {window} tokens only, which "
        f"Levanter's model does not implement; use at most {window}"
    )


def _apply_rope_scaling(config: Any, hf: Any) -> Any:
    """Set `rope`: Mistral and Mixtral configurations drop `rope_scaling`."""
    scaling = getattr(hf, "rope_scaling", None)
    if scaling is None or not hasattr(config, "rope"):
        return config
    from levanter.layers.rotary import RotaryEmbeddingsConfig

    return dataclasses.replace(config, rope=RotaryEmbeddingsConfig.from_hf_config(hf.rope_theta, scaling))


def _apply_head_dim(config: Any, hf: Any) -> Any:
    """Set `head_dim`: Llama, Mistral and Qwen 2 configurations drop it even if it is not hidden size / heads."""
    head_dim = getattr(hf, "head_dim", None)
    if head_dim is None or head_dim == config.attention_config().head_size:
        return config
    if not hasattr(config, "head_dim"):
        raise ConfigError(
            f"config.json: head_dim is {head_dim}; Levanter's {hf.model_type} supports only hidden size / heads = "
            f"{config.attention_config().head_size}"
        )
    return dataclasses.replace(config, head_dim=head_dim)


def _apply_gemma_attention(config: Any, hf: Any) -> Any:
    """Pass `head_dim`, `query_pre_attn_scalar` and the soft cap to the attention, which Gemma configurations do not."""
    base = type(config)

    def attention_config(self: Any) -> Any:
        return dataclasses.replace(
            base.attention_config(self),
            head_dim=self.head_dim,
            scaling_factor=float(getattr(hf, "query_pre_attn_scalar", hf.head_dim)) ** -0.5,
            logits_soft_cap=getattr(hf, "attn_logit_softcapping", None),
        )

    corrected = type(base.__name__, (base,), {"attention_config": attention_config})
    return corrected(**{item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.init})


CORRECTIONS: dict[str, tuple[Callable[[Any, Any], Any], ...]] = {
    "gemma": (_apply_gemma_attention,),
    "gemma2": (_apply_gemma_attention,),
    "llama": (_apply_head_dim,),
    "mistral": (_apply_head_dim,),
    "mixtral": (_apply_head_dim,),
    "olmo2": (_apply_head_dim,),
    "qwen2": (_apply_head_dim,),
}
"""Hugging Face `model_type` -> corrections of the Levanter configuration, in order."""
