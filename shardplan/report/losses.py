"""The tables of loss runs: nats per token, bits per byte and perplexity of every text, and differences between runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardplan.report.extraction.file_names import short_label
from shardplan.report.text import make_table, print_first_fitting, print_wrapped


def print_losses(summary: Mapping[str, Any], out: Console) -> None:
    """Print the measures of all texts together, then one row per text (see `shardplan.eval.loss.measures`)."""
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


def print_loss_comparison(
    labels: Sequence[str], texts: Mapping[str, Mapping[str, Any]], total: Mapping[str, Any], out: Console
) -> None:
    """Print each text's loss in every run and its difference from the first run's; then the same for all texts.

    Args:
        labels: names of the runs.
        texts, total: see `shardplan.eval.loss.compare.ComparedText`.
    """
    columns = ("tokens", "loss/token", "difference", "s.e.")
    table = make_table("Loss per token in nats, and how it differs", ["text, model"], columns, is_narrow=True)
    for id_, text in {**texts, f"all {len(texts):,} texts": total}.items():
        table.add_section()
        table.add_row(Text(short_label(id_), "bold"), f"{text['tokens']:,}")
        for number, (label, each) in enumerate(zip(labels, text["runs"], strict=True)):
            error = each["standard_error"]
            table.add_row(
                Text(f"  {label}"),
                "",
                _number(each["loss_per_token"], 4),
                "" if number == 0 else _signed(each["difference"]),
                "" if number == 0 else "-" if error is None else f"{error:.2g}",
            )
    print_first_fitting([table], out)
    print_wrapped(
        "s.e. = sqrt(m / (m - 1) x sum (d - difference x n)^2) / sum n, where d is the difference of the losses in "
        "nats and n the number of tokens: of the m windows of a text, and for all texts together of the m texts",
        out,
    )


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.5f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
