"""Corrects the source's config.json so that it describes the checkpoint that is written.

A config.json is copied from a checkpoint, or made from a Levanter configuration. Either may have another type, another
head or other names in mind than those of the tensors that are written beside it.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from shardplan.model.huggingface.model_types import SUPPORTED_TYPES
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import transformers_config

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys on the quantization of stored weights, which are removed because written weights are never quantized."""
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys for the type of the weights: in transformers 5, and in older versions."""
UNMAPPED_CLASSES = {"kimi_k2": "DeepseekV3ForCausalLM", "mistral4": "Mistral4ForCausalLM"}
"""Model type -> causal language model class, for types that transformers does not map to a class."""


def describe_written(config: Mapping[str, Any], model: Any, dtypes: Mapping[np.dtype, int]) -> dict[str, Any]:
    """Return `config` with every key corrected that does not describe the written model.

    >>> config = {"model_type": "own_model", "torch_dtype": "float32", "quantization_config": {"quant_method": "fp8"}}
    >>> describe_written(config, None, {np.dtype(np.float16): 1000, np.dtype(np.float32): 10})
    {'model_type': 'own_model', 'torch_dtype': 'float16'}

    Args:
        config: content of a config.json.
        model: the Levanter model; only shapes and types of its arrays are used.
        dtypes: type -> bytes written in this type; config.json names the type with the most bytes.
    """
    result = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    written = str(max(dtypes, key=lambda dtype: dtypes[dtype]))
    for key in [key for key in DTYPE_KEYS if key in config] or ["torch_dtype"]:
        result[key] = written
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_TYPES:
        return result
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    read = transformers_config(copy.deepcopy(result))  # transformers adds keys to nested mappings
    expected = {
        "architectures": [{**UNMAPPED_CLASSES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}[model_type]],
        "tie_word_embeddings": getattr(model, "lm_head", None) is None,
        "vocab_size": model.Vocab.size,
    }
    for key, value in expected.items():
        if getattr(read, key, None) != value:
            result[key] = value
    return result


def count_bytes_by_dtype(model: Any) -> Counter[np.dtype]:
    """Return the bytes of a model's arrays by type.

    >>> count_bytes_by_dtype({"up_proj": np.ones((8, 4), np.float16), "norm": np.ones(4, np.float32)})
    Counter({dtype('float16'): 64, dtype('float32'): 16})
    """
    counts: Counter[np.dtype] = Counter()
    for _, leaf in named_leaves(model):
        array: jax.Array = getattr(leaf, "array", leaf)
        counts[np.dtype(array.dtype)] += array.nbytes
    return counts
