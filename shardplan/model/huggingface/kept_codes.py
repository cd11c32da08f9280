"""Checks whether weights can stay on the devices as they are stored (`load.keep_dtype`). Imports no JAX.

`read_config` puts the answer into the config.json under `KEEP_KEY`, as it does with the class of the model, so that
later steps build the model that was planned.
"""

from collections.abc import Mapping
from typing import Any

from shardplan.errors import ConfigError
from shardplan.model.huggingface.quantization import ByteCodes
from shardplan.model.huggingface.read_quantization import read_quantization

KEEP_KEY = "load.keep_dtype"
"""Key that `read_config` adds to a config.json if weights stay as they are stored."""
KEPT_TYPES = ("float8_e4m3fn", "float8_e5m2")
"""Types of codes that can stay on the devices."""


def stored_codes(hf_config: Mapping[str, Any]) -> ByteCodes | None:
    """Return how a checkpoint stores its weights, if devices can keep them in this form; else None."""
    found = read_quantization(hf_config, "config.json")
    return found if isinstance(found, ByteCodes) and found.dtype in KEPT_TYPES else None


def check_can_keep(hf_config: Mapping[str, Any], where: str) -> None:
    """Check that a checkpoint's weights can stay on the devices in their stored form.

    Args:
        where: name of the config.json, for messages.

    Raises:
        ConfigError: the weights are not quantized, or are stored as codes that devices cannot keep.
    """
    found = read_quantization(hf_config, where)
    if found is None:
        raise ConfigError(
            f"load.keep_dtype keeps weights in fp8, and {where} has no quantization_config: weights are plain numbers; "
            "leave it out, or name a checkpoint in fp8"
        )
    if stored_codes(hf_config) is None:
        stored = f"{found.method} ({found.dtype})" if isinstance(found, ByteCodes) else found.method
        raise ConfigError(
            f"load.keep_dtype keeps weights in fp8, and {where} says that they are stored in {stored}; leave it out: "
            "they are loaded as workload.param_dtype"
        )


def kept_codes(hf_config: Mapping[str, Any]) -> ByteCodes | None:
    """Return how the weights stay on the devices; None if they are decoded at loading.

    Args:
        hf_config: the content of a config.json, as `read_config` returns it.
    """
    return stored_codes(hf_config) if hf_config.get(KEEP_KEY) else None
