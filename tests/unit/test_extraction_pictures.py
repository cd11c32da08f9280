"""Pictures of extraction results show the data they are made from, and pages hold the text as it is."""

import hashlib
import html.parser
import io
import json
import math
import re
import sys

import numpy as np
import pyarrow as pa
import pytest
from conftest import fails, run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_extraction import brute_force

from shardplan.eval.extraction import pictures
from shardplan.eval.extraction.character_runs import RunStream
from shardplan.eval.extraction.pictures import write_pictures
from shardplan.eval.extraction.probabilities import CURVE_LOG_THRESHOLDS
from shardplan.eval.extraction.summary import summarize
from shardplan.eval.extraction.windows import result_schema
from shardplan.eval.texts.store import open_texts
from shardplan.report.extraction.file_names import LONGEST, file_names
from shardplan.report.extraction.page import ShadedText, page_parts
from shardplan.report.extraction.plots import draw_comparison, draw_text, save_figure
from shardplan.report.extraction.probability_scale import SHADES, probability_text, shade

TASK = {"prefix": 30, "suffix": 20, "stride": 5, "stride_unit": "tokens", "kind": "extraction", "top_k": 40}
SUMMARY = {
    "characters": 9, "windows": 2, "greedy": 1, "coverage": {"0.1": 0.5}, "suffix_coverage": {"0.1": 0.25},
}  # fmt: skip


class Page(html.parser.HTMLParser):
    """The text of a page's text blocks, with the title and class of the span around each character."""

    def __init__(self, page):
        super().__init__()
        self.blocks, self.references, self.anchors, self.links = [], [], set(), set()
        self.spans, self._depth, self._span, self._ids = 0, 0, None, None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.references += [v for k, v in attrs if k in ("href", "src")]
        if tag == "div" and values.get("class") == "text":
            self.blocks.append([])
            self._depth = 1
        elif tag == "span" and self._depth:
            self._span, self.spans = (values["title"], values.get("class")), self.spans + 1
        elif tag == "a" and "id" in values:
            self.anchors.add(values["id"])

    def handle_endtag(self, tag):
        if tag == "div":
            self._depth = 0
        elif tag == "span":
            self._span = None

    def handle_data(self, data):
        if self._depth:
            self.blocks[-1] += [(character, self._span) for character in data]


def make_page(text, windows, together=3, strip=(None, -1.0)):
    """The page of a text with windows (start, length, log p), added a few at a time."""

    def runs():
        stream = RunStream()
        for i in range(0, len(windows), together):
            start, length, log_p = (np.array(each) for each in zip(*windows[i : i + together], strict=True))
            each = stream.add(start, start + length, log_p, int(start[-1]))
            yield each.bounds, each.values
        each = stream.finish(len(text))
        yield each.bounds, each.values

    shaded = ShadedText(runs(), lambda a, b: text[a:b], len(text))
    return b"".join(page_parts("a book", "demo", TASK, SUMMARY, strip, shaded)).decode()


NASTY = (
    '<b>&amp; "quotes"</b>\r\n\n line\u2028separator \x01\x0b\x7f\x85 😀\U0001f469\u200d\U0001f467 שלום e\u0301 '
    "</div></span>\r<!-- --> ]]> {{ x }}"
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("<>&\r\n\"' "), min_size=1, max_size=120),
    st.lists(
        st.tuples(st.integers(0, 119), st.integers(0, 40), st.sampled_from([-2000.0, -3.0, -0.1, 0.0])), max_size=9
    ),
    st.integers(1, 4),
)  # fmt: skip
def test_a_page_has_the_text_as_it_is_with_the_values_of_brute_force(text, windows, together):
    windows = sorted((s % len(text), min(n, len(text) - s % len(text)), p) for s, n, p in windows)
    page = Page(make_page(text, windows, together=together))
    (block,) = page.blocks
    assert "".join(c for c, _ in block) == text.replace("\0", "\u2400")
    expected = [
        None if p == -np.inf else (probability_text(p), f"s{shade(p)}" if shade(p) else None)
        for p in brute_force(len(text), windows).tolist()
    ]
    assert [span for _, span in block] == expected
    changes = sum(a != b and b is not None for a, b in zip([None, *expected], expected, strict=False))
    assert page.spans == changes  # characters with one value share a span, wherever windows were added


