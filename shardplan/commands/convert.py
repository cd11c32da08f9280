"""`python -m shardplan.checkpoint convert --config C --to FOLDER`: write a checkpoint in another format or place."""

import sys
from collections.abc import Sequence

from shardplan.commands.plan import main as dry_run
from shardplan.config import load
from shardplan.errors import ConfigError


def convert(argv: Sequence[str]) -> None:
    """`convert --config C --to FOLDER`: load the checkpoint as planned, and write it out."""
    config = load(argv, "shardplan.checkpoint convert")
    if not config.to:
        raise ConfigError("convert needs a folder to write to: --to FOLDER")
    if config.dry_run:
        dry_run(config)
        return
    from shardplan.checkpoint.convert import convert as write_out
    from shardplan.runtime.devices import is_first_process

    done = write_out(config, config.to)
    if is_first_process():
        print(done, file=sys.stderr)
