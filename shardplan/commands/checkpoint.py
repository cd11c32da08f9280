"""`shardplan checkpoint --config C --schedule`: print which process reads what of a checkpoint, and for how long.

Needs no accelerator, and no weights beyond config.json.
"""

import os
from collections.abc import Sequence

from shardplan.commands.output import check_json_target, side_stream, write_json
from shardplan.config import parse_config
from shardplan.config.command_flags import CheckpointCommand
from shardplan.errors import ConfigError


def main(argv: Sequence[str]) -> None:
    """Run `shardplan checkpoint` with the arguments `argv`."""
    config = parse_config(argv, CheckpointCommand)
    if not config.schedule:
        raise ConfigError(
            "nothing to do; --schedule prints which process reads what, and `checkpoint convert` writes a copy"
        )
    check_json_target(config.json)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardplan.checkpoint.forecast import forecast_reads
    from shardplan.report.schedule import print_forecast
    from shardplan.report.tables import console
    from shardplan.search.given_plan import check_model, load_given_plan
    from shardplan.search.make_plan import make_plan, model_from_config

    config, given = load_given_plan(config)
    model = model_from_config(config)
    plan = given or make_plan(config, model)
    check_model(plan, model)
    found = forecast_reads(config, plan, model)
    if config.json is not None:
        write_json(found.to_json(), config.json)
    print_forecast(found, plan, console(side_stream(config.json)))
