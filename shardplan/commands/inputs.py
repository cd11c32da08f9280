"""The files and folders that a command reads."""

from shardplan.config import PlanConfig
from shardplan.config.command_flags import DoctorCommand, EvalCommand, PlanCommand, VerifyCommand


def input_paths(config: PlanConfig) -> list[str]:
    """Return the paths that the configuration names to be read: files, and folders of weights."""
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
    """Return what an evaluation reads from the disk of each host, beside its configuration and plan: key -> path."""
    from shardplan.model.bundled_configs import BUNDLED
    from shardplan.storage import is_local

    ref, adapter, model, texts = config.model.ref, config.model.adapter, config.model.config, config.data.path
    inputs = {
        "model.ref": ref if is_local(ref) else None,
        "model.adapter": adapter if adapter and is_local(adapter) else None,
        "model.config": model if model not in BUNDLED else None,
        "data.path": texts if texts and "://" not in texts else None,
    }
    return {key: path for key, path in inputs.items() if path}
