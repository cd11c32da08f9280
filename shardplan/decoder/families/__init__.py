"""The families of models that the decoder supports; each module has one family, or a few similar ones.

A family has a function that reads a config.json, and a function that returns the rules of a layer's parameters.
"""

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.families import (
    apertus,
    cohere,
    deepseek,
    dots,
    ernie,
    exaone4,
    gemma,
    glm,
    glm_latent,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    hunyuan,
    llama,
    llama4,
    llama_nsa,
    minimax,
    mistral,
    mistral4,
    mixtral,
    olmo,
    opt,
    phi,
    phi3,
    qwen,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from shardplan.decoder.families.common.family import Family

FAMILIES: dict[str, Family] = {
    "apertus": apertus.FAMILY,
    "cohere": cohere.COHERE,
    "cohere2": cohere.COHERE2,
    "deepseek_v2": deepseek.DEEPSEEK_V2,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "deepseek_v32": deepseek.DEEPSEEK_V32,
    "dots1": dots.FAMILY,
    "ernie4_5_moe": ernie.FAMILY,
    "exaone4": exaone4.FAMILY,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3,
    "glm": glm.GLM,
    "glm4": glm.GLM4,
    "glm4_moe": glm.GLM4_MOE,
    "glm4_moe_lite": glm_latent.GLM4_MOE_LITE,
    "glm_moe_dsa": glm_latent.GLM_MOE_DSA,
    "gpt2": gpt2.FAMILY,
    "gpt_neox": gpt_neox.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "gptj": gptj.FAMILY,
    "granite": granite.FAMILY,
    "hunyuan_v1_moe": hunyuan.V1_MOE,
    "hy_v3": hunyuan.V3,
    "kimi_k2": deepseek.DEEPSEEK_V3,
    "llama": llama.FAMILY,
    "llama4_text": llama4.FAMILY,
    "llama_nsa": llama_nsa.FAMILY,
    "minimax_m2": minimax.FAMILY,
    "ministral3": mistral.MINISTRAL3,
    "mistral": mistral.FAMILY,
    "mistral4": mistral4.FAMILY,
    "mixtral": mixtral.FAMILY,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "olmoe": olmo.OLMOE,
    "opt": opt.FAMILY,
    "phi": phi.FAMILY,
    "phi3": phi3.FAMILY,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen.QWEN3_MOE,
    "seed_oss": seed_oss.FAMILY,
    "smollm3": smollm3.FAMILY,
    "stablelm": stablelm.FAMILY,
    "starcoder2": starcoder2.FAMILY,
}
"""Hugging Face `model_type` -> its family."""


def family_of(config: Architecture) -> Family:
    """Return the family of a configuration.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> family_of(DecoderConfig.from_hf_config(read_config("kimi-k2", None))) is deepseek.DEEPSEEK_V3
    True
    """
    return FAMILIES[config.family]
