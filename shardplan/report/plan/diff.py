"""Prints the differences between two Plans."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from shardplan.hardware import GIB
from shardplan.plan.diff import Change, PlanDiff
from shardplan.report.plan.tables import spec_text
from shardplan.report.text import fits, make_table, print_wrapped

DiffRow = tuple[str, str, str]
"""A difference, with its text before and after."""


def print_difference(before: str, after: str, difference: PlanDiff, out: Console) -> None:
    """Print one table per part of the plans that differs; `before` and `after` are the names of the plans."""
    if not difference:
        out.print("the plans are the same")
        return
    print_wrapped(before, out, "before  ")
    print_wrapped(after, out, "after   ")
    parts: list[tuple[str, Iterable[Change], Callable[[Any], str]]] = [
        ("Settings", difference.settings, str),
        ("Mesh", difference.mesh, str),
        ("Compute mapping", difference.compute_mapping, " x ".join),
        ("Parameter mapping", difference.param_mapping, " x ".join),
        ("Memory, GiB per device", difference.memory, lambda amount: f"{amount / GIB:.3f}"),
        ("Estimated seconds", [*difference.cost, *difference.collectives], lambda seconds: f"{seconds:.4g}"),
    ]
    for title, changes, text in parts:
        _print_part(title, [(c.name, _cell(c.before, text), _cell(c.after, text)) for c in changes], out)
    specs = [
        (
            f"{', '.join(change.parameters)} ({', '.join(change.axes)})",
            f"{_cell(change.before, spec_text)} {change.bytes_before / 2**20:,.2f}",
            f"{_cell(change.after, spec_text)} {change.bytes_after / 2**20:,.2f}",
        )
        for change in difference.parameters
    ]
    _print_part("Parameters, with MiB per device", specs, out)


def _cell(value: Any, text: Callable[[Any], str]) -> str:
    """Format a value; `-` for a plan that does not have it."""
    return "-" if value is None else text(value)


def _print_part(title: str, rows: Sequence[DiffRow], out: Console) -> None:
    """Print rows as a table if it fits, else as lines of a diff; print nothing without rows."""
    if not rows:
        return
    table = make_table(title, ("", "before", "after"))
    for row in rows:
        table.add_row(*map(Text, row))
    if fits(table, out):
        out.print(table)
        return
    out.print(Text(title, "italic"))
    for name, before, after in rows:
        print_wrapped(name, out, indent="  ")
        print_wrapped(before, out, Text("  - ", "red"), indent="    ")
        print_wrapped(after, out, Text("  + ", "green"), indent="    ")
