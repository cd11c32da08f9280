"""Draws the results of an extraction run: a plot and an HTML page for each text, and an index of them.

| file in the results folder | content |
|---|---|
| index.html | a row for each text |
| plots/total.png, plots/NAME.png | log p_z, coverage over thresholds, the largest p_z along the text |
| pages/NAME.html | the text, shaded by the largest p_z of the windows that cover each character |

`NAME` is the id of the text where that is a safe file name.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from shardplan.eval.extraction.character_runs import CharacterRuns, RunStream
from shardplan.eval.extraction.probabilities import read_matrix, suffix_log_probs
from shardplan.eval.extraction.summary import MAX_PICTURES, split_by_text
from shardplan.eval.run_results.finished_runs import model_name
from shardplan.eval.texts.store import Text, TextStore, read_characters
from shardplan.report.extraction import INSTALL_PLOTS, can_plot
from shardplan.report.extraction.file_names import file_names
from shardplan.storage.writing import OutputFolder

INDEX, PAGES, PLOTS, TOTAL = "index.html", "pages", "plots", "total"
COLUMNS = ("text", "start", "end", "log_prob")
"""Columns of a run's windows that pages need."""
NO_PLOTS = f"no plots: they need matplotlib, which is not installed: {INSTALL_PLOTS}, and run the same command again"
PAGE_CHARACTERS = 4_000_000
"""Maximum number of characters of a text with a page; a browser needs seconds for so many."""


def write_pictures(
    output: str,
    windows: Iterable[pa.Table],
    store: TextStore,
    summary: Mapping[str, Any],
    report: Callable[[str], None],
) -> list[str]:
    """Write plots, if they can be drawn, and pages into a results folder.

    Args:
        output: the results folder.
        windows: the windows of the run, in order, with at least `COLUMNS`.
        store: the texts of the run.
        summary: the summary of the run, as in summary.json.
        report: called with a description of each picture before it is drawn.

    Returns:
        A line for everything that is left out: plots if matplotlib is missing, pages of texts that are too long, and
            pictures of further texts if there are too many.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    from shardplan.report.extraction.page import ShadedText, index_page, page_parts

    folder = OutputFolder(output)
    plots, texts = summary["plots"], {text.id: text for text in store.texts}
    names = file_names(plots["texts"], taken=(TOTAL,))
    model = model_name(summary)
    has_plots = can_plot()
    if has_plots:
        _write_plots(folder, summary, names, model, report)
    too_long = [id_ for id_ in names if texts[id_].characters > PAGE_CHARACTERS]
    for id_, tables in _by_text(windows):
        if id_ not in names or id_ in too_long:
            continue
        report(f"page of {id_}")
        text = texts[id_]
        shaded = ShadedText(
            ((runs.bounds, runs.values) for runs in _runs(tables, text.characters)),
            _reader(store, text),
            text.characters,
        )
        with folder.create(f"{PAGES}/{names[id_]}.html") as file:
            for part in page_parts(
                id_, model, summary["task"], summary["texts"][id_], plots["texts"][id_]["strip"], shaded
            ):
                file.write(part)
    with folder.create(INDEX) as file:
        file.write(index_page(model, summary, names, too_long, has_plots))
    left_out = [] if has_plots else [NO_PLOTS]
    if too_long:
        left_out.append(f"no page of {', '.join(too_long)}: it would have more than {PAGE_CHARACTERS:,} characters")
    count = sum(each["windows"] > 0 for each in summary["texts"].values())
    if count > len(names):
        left_out.append(f"only the first {MAX_PICTURES} of {count:,} texts have a plot and a page")
    return left_out


def _write_plots(
    folder: OutputFolder, summary: Mapping[str, Any], names: Mapping[str, str], model: str,
    report: Callable[[str], None],
) -> None:  # fmt: skip
    """Write the plot of all texts together, and one plot per text, named by its id."""
    from shardplan.report.extraction.plots import draw_text, save_figure

    plots = summary["plots"]
    titles = {TOTAL: ("All texts", plots["total"], summary["total"])}
    titles |= {name: (id_, plots["texts"][id_], summary["texts"][id_]) for id_, name in names.items()}
    for name, (title, data, each) in titles.items():
        report(f"plot of {title}")
        with folder.create(f"{PLOTS}/{name}.png") as file:
            figure = draw_text(f"{title} ({model})", data, plots["thresholds"], each["characters"])
            save_figure(figure, file, "png")


def _by_text(windows: Iterable[pa.Table]) -> Iterator[tuple[str, Iterator[pa.Table]]]:
    """Group windows by text: yield the id of each text, and tables that together have its windows."""
    for id_, items in itertools.groupby(split_by_text(windows), key=lambda item: item[0]):
        yield id_, (table for _, table in items)


def _runs(tables: Iterable[pa.Table], characters: int) -> Iterator[CharacterRuns]:
    """Yield the runs of a text, with the largest log p_z of the complete windows that cover them."""
    stream = RunStream()
    for table in tables:
        starts, ends = (table[name].to_numpy() for name in ("start", "end"))
        yield stream.add(starts, ends, suffix_log_probs(read_matrix(table, "log_prob")), int(starts[-1]))
    yield stream.finish(characters)


def _reader(store: TextStore, text: Text) -> Callable[[int, int], str]:
    """Return a function that reads a range of a text's characters."""
    return lambda start, end: read_characters(store.path, text.pieces, start, min(end, text.characters))
