"""`shardplan plan --rank_slices v4 v5p`: print the slices of some generations by tokens per second per chip."""

import sys

from shardplan.commands.output import write_json
from shardplan.config.command_flags import PlanCommand
from shardplan.config.model_config import check_model_config
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.hardware import GENERATIONS

ALL = "all"
"""Stands for every generation."""


def plan_slices(config: PlanCommand) -> None:
    """Plan for every named slice of the generations, and print the ranking.

    Raises:
        ConfigError: an unknown generation, or a flag that this does not go with.
        InfeasibleError: no plan fits any of them.
    """
    conflicts = [f"--{name}" for name in ("plan", "verify", "why", "what_if", "report") if getattr(config, name)]
    if conflicts:
        raise ConfigError(f"rank_slices plans for many slices; leave out {' and '.join(conflicts)}")
    for name in config.rank_slices:
        if name not in (*GENERATIONS, ALL):
            valid = ", ".join(sorted((*GENERATIONS, ALL)))
            raise ConfigError(f"rank_slices: unknown generation {name!r}; valid: {valid}")
    generations = list(GENERATIONS) if ALL in config.rank_slices else list(dict.fromkeys(config.rank_slices))
    check_model_config(config)
    from shardplan.explain.rank_slices import rank_slices
    from shardplan.report.slice_ranking import print_slice_ranking, ranking_json
    from shardplan.report.tables import console
    from shardplan.runtime.progress import show_steps
    from shardplan.search.make_plan import model_from_config

    with show_steps("ranking slices") as report:
        ranking = rank_slices(config, model_from_config(config), generations, report)
    if config.json is not None:
        write_json(ranking_json(ranking), config.json)
    if config.json != "-":
        print_slice_ranking(ranking, console(sys.stdout))
    if not ranking.ranked:
        raise InfeasibleError(
            f"no plan fits any slice of {', '.join(generations)}; several slices have more memory, as in 2xv6e-256"
        )