def test_a_page_of_nasty_text_needs_nothing_from_elsewhere():
    source = make_page(NASTY, [(0, 20, -0.1), (10, 40, -90.0)])
    page = Page(source)
    assert "".join(c for c, _ in page.blocks[0]) == NASTY
    assert "\r" not in source  # which browsers read as a line feed; references are kept
    assert not re.findall(r"https?:|//|url\(|@import|<script|<link|<img", source)
    assert page.references and all(each.startswith("#c") for each in page.references)
    assert {each[1:] for each in page.references} <= page.anchors
    assert "prefers-color-scheme: dark" in source and "@media print" in source
    assert "p_z of the windows that cover it, prefix and suffix" in source


def test_probabilities_as_people_read_them():
    values = (0.0, math.log(0.9996), math.log(0.123), math.log(0.0012), math.log(9.96e-5), -2000.0, -math.inf)
    assert [*map(probability_text, values)] == ["100%", "100%", "12.3%", "0.120%", "1.0e-4", "2.6e-869", "0"]
    assert [*map(shade, (0.0, math.log(0.9e-4), -math.inf, math.log(1.01e-4)))] == [SHADES, 0, 0, 1]
    assert sorted({shade(p) for p in np.linspace(math.log(1.001e-4), 0, 1000)}) == [*range(1, SHADES + 1)]


def test_file_names_are_safe_and_differ():
    ids = ["a", "A", "a/b", "a_b", "../x", ".", "", "x" * 300, "x" * 301, "книга", "😀", "total", "a\n", "con.", "-rf"]
    names = file_names(ids, taken=["total"])
    assert names["a"] == "a" and names["a_b"] == "a_b"
    assert len({name.lower() for name in names.values()}) == len(ids) and "total" not in names.values()
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*[A-Za-z0-9_-]|\w", name) for name in names.values())
    assert max(map(len, names.values())) <= LONGEST
    assert file_names(ids, taken=["total"]) == names


@pytest.mark.slow
def test_plots_show_the_data():
    thresholds = np.exp(CURVE_LOG_THRESHOLDS)
    histogram = [3, 0, 5, 0, 0, 1] + [0] * 494
    curve, strip = np.linspace(1, 0, len(thresholds)), [None, -1.0, -2000.0]
    plots = {"histogram": histogram, "curve": curve, "suffix_curve": curve / 2, "strip": strip}
    figure = draw_text("a $book$", plots, thresholds, 900)
    bars, curves, strip_axes, _ = figure.axes
    (stairs,) = bars.patches
    values, edges, _ = stairs.get_data()
    assert values.tolist() == [1, 0, 0, 5, 0, 3] and edges.tolist() == [-6, -5, -4, -3, -2, -1, 0]
    whole, suffix = curves.lines
    np.testing.assert_array_equal(whole.get_xdata(), thresholds)
    np.testing.assert_array_equal(whole.get_ydata(), curve)
    np.testing.assert_array_equal(suffix.get_ydata(), curve / 2)
    (image,) = strip_axes.images
    np.testing.assert_allclose(image.get_array().filled(np.nan), [[np.nan, math.exp(-1), 1e-4]])
    assert [*image.get_extent()] == [0, 900, 0, 1]
    for format_ in ("png", "svg", "pdf"):
        save_figure(figure, file := io.BytesIO(), format_)
        assert file.tell() > 1000


@pytest.mark.parametrize("histogram", [[0] * 500, [0] * 499 + [7], [1] * 500])
def test_a_histogram_has_every_window(histogram):
    plots = {"histogram": histogram, "curve": [0, 0], "suffix_curve": [0, 0]}
    axes = draw_text("\u0000\n書" * 99, plots, [0.1, 1], 1).axes[0]
    values, edges, _ = axes.patches[0].get_data()
    assert values.sum() == sum(histogram) and edges[-1] == 0 and len(values) <= 60


def test_the_plot_of_a_comparison_shows_the_data():
    texts = {f"t{i}": [i / 50, 0.5] for i in range(50)}
    left, right = draw_comparison(["a", "b$"], [[1, 0.5], [0.2, 0.1]], [0.1, 1], texts).axes
    assert [[*line.get_ydata()] for line in left.lines] == [[1, 0.5], [0.2, 0.1]]
    assert [*right.lines[0].get_xdata()] == [i / 50 for i in range(40)]  # as many as can be read
    assert "the first 40 of 50" in right.get_title()


