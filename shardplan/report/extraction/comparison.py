"""Prints the extraction of several models on the same texts, and lists the texts that are left out."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from shardplan.report.extraction.file_names import short_label
from shardplan.report.extraction.probability_scale import threshold_text
from shardplan.report.text import make_table, print_first_fitting, print_wrapped

MAX_NAMES = 5
"""Maximum number of omitted texts that are named."""


def print_comparison(
    labels: Sequence[str], texts: Mapping[str, Sequence[Mapping[str, Any]]], total: Sequence[Mapping[str, Any]],
    other_tokenizers: Sequence[str], out: Console,
) -> None:  # fmt: skip
    """Print the coverage of every text at each threshold, one row per model; then the coverage of all texts together.

    Args:
        labels: names of the models.
        texts: text -> its summary for each model.
        total: the summary of all texts for each model.
        other_tokenizers: names of the models with another tokenizer than the first model, and therefore other windows.
    """
    thresholds = list(total[0]["coverage"])
    columns = ("windows", "greedy", *(f">={threshold_text(float(t))}" for t in thresholds))
    table = make_table("Characters covered by windows with p_z of at least", ["text, model"], columns, is_narrow=True)
    table.padding = (0, 1, 0, 0)
    for id_, models in {**texts, f"all {len(texts):,} texts": total}.items():
        table.add_section()
        table.add_row(Text(short_label(id_), "bold"))
        for label, each in zip(labels, models, strict=True):
            coverage = (f"{each['coverage'][t]:.1%}" for t in thresholds)
            table.add_row(Text(f"  {label}"), f"{each['windows']:,}", f"{each['greedy']:,}", *coverage)
    print_first_fitting([table], out)
    if other_tokenizers:
        names = f"{', '.join(other_tokenizers)} from {labels[0]}"
        print_wrapped(
            f"the tokenizers differ ({names}), so that windows of as many tokens have other numbers of characters", out
        )


def print_left_out(left_out: Sequence[str], differing: Sequence[str], out: Console) -> None:
    """Print which texts are not compared.

    Args:
        left_out: ids of all texts that are not compared.
        differing: ids of texts that all runs have, but with different contents.
    """
    if left_out:
        print_wrapped(f"left out, because not all runs have these texts: {_names(left_out)}", out)
    if differing:
        print_wrapped(f"texts differ: {_names(differing)}", out)


def _names(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MAX_NAMES:,} more" if len(ids) > MAX_NAMES else ""
    return f"{', '.join(map(short_label, ids[:MAX_NAMES]))}{more}"
