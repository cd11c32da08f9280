"""`shardplan eval compare A B ...`: print and draw the extraction results of several models side by side."""

from collections.abc import Sequence
from pathlib import Path

from shardplan.commands.output import check_outputs, side_stream, write_json
from shardplan.config.help import WITHOUT_CONFIGURATION, make_parser
from shardplan.errors import ConfigError, nearest
from shardplan.report.extraction import INSTALL_PLOTS, can_plot

FORMATS = ("pdf", "png", "svg")
"""Endings of plots."""


def main(argv: Sequence[str]) -> None:
    """Run `shardplan eval compare` with the arguments `argv`.

    Raises:
        ConfigError: other arguments, a folder without finished results, results that cannot be compared, or a plot
            without matplotlib.
    """
    parser = make_parser("eval compare", description=WITHOUT_CONFIGURATION["eval compare"])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="the output of `eval --task.kind extraction`")
    parser.add_argument("--output", metavar="FILE", help="also draw them: a .png, .pdf or .svg file")
    parser.add_argument("--json", metavar="TEXT", help="write the comparison to this path, or to stdout with `-`")
    arguments = parser.parse_args(argv)
    format_ = _format_of(arguments.output)
    if format_ is not None and not can_plot():
        raise ConfigError(
            f"output: matplotlib is not installed, which plots need: {INSTALL_PLOTS}; or leave output out"
        )
    check_outputs(arguments.folders, output=arguments.output, json=arguments.json)
    from shardplan.eval.extraction.compare import compare
    from shardplan.report.extraction.comparison import print_comparison
    from shardplan.report.tables import console
    from shardplan.runtime.progress import print_note

    results = compare(arguments.folders)
    if arguments.json is not None:
        write_json(results.to_json(), arguments.json)
    out = console(side_stream(arguments.json))
    if arguments.json != "-":
        print_comparison(results.labels, results.texts, results.total, results.left_out, results.has_one_tokenizer, out)
    if format_ is not None:
        from shardplan.report.extraction.plots import COMPARED_THRESHOLD, draw_comparison, save_figure
        from shardplan.storage.writing import OutputFolder

        texts = {
            id_: [each["coverage"][COMPARED_THRESHOLD] for each in models] for id_, models in results.texts.items()
        }
        figure = draw_comparison(results.labels, results.curves, results.thresholds, texts)
        path = Path(arguments.output)
        with OutputFolder(str(path.parent)).create(path.name) as file:
            save_figure(figure, file, format_)
        print_note(f"plot written to {arguments.output}")


def _format_of(output: str | None) -> str | None:
    """Return the format of a plot, by the ending of its file."""
    if output is None:
        return None
    ending = Path(output).suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        raise ConfigError(f"output {output!r} does not end in a known format; {nearest(ending, FORMATS)}")
    return ending
