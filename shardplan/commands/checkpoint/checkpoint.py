"""`shardplan checkpoint --config C --schedule`: print the bytes that each process reads, and the seconds it takes.

Needs no accelerator, and no weights beyond config.json.
"""

from collections.abc import Sequence

from shardplan.commands.inputs import input_paths
from shardplan.commands.output import check_outputs, side_stream, write_json
from shardplan.config import parse_config
from shardplan.config.command_flags import CheckpointCommand
from shardplan.config.given_plan import load_given_plan
from shardplan.config.model_config import check_model_config
from shardplan.errors import ConfigError
from shardplan.runtime.environment import compute_on_cpu


def main(argv: Sequence[str]) -> None:
    """Run `shardplan checkpoint` with the arguments `argv`."""
    config = parse_config(argv, CheckpointCommand)
    if not config.schedule:
        raise ConfigError(
            "nothing to do; --schedule prints which process reads what, `checkpoint inspect` what a checkpoint is, and "
            "`checkpoint convert` writes a copy"
        )
    check_outputs(input_paths(config), json=config.json)
    compute_on_cpu()
    config, given = load_given_plan(config)
    check_model_config(config)
    from shardplan.checkpoint.forecast import forecast_reads
    from shardplan.report.console import console
    from shardplan.report.schedule import print_forecast
    from shardplan.search.given_plan import check_model
    from shardplan.search.make_plan import make_plan, model_from_config

    model = model_from_config(config)
    plan = given or make_plan(config, model)
    check_model(plan, model)
    forecast = forecast_reads(config, plan, model)
    if config.json is not None:
        write_json(forecast.to_json(), config.json)
    print_forecast(forecast, plan, console(side_stream(config.json)))
