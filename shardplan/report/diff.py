"""Prints the differences between two Plans."""

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from shardplan.hardware import GIB
from shardplan.plan.diff import Change, PlanDiff
from shardplan.report.tables import spec_text


def print_difference(before: str, after: str, difference: PlanDiff, out: Console) -> None:
    """Print one table per part of the plans that differs; `before` and `after` are the names of the plans."""
    if not difference:
        out.print("the plans are the same")
        return
    parts: list[tuple[str, Iterable[Change], Callable[[Any], str]]] = [
        ("Settings", difference.settings, str),
        ("Mesh", difference.mesh, str),
        ("Compute mapping", difference.compute_mapping, " x ".join),
        ("Parameter mapping", difference.param_mapping, " x ".join),
        ("Memory, GiB per device", difference.memory, lambda amount: f"{amount / GIB:.3f}"),
        ("Estimated seconds", [*difference.cost, *difference.collectives], lambda seconds: f"{seconds:.4g}"),
    ]
    for title, changes, text in parts:
        table = _table(title, "", before, after)
        for change in changes:
            table.add_row(change.name, *("-" if v is None else text(v) for v in (change.before, change.after)))
        if table.row_count:
            out.print(table)
    if difference.parameters:
        out.print(_parameter_table(before, after, difference))


def _parameter_table(before: str, after: str, difference: PlanDiff) -> Table:
    """Return a table of the parameters with different specs; `-` where a plan does not have them."""
    table = _table("Parameters", "parameters", before, after)
    table.add_column("MiB/device", justify="right")
    for change in difference.parameters:
        table.add_row(
            f"{', '.join(change.parameters)} ({', '.join(change.axes)})",
            *("-" if spec is None else spec_text(spec) for spec in (change.before, change.after)),
            f"{change.bytes_before / 2**20:,.2f} -> {change.bytes_after / 2**20:,.2f}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
