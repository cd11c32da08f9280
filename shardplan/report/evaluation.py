"""Prints an evaluation: the tables of its task, and its speed."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from shardplan.config.sections import EvaluationKind
from shardplan.report.experts import experts_line
from shardplan.report.extraction.table import print_extraction
from shardplan.report.losses import print_losses
from shardplan.report.text import print_wrapped
from shardplan.runtime.progress import size_text


def print_evaluation(summary: Mapping[str, Any], out: Console) -> None:
    """Print the summary of an evaluation; see `shardplan.eval.run.run_evaluation`."""
    print_task = {EvaluationKind.LOSS: print_losses, EvaluationKind.EXTRACTION: print_extraction}
    print_task[EvaluationKind(summary["task"]["kind"])](summary, out)
    if "experts" in summary:
        print_wrapped(experts_line(summary["experts"]), out)
    for line in _speed_lines(summary):
        print_wrapped(line, out)


def print_run_forecast(forecast: Mapping[str, Any], out: Console) -> None:
    """Print the number of windows of a run, and how long they will take; see `shardplan.eval.forecast`."""
    characters = forecast["characters_per_token"]
    text = (
        f"{'about ' if characters else ''}{forecast['windows']:,} windows in {forecast['sequences']:,} sequences: "
        f"{forecast['steps']:,} steps, {duration_text(forecast['seconds'])} by the estimate, without start-up"
    )
    print_wrapped(text, out, Text("texts            ", "bold"))
    if characters:
        print_wrapped(f"the tokenizer is not at hand: {characters} characters count as a token", out)


def duration_text(seconds: float) -> str:
    """Format a duration in its two largest units, such as 2 h 5 min; in seconds below a minute."""
    if seconds < 60:
        return f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    days, hours = divmod(minutes // 60, 24)
    if minutes < 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{days} d {hours} h" if days else f"{hours} h {minutes % 60} min"


def _speed_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on the time that weights and steps took."""
    run, load = summary["run"], summary["load"]
    if load is None:  # the run only made the summary of results that were there
        return
    rate = "speed not measured (a single step)"
    if run["windows_per_second"]:
        rate = f"{run['tokens_per_second']:,.0f} tokens/s, {run['windows_per_second']:,.1f} windows/s"
    yield (
        f"{rate}; {run['steps']:,} steps, {run['programs']} program compiled in {run['compile_seconds']:.1f} s, "
        f"devices waited {run['waiting_seconds']:.2f} s for windows"
    )
    yield f"{size_text(load['bytes'])} of weights were on the devices after {load['seconds']:.2f} s"
