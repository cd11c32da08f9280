"""Checks, without JAX and Levanter, the config.json of the model that a configuration names."""

from pathlib import Path

from shardplan.config.plan_config import PlanConfig


def check_model_config(config: PlanConfig) -> None:
    """Read the model's config.json, unless it is on another machine.

    Raises:
        ConfigError: the file or the checkpoint's folder does not exist, or does not describe a model.
    """
    from shardplan.model.huggingface.hf_config import read_config
    from shardplan.storage import open_folder

    ref, path = config.model.ref, config.model.config
    if path is not None:
        read_config(path, None, config.model_class, config.load.keep_dtype)
    elif Path(ref).parent.is_dir():
        read_config(None, open_folder(ref), config.model_class, config.load.keep_dtype)
