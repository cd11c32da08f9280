"""Prints the slices on which a plan fits, by speed per chip or by cost, and converts the ranking to JSON."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardplan.cost.calibration import STEP_ERROR
from shardplan.explain.rank_slices import RankedSlice, SliceRanking
from shardplan.explain.what_if import summarize_failures
from shardplan.hardware import GIB
from shardplan.plan.file.sections import Caveat
from shardplan.plan.mapping import mesh_text
from shardplan.plan.workload.workload import Workload
from shardplan.report.plan.tables import workload_text
from shardplan.report.text import make_table, print_bullets, print_first_fitting, print_wrapped

SPEED = "tokens/s per chip"
COST_PER_STEP = "cost per step"
COST_PER_MILLION = "cost per million tokens"
DAYS = "days"
COST = "cost of the run"
MESH_SIZES = "mesh sizes"
MANY = 1000
"""Number from which decimals are not shown."""
NARROW_TITLES = {
    MESH_SIZES: "mesh",
    "microbatches": "micro-\nbatches",
    SPEED: "tokens/s\nper chip",
    COST_PER_STEP: "cost per\nstep",
    COST_PER_MILLION: "cost per\nM tokens",
    COST: "cost of\nthe run",
}
"""Titles of columns in the narrowest table, long ones on two lines."""


def print_slice_ranking(ranking: SliceRanking, out: Console) -> None:
    """Print the best and smallest slices, the workload, a row per slice, and why others have no plan."""
    if ranking.ranked:
        _print_headline(ranking, out)
        print_first_fitting(_tables(ranking.ranked), out)
    print_bullets(_notes(ranking), out)


def ranking_json(ranking: SliceRanking) -> dict[str, Any]:
    """Return the ranking as JSON values; memory in bytes per device, time in seconds."""
    return {
        "best": [each.plan.hardware.slice for each in ranking.best],
        "step_error": STEP_ERROR,
        "slices": [
            {
                "slice": each.plan.hardware.slice,
                "chips": each.chips,
                "is_smallest": each.is_smallest,
                "workload": vars(each.plan.workload),
                "mesh": each.plan.mesh,
                "peak": each.plan.memory.peak,
                "available": each.plan.memory.available,
                "step_seconds": each.plan.cost.step_seconds,
                "tokens_per_second": each.tokens_per_second,
                "tokens_per_second_per_chip": each.tokens_per_second_per_chip,
                "price_per_chip_hour": each.price,
                "cost_per_step": each.cost_per_step,
                "cost_per_million_tokens": each.cost_per_million_tokens,
                "days": each.days,
                "cost": each.cost,
                "is_guess": _is_guess(each),
            }
            for each in ranking.ranked
        ],
        "without_plan": {each.change.split()[-1]: each.obstacle for failed in ranking.failed for each in failed},
        "unused_prices": ranking.unused_prices,
    }


def _print_headline(ranking: SliceRanking, out: Console) -> None:
    """Print one line each: the best slices, the smallest ones, and the workload."""
    best = ranking.best
    column = _cost_column(ranking.ranked)
    merit = "most tokens/s per chip" if column is None else f"lowest {column}"
    values = [_cells(each)[column or SPEED] for each in best]
    value = values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
    tie = f" (no further apart than the error of the estimates, {STEP_ERROR:.0%})" if len(best) > 1 else ""
    verb = "have" if len(best) > 1 else "has"
    names = _join(each.plan.hardware.slice for each in best)
    print_wrapped(f" {verb} the {merit}: {value}{tie}", out, Text(names, "bold"), indent="  ")
    smallest = _join(each.plan.hardware.slice for each in ranking.ranked if each.is_smallest)
    print_wrapped(f"smallest of these that fits: {smallest}", out, indent="  ")
    print_wrapped(_workloads_text([each.plan.workload for each in ranking.ranked]), out, indent="  ")


def _cost_column(ranked: Sequence[RankedSlice]) -> str | None:
    """Return the column of costs by which slices are compared: per run, per training step, or per tokens.

    Steps are compared if they have the same number of tokens. None if the best slice has no price.
    """
    first = ranked[0]
    if first.price is None:
        return None
    if first.tokens is not None:
        return COST
    are_alike = len({each.plan.workload.tokens for each in ranked}) == 1
    return COST_PER_STEP if first.plan.workload.is_training and are_alike else COST_PER_MILLION


def _workloads_text(workloads: Sequence[Workload]) -> str:
    """Describe the workload of the plans, with ranges for settings that the planner chose per slice."""
    first = workloads[0]
    if all(each == first for each in workloads):
        return workload_text(first)
    parts = [
        first.kind,
        f"batch {_range(each.batch for each in workloads)} x {first.position} tokens",
        f"{first.param_dtype} parameters",
        f"{first.compute_dtype} compute",
    ]
    if first.is_training:
        kinds = dict.fromkeys(each.gradient_checkpointing for each in workloads)
        parts += [
            first.optimizer,
            f"{_range(each.num_microbatches for each in workloads)} microbatches",
            f"gradient checkpointing {_join(kinds, 'or')}",
        ]
    return ", ".join(parts)


def _range(numbers: Iterable[int]) -> str:
    values = sorted(numbers)
    return f"{values[0]} to {values[-1]}" if values[0] != values[-1] else str(values[0])


def _join(names: Iterable[str], word: str = "and") -> str:
    """Join names with commas, and with `word` before the last."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def _tables(ranked: Sequence[RankedSlice]) -> Iterator[Table]:
    """Yield tables of the ranked slices, first with all columns, then with fewer."""
    workload = ranked[0].plan.workload
    parts = ["microbatches"] if workload.is_training else []
    cost = _cost_column(ranked)
    costs = [DAYS] if ranked[0].tokens is not None else []
    costs += [cost] if cost is not None else []
    title, mesh_axes = f"slices by {cost or SPEED}", " x ".join(ranked[0].plan.mesh)
    full = ["chips", "batch", *parts, "mesh", "GiB of available", "tokens/s", SPEED, *costs]
    yield _fill(make_table(title, ("slice",), full), ranked, full)
    narrow = ["chips", "batch", *parts, MESH_SIZES, "GiB", SPEED, *costs]
    titles = [NARROW_TITLES.get(column, column) for column in narrow]
    yield _fill(make_table(f"{title} (mesh: {mesh_axes})", ("slice",), titles, is_narrow=True), ranked, narrow)


