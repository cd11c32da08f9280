"""`shardplan launch --config C --to gcloud`: print what starts `eval` on every host of the slice, for a launcher."""

from collections.abc import Sequence

from shardplan.commands.inputs import local_inputs
from shardplan.commands.launch.print_script import check_target, print_script
from shardplan.config import parse_config
from shardplan.config.command_flags import LaunchCommand
from shardplan.eval.evaluate import check_evaluation


def main(argv: Sequence[str]) -> None:
    """Run `shardplan launch` with the arguments `argv`."""
    config = parse_config(argv, LaunchCommand)
    target = check_target(config.to)
    check_evaluation(config)
    print_script(target, argv, config, config.launch, config.output, local_inputs(config))
