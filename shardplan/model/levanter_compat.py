"""Where Levanter 1.2.dev1644 reads a Hugging Face configuration wrongly, put right here, each with its reason."""

import dataclasses
from collections.abc import Callable
from typing import Any

from shardplan.errors import ConfigError


def prepare_hf_config(hf: Any) -> Any:
    """The transformers configuration `hf`, with the attributes Levanter expects of it."""
    if hf.model_type == "qwen2":
        # QwenConfig.from_hf_config reads `no_bias`, which Qwen2Config never had. Qwen 2 has biases on q, k and v
        # (QwenConfig.attention_config adds those by itself) and none elsewhere.
        hf.no_bias = True
    if hf.model_type == "gpt2" and hf.n_inner not in (None, 4 * hf.n_embd):
        raise ConfigError(f"config.json: n_inner is {hf.n_inner}; Levanter's GPT-2 has 4 x n_embd = {4 * hf.n_embd}")
    return hf


def rotary_scaling(config: Any, hf: Any) -> Any:
    """Mistral and Mixtral configurations drop `rope_scaling`; every type gets what its config.json says."""
    scaling = getattr(hf, "rope_scaling", None)
    if scaling is None or not hasattr(config, "rope"):
        return config
    from levanter.layers.rotary import RotaryEmbeddingsConfig

    return dataclasses.replace(config, rope=RotaryEmbeddingsConfig.from_hf_config(hf.rope_theta, scaling))


def explicit_head_size(config: Any, hf: Any) -> Any:
    """Llama, Mistral and Qwen 2 configurations drop `head_dim` where it is not hidden size / heads."""
    head_dim = getattr(hf, "head_dim", None)
    if head_dim is None or head_dim == config.attention_config().head_size:
        return config
    if not hasattr(config, "head_dim"):
        raise ConfigError(
            f"config.json: head_dim is {head_dim}; Levanter's {hf.model_type} has hidden size / heads = "
            f"{config.attention_config().head_size}"
        )
    return dataclasses.replace(config, head_dim=head_dim)


def gemma_attention(config: Any, hf: Any) -> Any:
    """Gemma configurations do not hand `head_dim`, `query_pre_attn_scalar` and the soft cap to the attention."""
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
    "gemma": (gemma_attention,),
    "gemma2": (gemma_attention,),
    "llama": (explicit_head_size,),
    "mistral": (explicit_head_size,),
    "mixtral": (explicit_head_size,),
    "olmo2": (explicit_head_size,),
    "qwen2": (explicit_head_size,),
}
"""Hugging Face `model_type` -> corrections of the Levanter configuration, in order."""
