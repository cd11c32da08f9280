"""Checks of a command's input files that need neither JAX nor Levanter, which take seconds to import."""

from pathlib import Path

from shardplan.config import PlanConfig
from shardplan.config.command_flags import DoctorCommand, EvalCommand, PlanCommand, VerifyCommand


def input_paths(config: PlanConfig) -> list[str]:
    """Return the paths that the configuration names to be read: files, and the folder of the checkpoint."""
    paths = [*config.files, config.plan, config.model.ref, config.model.config]
    match config:
        case PlanCommand():
            paths.append(config.lint)
        case VerifyCommand():
            paths += config.against
        case EvalCommand() | DoctorCommand():
            paths.append(config.data.path)
    return [path for path in paths if path]


def check_model_config(config: PlanConfig) -> None:
    """Read the model's config.json, unless it is on another machine.

    Raises:
        ConfigError: the file or the checkpoint's folder does not exist, or is not that of a model.
    """
    from shardplan.model.hf_config import read_config
    from shardplan.storage import open_folder

    ref, path = config.model.ref, config.model.config
    if path is not None:
        read_config(path, None, config.model.levanter_class)
    elif Path(ref).parent.is_dir():
        read_config(None, open_folder(ref), config.model.levanter_class)
