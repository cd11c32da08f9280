"""The tables of a precision study."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from shardplan.report.text import make_table, print_wrapped


def print_precision(study: Mapping[str, Any], out: Console) -> None:
    """Print the changes that bfloat16 makes to the windows of a study; see `shardplan.eval.extraction.precision`."""
    print_wrapped(
        f"{study['windows']:,} windows in bfloat16 and float32: {study['ranks_differ']:.2%} of the ranks differ", out
    )
    names = {"log_p": "log p_z of a window", "token": "log p of a token"}
    table = make_table("bfloat16 - float32, nats", ("",), ("mean", "mean size", "median size", "95 %", "largest"))
    for key, name in names.items():
        each = study[key]
        table.add_row(
            name, f"{each['mean']:+.2g}", *(f"{each[q]:.2g}" for q in ("mean_absolute", "q50", "q95", "q100"))
        )
    out.print(table)
    table = make_table("Extracted windows", ("p_z of at least",), ("bfloat16", "float32", "in just one"))
    rows = {**{f"{float(t):.1%}": each for t, each in study["thresholds"].items()}, "greedy": study["greedy"]}
    for name, each in rows.items():
        table.add_row(name, *(f"{value:,}" for value in each.values()))
    out.print(table)
