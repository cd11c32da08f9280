"""The tables of a loss run: nats per token, bits per byte and perplexity of every text."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardplan.report.text import make_table, print_first_fitting, print_wrapped


def print_losses(summary: Mapping[str, Any], out: Console) -> None:
    """Print the measures of all texts together, then a row per text (see `shardplan.eval.loss.measures`)."""
    total = summary["total"]
    text = (
        f" nats, perplexity {_number(total['perplexity'], 2)}, bits per byte {_number(total['bits_per_byte'], 4)}, "
        f"{total['tokens']:,} tokens"
    )
    print_wrapped(text, out, Text(f"loss per token {_number(total['loss_per_token'], 4)}", "bold"), indent="  ")
    print_first_fitting((_text_table(summary["texts"], columns) for columns in (5, 3)), out)


def _text_table(rows: Mapping[str, Mapping[str, Any]], columns: int) -> Table:
    """Return a table of the first `columns` measures of every text."""
    titles = ("tokens", "loss/token", "bits/byte", "perplexity", "bytes")[:columns]
    table = make_table("Texts", ("text",), titles)
    for id_, row in rows.items():
        measures = (
            f"{row['tokens']:,}",
            _number(row["loss_per_token"], 4),
            _number(row["bits_per_byte"], 4),
            _number(row["perplexity"], 2),
            f"{row['bytes']:,}",
        )
        table.add_row(Text(id_), *measures[:columns])
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