def make_results(folder, texts, windows, model="demo", **determinants):
    """A results folder with windows (text, start, log p) of 10 characters, and its store of texts."""
    folder.mkdir()
    (folder / "texts.jsonl").write_text("".join(json.dumps({"id": k, "text": v}) + "\n" for k, v in texts.items()))
    store = open_texts(str(folder / "texts.jsonl"))
    rows = {
        "window": [*range(len(windows))], "text": [t for t, _, _ in windows], "start": [s for _, s, _ in windows],
        "suffix_start": [s + 5 for _, s, _ in windows], "end": [s + 10 for _, s, _ in windows],
        "log_prob": [[p, 0.0] for *_, p in windows], "rank": [[0, 0]] * len(windows),
        "top_log_prob": [[0.0, 0.0]] * len(windows),
    }  # fmt: skip
    table = pa.table(rows, result_schema(2))
    summary = {
        **summarize([table.slice(0, 3), table.slice(3)], store.texts, 40),
        "task": TASK, "plan": {"model": {"ref": f"org/{model}", "config": None}},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    protocol = {"prefix": 30, "suffix": 20, "stride": 5, "unit": "tokens"}
    run = {"texts": {t.id: t.digest for t in store.texts}, "protocol": protocol, "tokenizer": "x", **determinants}
    (folder / "run.json").write_text(json.dumps(run))
    return summary, store, table


@pytest.mark.slow
def test_a_folder_gets_a_plot_and_a_page_for_each_text(tmp_path, monkeypatch):
    texts = {"a/b": "0123456789" * 5, "short": "x", "long": "abcdefghij" * 30, "a_b": NASTY}
    windows = [("a/b", 0, -0.1), ("a/b", 20, -90.0), *(("long", i * 10, -float(i % 7 + 1)) for i in range(29)),
               ("a_b", 0, -1.0)]  # fmt: skip
    summary, store, table = make_results(tmp_path / "r", texts, windows)
    monkeypatch.setattr(pictures, "PAGE_CHARACTERS", 200)
    drawn = []
    lines = write_pictures(str(tmp_path / "r"), [table], store, summary, drawn.append)
    assert lines == ["no page of long: it would have more than 200 characters"]
    digest = hashlib.sha256(b"a/b").hexdigest()[:8]
    assert {str(path.relative_to(tmp_path / "r")) for path in (tmp_path / "r").glob("*/*")} == {
        "plots/total.png", f"plots/a_b-{digest}.png", "plots/long.png", "plots/a_b.png",
        f"pages/a_b-{digest}.html", "pages/a_b.html",
    }  # fmt: skip
    block = Page((tmp_path / "r" / "pages" / f"a_b-{digest}.html").read_bytes().decode()).blocks[0]
    assert "".join(c for c, _ in block) == texts["a/b"]
    assert [span and span[0] for _, span in block[::10]] == ["90.5%", None, "8.2e-40", None, None]
    index = (tmp_path / "r" / "index.html").read_text()
    assert re.findall(r'href="pages/([^"]+)\.html"', index) == [f"a_b-{digest}", "a_b"]
    assert ">short<" in index and "a/b" in index and ">long<" in index and "plots/long.png" in index


@pytest.mark.slow
def test_the_first_texts_have_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr("shardplan.eval.extraction.summary.MAX_PICTURES", 2)
    monkeypatch.setattr(pictures, "MAX_PICTURES", 2)
    texts = {str(i): "0123456789" for i in range(4)}
    summary, store, table = make_results(tmp_path / "r", texts, [(str(i), 0, -1.0) for i in range(4)])
    lines = write_pictures(str(tmp_path / "r"), [table], store, summary, lambda _: None)
    assert lines == ["only the first 2 of 4 texts have a plot and a page"]
    assert len(list((tmp_path / "r" / "pages").iterdir())) == 2


def test_without_matplotlib_there_are_pages_and_no_plots(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    summary, store, table = make_results(tmp_path / "r", {"one": "0123456789"}, [("one", 0, -1.0)])
    lines = write_pictures(str(tmp_path / "r"), [table], store, summary, lambda _: None)
    assert lines == [
        "no plots: they need matplotlib, which is not installed: pip install matplotlib, and run the same command again"
    ]
    assert (tmp_path / "r" / "pages" / "one.html").exists() and not (tmp_path / "r" / "plots").exists()
    index = (tmp_path / "r" / "index.html").read_text()
    assert 'href="pages/one.html"' in index and "plots/" not in index


BOOKS = {"one": "0123456789" * 2, "two": "abcdefghij"}


def test_models_side_by_side(tmp_path):
    make_results(tmp_path / "a", BOOKS, [("one", 0, -0.1), ("one", 10, -9.0), ("two", 0, -1.0)], "small")
    make_results(tmp_path / "b", {**BOOKS, "two": "other text", "new": "text"}, [("one", 0, -0.1)], "large",
                 tokenizer="y")  # fmt: skip
    done = run("eval", "compare", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "x.png", "--json",
               tmp_path / "x.json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["small", "2", "2", "50.0%", "50.0%", "50.0%", "50.0%", "50.0%"] in rows
    assert ["large", "1", "1", "50.0%", "50.0%", "50.0%", "50.0%", "50.0%"] in rows
    assert "left out, because not all runs have these texts: two, new\n" in done.stdout
    assert "texts differ: two\n" in done.stdout
    assert "the tokenizers differ (large from small), so that" in done.stdout
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((tmp_path / "x.json").read_text())
    assert values["models"] == ["small", "large"] and [*values["texts"]] == ["one"]
    # the curve of the first model is that of the text in common
    assert values["curves"][0][0] == 1.0 and values["curves"][0][-5] == 0.5 and values["curves"][1][0] == 0.5


def test_a_comparison_that_cannot_be_drawn(monkeypatch):
    """Which is said before the folders are read."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = "output: matplotlib is not installed, which plots need: pip install matplotlib; or leave output out"
    fails(run("eval", "compare", "a", "b", "--output", "x.png"), 2, message)


def test_a_comparison_fits_80_columns_and_is_never_cut(tmp_path, monkeypatch):
    for name, model in (("a", "Llama-3.1-405B"), ("b", "Llama-3.1-70B-Instruct")):
        make_results(tmp_path / name, BOOKS, [("one", 0, -0.1)], model)
    monkeypatch.setenv("COLUMNS", "80")
    done = run("eval", "compare", tmp_path / "a", tmp_path / "b")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and any("  Llama-3.1-70B-Instruct  " in line for line in lines)


def test_folders_that_cannot_be_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_results(tmp_path / name, BOOKS, [("one", 0, -0.1)])
    protocol = {"prefix": 30, "suffix": 20, "stride": 1, "unit": "tokens"}
    make_results(tmp_path / "denser", BOOKS, [("one", 0, -0.1)], protocol=protocol)
    make_results(tmp_path / "others", {"one": "another text"}, [("one", 0, -0.1)])
    make_results(tmp_path / "warmer", BOOKS, [("one", 0, -0.1)], temperature=0.7)
    protocol = {"prefix": 30, "suffix": 20, "stride": 5, "unit": "tokens", "bos_in_prefix": True}
    make_results(tmp_path / "bos", BOOKS, [("one", 0, -0.1)], protocol=protocol)
    make_results(tmp_path / "stopped", BOOKS, [("one", 0, -0.1)])
    (tmp_path / "stopped" / "summary.json").unlink()
    make_results(tmp_path / "broken", BOOKS, [("one", 0, -0.1)])
    (tmp_path / "broken" / "summary.json").write_text('{"texts": {}}')
    (tmp_path / "empty").mkdir()
    a = tmp_path / "a"
    for folders, message in (
        ((a,), f"compare needs two results folders or more, and 1 is named: {a}"),
        ((a, a), f"{a} is named twice; name each results folder once"),
        ((a, f"{a}/../a"), f"{a}/../a is named twice; name each results folder once"),
        ((a, tmp_path / "stoped"), f"{tmp_path}/stoped does not exist; did you mean '"),
        ((a, tmp_path / "empty"), f"{tmp_path}/empty holds no results of an evaluation, whose run.json is missing; "),
        ((a, a / "run.json"), f"{a}/run.json is a file; name a results folder, the --output of a run"),
        ((a, tmp_path / "stopped"),
         f"{tmp_path}/stopped holds an extraction that has not ended, without summary.json; run its command again"),
        ((a, tmp_path / "broken"),
         f"{tmp_path}/broken/summary.json is not that of an extraction, without 'total'; name another folder"),
        ((a, tmp_path / "denser"),
         f"{tmp_path}/denser has windows of another protocol than {a}: stride 1 instead of 5; compare runs of one "
         "protocol"),
        ((a, tmp_path / "warmer"),
         f"{tmp_path}/warmer has windows of another protocol than {a}: temperature 0.7 instead of 1.0; compare "),
        ((a, tmp_path / "bos"),
         f"{tmp_path}/bos has windows of another protocol than {a}: bos_in_prefix True instead of None; compare runs"),
        ((a, tmp_path / "others"), "texts differ: one; "),
        ((a, tmp_path / "others"), "have no text in common, by id and content (run.json, texts); compare runs on the "),
        ((a, tmp_path / "b", "--output", "x.jpg"), "output 'x.jpg' does not end in a known format; "),
        ((a, tmp_path / "b", "--output", a / "run.json.png"), None),
    ):  # fmt: skip
        done = run("eval", "compare", *folders)
        if message is None:
            assert done.returncode == 0, done.stderr
        else:
            fails(done, 2, f"shardplan eval compare: {message}" if message[0] in "c/" else message)
