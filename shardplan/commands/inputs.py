"""The files and folders that a command reads."""

from pathlib import Path

from shardplan.config import PlanConfig
from shardplan.config.command_flags import DoctorCommand, EvalCommand, PlanCommand, TrainCommand, VerifyCommand


def input_paths(config: PlanConfig) -> list[str]:
    """Return the paths that a command reads because the configuration names them: files, and folders of weights."""
    paths = [*config.files, config.plan, config.model.ref, config.model.adapter, config.model.config]
    match config:
        case PlanCommand():
            paths += [config.lint, config.verdicts]
        case VerifyCommand():
            paths += config.against
        case EvalCommand() | DoctorCommand():
            paths.append(config.data.path)
    return [path for path in paths if path]


def local_inputs(config: EvalCommand) -> dict[str, str]:
    """Return key -> path on each host's disk that an evaluation reads, besides its configuration and plan."""
    from shardplan.storage import is_local

    adapter, texts = config.model.adapter, config.data.path
    inputs = {
        **_local_model(config),
        "model.adapter": adapter if adapter and is_local(adapter) else None,
        "data.path": texts if texts and "://" not in texts else None,
    }
    return {key: path for key, path in inputs.items() if path}


def local_training_inputs(config: TrainCommand) -> dict[str, str]:
    """Return key -> path on each host's disk that a training reads, besides its configuration and plan.

    Levanter's keys are included if their value is a file or folder of this machine.
    """
    inputs = {key: path for key, path in _local_model(config).items() if path}
    for key, value in config.levanter.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str) and each and Path(each).exists():
                inputs[key] = each
    return inputs


def _local_model(config: PlanConfig) -> dict[str, str | None]:
    """Return the paths of the model on the disk of each host."""
    from shardplan.model.bundled_configs import BUNDLED
    from shardplan.storage import is_local

    ref, model = config.model.ref, config.model.config
    return {
        "model.ref": ref if is_local(ref) else None,
        "model.config": model if model not in BUNDLED else None,
    }
