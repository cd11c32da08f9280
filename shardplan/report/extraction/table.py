"""The table of an extraction run: the coverage of each text."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from shardplan.report.extraction.file_names import short_label
from shardplan.report.extraction.probability_scale import threshold_text
from shardplan.report.text import make_table, print_first_fitting


def print_extraction(summary: Mapping[str, Any], console: Console) -> None:
    """Print the covered fraction of each text at every threshold."""
    thresholds = list(summary["total"]["coverage"])
    columns = ("characters", "windows", "greedy", *(f">={threshold_text(float(t))}" for t in thresholds))
    table = make_table("Characters covered by windows with p_z of at least", ["text"], columns, is_narrow=True)
    table.padding = (0, 1, 0, 0)
    for name, each in {**summary["texts"], "total": summary["total"]}.items():
        values = (each["characters"], each["windows"], each["greedy"])
        coverage = (f"{each['coverage'][t]:.1%}" for t in thresholds)
        table.add_row(Text(short_label(name)), *(f"{value:,}" for value in values), *coverage)
    print_first_fitting([table], console)
