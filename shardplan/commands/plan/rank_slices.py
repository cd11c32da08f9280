"""`shardplan plan --rank_slices v5e v6e-8`: rank slices by tokens per second per chip, or by cost with `--price`."""

import sys

from shardplan.commands.output import write_json
from shardplan.config.command_flags import PlanCommand
from shardplan.config.model_config import check_model_config
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.hardware.slice_selection import parse_prices, select_slices
from shardplan.plan.workload.token_counts import parse_token_count


def plan_slices(config: PlanCommand) -> None:
    """Plan for each of the named slices, and print the ranking.

    Raises:
        ConfigError: a slice, generation or price is unknown, or another flag cannot be combined with the ranking.
        InfeasibleError: no plan fits on any of the slices.
    """
    conflicts = [f"--{name}" for name in ("plan", "verify", "why", "what_if", "report") if getattr(config, name)]
    if conflicts:
        raise ConfigError(f"rank_slices plans for many slices; leave out {' and '.join(conflicts)}")
    prices = parse_prices(config.price)
    tokens = None if config.token_budget is None else parse_token_count("token_budget", config.token_budget)
    select_slices(config.rank_slices)  # raises: a misspelt name is reported before anything is imported
    check_model_config(config)
    from shardplan.explain.rank_slices import rank_slices
    from shardplan.report.console import console
    from shardplan.report.plan.slice_ranking import print_slice_ranking, ranking_json
    from shardplan.runtime.progress import show_steps

    with show_steps("ranking slices") as report:
        ranking = rank_slices(config, config.rank_slices, prices, report=report, tokens=tokens)
    if config.json is not None:
        write_json(ranking_json(ranking), config.json)
    if config.json != "-":
        print_slice_ranking(ranking, console(sys.stdout))
    if not ranking.ranked:
        names = ", ".join(config.rank_slices)
        raise InfeasibleError(f"no plan fits any slice of {names}; several slices have more memory, as in 2xv6e-256")
