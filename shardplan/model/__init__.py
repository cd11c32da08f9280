"""From a Hugging Face config.json to the named axes of the Levanter model."""

from shardplan.model.axes import ModelAxes, Parameter, inspect_model
from shardplan.model.hf_config import read_config
from shardplan.model.registry import SUPPORTED, Model, build_model

__all__ = [
    "SUPPORTED",
    "Model",
    "ModelAxes",
    "Parameter",
    "build_model",
    "inspect_model",
    "read_config",
]
