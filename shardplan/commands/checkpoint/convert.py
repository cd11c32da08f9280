"""`shardplan checkpoint convert --config C --to FOLDER`: write a checkpoint in another format, dtype or location."""

from collections.abc import Sequence

from shardplan.commands.plan.plan import dry_run
from shardplan.config import parse_config
from shardplan.config.command_flags import ConvertCommand
from shardplan.errors import ConfigError


def main(argv: Sequence[str]) -> None:
    """Run `shardplan checkpoint convert` with the arguments `argv`."""
    config = parse_config(argv, ConvertCommand)
    if not config.to:
        raise ConfigError("convert needs a folder to write to: --to FOLDER")
    if config.dry_run:
        dry_run(config)
        return
    if config.json is not None:
        raise ConfigError("json is for the Plan of a --dry_run; leave it out")
    from shardplan.checkpoint.saving.target import open_target

    # before the load, and before JAX is imported: a folder that cannot be written to fails at once
    target = open_target(config.to, config.format)
    from shardplan.checkpoint.convert import convert_checkpoint
    from shardplan.runtime.devices import is_first_process
    from shardplan.runtime.progress import print_note

    summary = convert_checkpoint(config, target.ref, config.format)
    if is_first_process():
        print_note(summary)
