"""`shardplan launch train --config C --to gcloud`: print what starts `train` on every host of the slice."""

from collections.abc import Sequence

from shardplan.commands.inputs import local_training_inputs
from shardplan.commands.launch.print_script import check_target, print_script
from shardplan.config import parse_config
from shardplan.config.command_flags import LaunchTrainCommand
from shardplan.config.model_config import check_model_config


def main(argv: Sequence[str]) -> None:
    """Run `shardplan launch train` with the arguments `argv`."""
    config = parse_config(argv, LaunchTrainCommand)
    target = check_target(config.to)
    if config.plan is None:
        check_model_config(config)
    print_script(target, argv, config, config.launch, config.output, local_training_inputs(config))
