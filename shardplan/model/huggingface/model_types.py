"""Lists the supported model types of Hugging Face, and describes how well-known unsupported types differ from them.

Imports no JAX, because configurations are checked before it is imported.
"""

from dataclasses import dataclass

SUPPORTED_TYPES = (
    "apertus", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone4",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_neox",
    "gpt_oss", "gptj", "granite", "hunyuan_v1_moe", "hy_v3", "kimi_k2", "llama", "llama4_text", "llama_nsa",
    "minimax_m2", "ministral3", "mistral", "mistral4", "mixtral", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3",
    "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
"""The model types that shardplan's decoder computes: the keys of `shardplan.decoder.families.FAMILIES`."""
LEFT_OUT_KEYS = {
    "gemma": {
        "hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 16, "vocab_size": 256000,
    },
    "gemma2": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "vocab_size": 256000,
    },
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
    "qwen2": {
        "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32, "num_hidden_layers": 32,
        "vocab_size": 151936,
    },
}  # fmt: skip
"""Model type -> transformers' defaults for sizes that released files leave out, mostly for text models in multimodal
wrappers."""


@dataclass(frozen=True)
class OtherType:
    """The difference between an unsupported model type and the nearest supported type."""

    nearest: str | None
    """A key of `SUPPORTED_TYPES`; None if the model is of another kind altogether."""
    differences: str
    """The features that this type has and the nearest type lacks."""


EXPERTS = "routed experts in place of its MLPs"
HYBRID = "state-space or recurrent layers beside attention, or in place of it"
LINEAR = "linear attention in most layers, and gated attention in the others"
MULTIPLIERS = "multipliers of embeddings, residuals, attention and logits"
NO_DECODER = "an encoder, or an encoder and a decoder"
STACKED_EXPERTS = "rotary positions in three parts, and the weights of all experts of a layer in one tensor"

OTHER_TYPES = {
    "afmoe": OtherType("mixtral", "windows in most layers, gated attention, and shared experts"),
    "arcee": OtherType("llama", "an MLP without a gate"),
    "bamba": OtherType(None, HYBRID),
    "bert": OtherType(None, NO_DECODER),
    "bitnet": OtherType("llama", "ternary weights, and norms within attention and MLP"),
    "bloom": OtherType("gpt2", "ALiBi in place of position embeddings"),
    "codegen": OtherType("gpt2", "rotary embeddings, and attention and MLP in parallel"),
    "dbrx": OtherType("mixtral", "layer norms with a mean, and clipped queries, keys and values"),
    "distilbert": OtherType(None, NO_DECODER),
    "ernie4_5": OtherType("llama", "rotary embeddings of neighbouring pairs"),
    "falcon": OtherType("gpt2", "rotary embeddings, attention and MLP in parallel, and shared keys and values"),
    "falcon_h1": OtherType(None, HYBRID),
    "falcon_mamba": OtherType(None, HYBRID),
    "gemma3n": OtherType("gemma2", "embeddings for each layer, several residual streams, and windows in most layers"),
    "gemma3n_text": OtherType(
        "gemma2", "embeddings for each layer, several residual streams, and windows in most layers"
    ),
    "gemma4": OtherType("gemma2", "windows in most layers, and other head sizes in the others"),
    "gemma4_text": OtherType("gemma2", "windows in most layers, and other head sizes in the others"),
    "gpt_bigcode": OtherType("gpt2", "keys and values that all heads share"),
    "gpt_neo": OtherType("gpt2", "windows in every second layer, and attention without scaling"),
    "granitemoe": OtherType("mixtral", MULTIPLIERS),
    "granitemoehybrid": OtherType(None, HYBRID),
    "hunyuan_v1_dense": OtherType("llama", "norms of queries and keys, behind the rotary embeddings"),
    "internlm2": OtherType("llama", "packed projections, and other names of tensors"),
    "jamba": OtherType(None, HYBRID),
    "kimi_linear": OtherType(None, "linear attention in most layers, and latent attention in the others"),
    "lfm2": OtherType(None, "convolutions in most layers"),
    "mamba": OtherType(None, HYBRID),
    "mamba2": OtherType(None, HYBRID),
    "minimax": OtherType("mixtral", "linear attention in some layers"),
    "ministral": OtherType("mistral", "windows in some layers only"),
    "mllama": OtherType("llama", "layers of cross-attention to an image"),
    "mllama_text_model": OtherType("llama", "layers of cross-attention to an image"),
    "mpt": OtherType("gpt2", "ALiBi in place of position embeddings"),
    "nemotron": OtherType("llama", "layer norms with a mean, an MLP without a gate, and rope of a part of each head"),
    "nemotron_h": OtherType(None, HYBRID),
    "olmo": OtherType("llama", "layer norms without weights, and clipped queries, keys and values"),
    "persimmon": OtherType("gpt2", "rotary embeddings of a part of each head, and norms of queries and keys"),
    "phimoe": OtherType("mixtral", "layer norms with a mean, and another choice of experts"),
    "qwen": OtherType("qwen2", "packed projections, and other names of tensors"),
    "qwen2_moe": OtherType("qwen2", f"{EXPERTS}, beside a shared expert"),
    "qwen3_5": OtherType("qwen3", LINEAR),
    "qwen3_5_moe": OtherType("qwen3", f"{LINEAR}, and {EXPERTS}"),
    "qwen3_next": OtherType("qwen3", f"{LINEAR}, and {EXPERTS}"),
    "qwen3_vl_moe": OtherType("qwen3_moe", STACKED_EXPERTS),
    "qwen3_vl_moe_text": OtherType("qwen3_moe", STACKED_EXPERTS),
    "recurrent_gemma": OtherType("gemma2", HYBRID),
    "roberta": OtherType(None, NO_DECODER),
    "rwkv": OtherType(None, HYBRID),
    "t5": OtherType(None, NO_DECODER),
    "whisper": OtherType(None, NO_DECODER),
    "xglm": OtherType("gpt2", "sinusoidal positions"),
    "zamba2": OtherType(None, HYBRID),
}
"""Unsupported `model_type` -> how it differs from supported types, according to the code of transformers 5.24."""
