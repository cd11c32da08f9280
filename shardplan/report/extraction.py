"""The table of an extraction run: how much of each text the model finds probable."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from shardplan.report.text import make_table


def print_extraction(summary: Mapping[str, Any], console: Console) -> None:
    """Print the covered part of each text for every threshold."""
    thresholds = list(summary["total"]["coverage"])
    columns = ("characters", "windows", "greedy", *(f"p >= {float(t):.1%}" for t in thresholds))
    table = make_table("Characters covered by windows of at least this probability", ["text"], columns)
    for name, each in {**summary["texts"], "total": summary["total"]}.items():
        values = (each["characters"], each["windows"], each["greedy"])
        table.add_row(name, *(f"{value:,}" for value in values), *(f"{each['coverage'][t]:.1%}" for t in thresholds))
    console.print(table)
