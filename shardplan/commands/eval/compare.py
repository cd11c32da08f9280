"""`shardplan eval compare A B ...`: print the results of several runs on the same texts side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardplan.commands.output import check_outputs, side_stream, write_json
from shardplan.config.help import WITHOUT_CONFIGURATION, make_parser
from shardplan.config.sections import EvaluationKind
from shardplan.errors import ConfigError, nearest
from shardplan.report.extraction import INSTALL_PLOTS, can_plot

if TYPE_CHECKING:
    from shardplan.eval.run_results.finished_runs import FinishedRun

FORMATS = ("pdf", "png", "svg")
"""Endings of the files that plots can be written to."""


def main(argv: Sequence[str]) -> None:
    """Run `shardplan eval compare` with the arguments `argv`.

    Raises:
        ConfigError: arguments are wrong, a folder has no finished results, results cannot be compared, or matplotlib is
            missing for a plot.
    """
    parser = make_parser("eval compare", description=WITHOUT_CONFIGURATION["eval compare"])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="the output of `eval`, of one task")
    parser.add_argument("--output", metavar="FILE", help="also draw extraction: a .png, .pdf or .svg file")
    parser.add_argument("--json", metavar="TEXT", help="write the comparison to this path, or to stdout with `-`")
    arguments = parser.parse_args(argv)
    format_ = _format_of(arguments.output)
    if format_ is not None and not can_plot():
        raise ConfigError(
            f"output: matplotlib is not installed, which plots need: {INSTALL_PLOTS}; or leave output out"
        )
    check_outputs(arguments.folders, output=arguments.output, json=arguments.json)
    from shardplan.eval.run_results.finished_runs import read_runs

    runs = read_runs(arguments.folders)
    if runs[0].kind is EvaluationKind.LOSS:
        if arguments.output is not None:
            raise ConfigError("output: plots are of extraction, and losses are compared; leave output out, or use json")
        _compare_losses(runs, arguments.json)
    else:
        _compare_extraction(runs, arguments.json, arguments.output, format_)


def _compare_losses(runs: Sequence["FinishedRun"], json: str | None) -> None:
    """Print and write the differences of the losses of runs."""
    from shardplan.eval.loss.compare import compare_losses
    from shardplan.report.console import console
    from shardplan.report.extraction.comparison import print_left_out
    from shardplan.report.losses import print_loss_comparison

    results = compare_losses(runs)
    values = results.to_json()
    if json is not None:
        write_json(values, json)
    if json != "-":
        out = console(side_stream(json))
        print_loss_comparison(results.labels, values["texts"], values["total"], out)
        print_left_out(results.matched.left_out, results.matched.differing, out)


def _compare_extraction(
    runs: Sequence["FinishedRun"], json: str | None, output: str | None, format_: str | None
) -> None:
    """Print, write and draw the comparison of extraction runs."""
    from shardplan.eval.extraction.compare import compare
    from shardplan.report.console import console
    from shardplan.report.extraction.comparison import print_comparison, print_left_out
    from shardplan.runtime.progress import print_note

    results = compare(runs)
    if json is not None:
        write_json(results.to_json(), json)
    if json != "-":
        out = console(side_stream(json))
        print_comparison(results.labels, results.texts, results.total, results.other_tokenizers, out)
        print_left_out(results.matched.left_out, results.matched.differing, out)
    if output is not None and format_ is not None:
        from shardplan.report.extraction.plots import COMPARED_THRESHOLD, draw_comparison, save_figure
        from shardplan.storage.writing import OutputFolder

        texts = {
            id_: [each["coverage"][COMPARED_THRESHOLD] for each in models] for id_, models in results.texts.items()
        }
        figure = draw_comparison(results.labels, results.curves, results.thresholds, texts)
        path = Path(output)
        with OutputFolder(str(path.parent)).create(path.name) as file:
            save_figure(figure, file, format_)
        print_note(f"plot written to {output}")


def _format_of(output: str | None) -> str | None:
    """Return the format of a plot from the ending of its file."""
    if output is None:
        return None
    ending = Path(output).suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        raise ConfigError(f"output {output!r} does not end in a known format; {nearest(ending, FORMATS)}")
    return ending
