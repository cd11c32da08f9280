"""Checkpoints of the families of the decoder, with logits of transformers.

A family is a row of `FAMILIES`, the name of its folder, which docs/howto/add-a-family.md says how to make. It has
a checkpoint with the names of the released ones, and logits that transformers computes in float64; `own_error` is the
largest error of transformers' own logits in float32.
"""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from shardplan.model.huggingface.hf_config import read_config
from shardplan.storage import open_folder

FOLDER = Path(__file__).parent / "golden" / "families"
FAMILIES = (
    "apertus", "cohere", "cohere2", "cohere_plus", "deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v32",
    "dots1", "ernie4_5_moe", "exaone4", "exaone4_full", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "gpt_neox_sequential", "gpt_oss", "gptj", "granite", "hunyuan_v1_moe",
    "hy_v3", "kimi_k2", "llama4", "llama4_text", "minimax_m2", "ministral3", "mistral4", "olmo3", "olmoe", "opt",
    "opt_350m", "phi", "phi3", "phi3_short", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "stablelm_12b",
    "starcoder2",
)  # fmt: skip
ON_ONE_DEVICE = (
    "ernie4_5_moe_interval", "gemma2", "glm4_moe_groups", "hunyuan_v1_moe_topk", "mistral", "qwen2", "qwen3_moe_mixed",
)  # fmt: skip
"""Checkpoints whose logits are compared on one device: types that Levanter's classes compute, and variants of others.

Variants have experts in some layers only, groups of experts, or other numbers of them in each layer.
"""
BUFFERS = (".attention.bias", ".attn.bias", ".inv_freq", ".masked_bias")
"""Ends of names of stored tensors that transformers computes anew: they need not be saved."""
CONSTANTS = (".beta", ".eps")
"""Ends of names of stored tensors that are no parameters, and that transformers reads."""


def tolerance(name):
    """Twice the error of transformers in float32, for sums in another order."""
    return 2 * float(np.load(FOLDER / name / "golden.npz")["own_error"]) + 1e-6


def config_of(name):
    """The config.json of the language model of a folder, as shardplan reads it."""
    return read_config(None, open_folder(str(FOLDER / name)))


def text_tensors(name):
    """The tensors of the decoder of a folder, by the names that they have without an image model beside it.

    Those of an indexer of positions, and of a layer for predicting further tokens, are ignored as images are.
    """
    ignored = ("vision_tower", "vision_model", ".indexer.", f"model.layers.{config_of(name).get('num_hidden_layers')}.")
    tensors = {}
    for path in sorted((FOLDER / name).glob("*.safetensors")):
        for key, value in load_file(path).items():
            if not any(part in key for part in ignored):
                tensors[key.removeprefix("language_model.")] = value
    return tensors


def saved_tensors(name):
    """The tensors that a saved checkpoint must have: those of the language model, without what is computed anew."""
    tensors = text_tensors(name).items()
    return {key: value for key, value in tensors if "multi_modal_projector" not in key and not key.endswith(BUFFERS)}