def _fill(table: Table, ranked: Sequence[RankedSlice], columns: Sequence[str]) -> Table:
    """Add a row per slice, and return the table."""
    for each in ranked:
        cells = _cells(each)
        table.add_row(Text(each.plan.hardware.slice), *(cells[column] for column in columns))
    return table


def _cells(each: RankedSlice) -> dict[str, str]:
    """Return the cells of a slice by column."""
    plan = each.plan
    peak = f"{plan.memory.peak / GIB:.2f}"
    return {
        "chips": str(each.chips),
        "batch": str(plan.workload.batch),
        "microbatches": str(plan.workload.num_microbatches),
        "mesh": mesh_text(plan.mesh),
        MESH_SIZES: " x ".join(map(str, plan.mesh.values())),
        "GiB of available": f"{peak} of {plan.memory.available / GIB:.2f}",
        "GiB": peak,
        "tokens/s": f"{each.tokens_per_second:,.0f}",
        SPEED: f"{each.tokens_per_second_per_chip:,.0f}",
        DAYS: _significant(each.days),
        COST: _significant(each.cost),
        COST_PER_STEP: _significant(each.cost_per_step),
        COST_PER_MILLION: _significant(each.cost_per_million_tokens),
    }


def _is_guess(each: RankedSlice) -> bool:
    """Return whether a plan's time is a guess, because no kernel can run its attention."""
    return Caveat.NO_ATTENTION_KERNEL in each.plan.search.caveats


def _significant(number: float | None) -> str:
    """Format a number with about three significant digits, or as "-" if it is None."""
    if number is None:
        return "-"
    if number >= MANY:
        return f"{number:,.0f}"
    return f"{number:,.2f}" if number >= 1 else f"{number:.3g}"


def _notes(ranking: SliceRanking) -> Iterator[str]:
    """Yield sentences on slices without a price, prices without a slice, and slices without a plan."""
    guesses = [each.plan.hardware.slice for each in ranking.ranked if _is_guess(each)]
    if guesses:
        yield (
            f"no kernel can run attention on {_join(guesses)}: the times there are guesses, which the error of the "
            "estimates does not cover"
        )
    unpriced = dict.fromkeys(each.generation for each in ranking.ranked if each.price is None)
    if unpriced and any(each.price is not None for each in ranking.ranked):
        yield f"no price for {_join(unpriced)}: these slices are ranked last, by tokens/s per chip"
    if ranking.unused_prices:
        yield f"the price of {_join(ranking.unused_prices)} is not used: none of its slices is ranked"
    for failed in ranking.failed:
        yield from summarize_failures(failed)
