"""Prints the slices on which a plan fits by their speed per chip, and turns the ranking into JSON."""

from typing import Any

from rich.console import Console
from rich.text import Text

from shardplan.explain.rank_slices import RankedSlice, SliceRanking
from shardplan.explain.what_if import summarize_failures
from shardplan.hardware import GIB
from shardplan.plan.mapping import mesh_text
from shardplan.report.text import make_table, print_bullets, print_first_fitting, print_wrapped

COLUMNS = (
    ("chips", "mesh", "GiB of available", "tokens/s", "tokens/s per chip"),
    ("chips", "GiB", "tokens/s per chip"),
)
"""Columns of the table, from the fullest form to the narrowest."""


def print_slice_ranking(ranking: SliceRanking, out: Console) -> None:
    """Print the best slice per chip and the smallest one, a row per slice, then why the others have no plan."""
    if ranking.ranked:
        best = ranking.ranked[0]
        smallest = " and ".join(each.plan.hardware.slice for each in ranking.ranked if each.is_smallest)
        print_wrapped(
            f" has the most tokens/s per chip: {best.tokens_per_second_per_chip:,.0f}; smallest that fits: {smallest}",
            out,
            Text(best.plan.hardware.slice, "bold"),
            indent="  ",
        )
        tables = []
        for columns in COLUMNS:
            table = make_table("slices by tokens/s per chip", ("slice",), columns)
            for each in ranking.ranked:
                cells = _cells(each)
                table.add_row(Text(cells["slice"]), *(cells[column] for column in columns))
            tables.append(table)
        print_first_fitting(tables, out)
    print_bullets((sentence for failed in ranking.failed for sentence in summarize_failures(failed)), out)


def ranking_json(ranking: SliceRanking) -> dict[str, Any]:
    """The ranking as JSON values; memory in bytes per device, time in seconds."""
    return {
        "slices": [
            {
                "slice": each.plan.hardware.slice,
                "chips": each.chips,
                "is_smallest": each.is_smallest,
                "mesh": each.plan.mesh,
                "peak": each.plan.memory.peak,
                "available": each.plan.memory.available,
                "step_seconds": each.plan.cost.step_seconds,
                "tokens_per_second": each.tokens_per_second,
                "tokens_per_second_per_chip": each.tokens_per_second_per_chip,
            }
            for each in ranking.ranked
        ],
        "without_plan": {each.change.split()[-1]: each.obstacle for failed in ranking.failed for each in failed},
    }


def _cells(each: RankedSlice) -> dict[str, str]:
    """Return the cells of a slice by column."""
    plan = each.plan
    peak = f"{plan.memory.peak / GIB:.2f}"
    return {
        "slice": plan.hardware.slice + (" (smallest)" if each.is_smallest else ""),
        "chips": str(each.chips),
        "mesh": mesh_text(plan.mesh),
        "GiB of available": f"{peak} of {plan.memory.available / GIB:.2f}",
        "GiB": peak,
        "tokens/s": f"{each.tokens_per_second:,.0f}",
        "tokens/s per chip": f"{each.tokens_per_second_per_chip:,.0f}",
    }
