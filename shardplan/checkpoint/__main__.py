"""Checkpoints, before they are loaded and after.

`python -m shardplan.checkpoint --plan plan.json --schedule`: which process reads what of a checkpoint, and how long
that takes; needs no accelerator, and no weights beyond config.json.
`python -m shardplan.checkpoint convert --config C --to FOLDER`: write it out in another format, type or place.
"""

import os
import sys
from collections.abc import Sequence

from shardplan.config import Config, load
from shardplan.errors import ConfigError
from shardplan.plan.__main__ import beside, check_targets, write_json
from shardplan.plan.__main__ import main as dry_run
from shardplan.runtime.command import run


def main(config: Config) -> None:
    """Print the read schedule of the plan."""
    if not config.schedule:
        raise ConfigError("nothing to do; --schedule prints which process reads what, and convert writes it out")
    check_targets(config)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardplan.checkpoint.forecast import forecast
    from shardplan.plan.planner import check_model, make_plan, model_of, with_plan
    from shardplan.report.schedule import print_forecast
    from shardplan.report.tables import console

    config, given = with_plan(config)
    model = model_of(config)
    plan = given or make_plan(config, model)
    check_model(plan, model)
    found = forecast(config, plan, model)
    if config.json is not None:
        write_json(found.to_json(), config.json)
    print_forecast(found, plan, console(beside(config) if config.json == "-" else sys.stdout))


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


SUBCOMMANDS = {"convert": convert}

if __name__ == "__main__":
    raise SystemExit(run(main, "shardplan.checkpoint", subcommands=SUBCOMMANDS))
