"""`python -m shardplan.checkpoint --config C --schedule`: which process reads what of a checkpoint, and for how long.

Needs no accelerator, and no weights beyond config.json.
"""

import os
import sys
from collections.abc import Sequence

from shardplan.commands.convert import convert
from shardplan.commands.output import beside, check_targets, write_json
from shardplan.commands.run import run
from shardplan.config import Config
from shardplan.errors import ConfigError


def main(config: Config) -> None:
    """Print the read schedule of the plan."""
    if not config.schedule:
        raise ConfigError("nothing to do; --schedule prints which process reads what, and convert writes it out")
    check_targets(config)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardplan.checkpoint.forecast import forecast
    from shardplan.report.schedule import print_forecast
    from shardplan.report.tables import console
    from shardplan.search.make_plan import check_model, make_plan, model_of, with_plan

    config, given = with_plan(config)
    model = model_of(config)
    plan = given or make_plan(config, model)
    check_model(plan, model)
    found = forecast(config, plan, model)
    if config.json is not None:
        write_json(found.to_json(), config.json)
    print_forecast(found, plan, console(beside(config) if config.json == "-" else sys.stdout))


def run_command(argv: Sequence[str]) -> int:
    """`shardplan checkpoint ARGV`; returns the exit code."""
    return run(main, "shardplan checkpoint", argv, {"convert": convert})
