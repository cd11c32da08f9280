"""`shardplan checkpoint inspect REF`: print the facts of a checkpoint, and with a slice the bytes per device.

Reads config.json, index and headers, and no weights; needs no accelerator.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardplan.commands.inputs import input_paths
from shardplan.commands.output import check_outputs, side_stream, write_json
from shardplan.config import parse_config
from shardplan.config.command_flags import InspectCommand
from shardplan.config.given_plan import load_given_plan
from shardplan.errors import ConfigError, ShardplanError
from shardplan.plan.plan import Plan
from shardplan.runtime.environment import compute_on_cpu

if TYPE_CHECKING:
    from shardplan.checkpoint.inspection import InspectedCheckpoint, PlannedLoad

GB = 1e9
"""Bytes per GB, the unit of bandwidths."""


def main(argv: Sequence[str]) -> None:
    """Run `shardplan checkpoint inspect` with the arguments `argv`.

    Raises:
        ShardplanError: a part of the checkpoint cannot be used; the known facts are printed first.
    """
    config = parse_config(argv, InspectCommand)
    check_outputs(input_paths(config), json=config.json)
    compute_on_cpu()
    config, given = load_given_plan(config)
    if not config.model.ref:
        raise ConfigError("inspect needs a checkpoint, as in `shardplan checkpoint inspect org/model`")
    from shardplan.checkpoint.inspection import inspect_checkpoint
    from shardplan.report.checkpoint import print_inspection
    from shardplan.report.console import console

    found, load = inspect_checkpoint(config), None
    try:
        load = _plan_load(config, given, found)
    except ShardplanError as error:
        found = found.with_problem(error)
    if config.json is not None:
        planned = {"load": None, "devices": None} if load is None else load.to_json()
        write_json({**found.facts.to_json(), **planned}, config.json)
    print_inspection(found.facts, load, console(side_stream(config.json)))
    if found.facts.problem is not None:
        raise found.facts.problem


def _plan_load(config: InspectCommand, given: Plan | None, found: "InspectedCheckpoint") -> "PlannedLoad | None":
    """Return bytes per device and seconds of a load; None if configuration and checkpoint do not determine them.

    Raises:
        InfeasibleError: no plan fits.
        ConfigError: the given Plan is for another model.
    """
    from shardplan.checkpoint.forecast import forecast_match
    from shardplan.checkpoint.inspection import load_by_one_process, load_by_plan
    from shardplan.search.given_plan import check_model
    from shardplan.search.make_plan import make_plan

    model, match, weights = found.model, found.match, found.facts.weights
    if model is None or match is None or weights is None:
        return None
    bandwidth = None if config.bandwidth is None else config.bandwidth * GB
    if config.is_planned:
        plan = given or make_plan(config, model)
        check_model(plan, model)
        return load_by_plan(plan, forecast_match(match, plan, model, config.load, bandwidth))
    return None if bandwidth is None else load_by_one_process(weights, bandwidth)
