"""Losses of runs are compared text by text; the standard errors are those of hand calculations and of simulation."""

import json
import math
import statistics

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import fails, run

from shardplan.eval.loss.compare import ratio_with_error
from shardplan.eval.loss.measures import summarize
from shardplan.eval.loss.windows import SCHEMA

RUN = {
    "task": "loss", "tokenizer": "x", "texts": {"a.txt": "1", "b.txt": "2", "c.txt": "3"}, "workload.position": 8,
    "task.stride": 7, "task.special_tokens": True, "packing": True, "checkpoint": {}, "types": {},
}  # fmt: skip
WINDOWS = [
    ("a.txt", 0, 9, 7), ("a.txt", 9, 20, 7), ("a.txt", 20, 22, 2), ("b.txt", 0, 3, 2), ("c.txt", 0, 5, 4),
    ("c.txt", 5, 11, 5),
]  # fmt: skip
"""Text, characters from and to, tokens."""
FIRST, SECOND = [14.0, 21.0, 5.0, 4.0, 8.0, 15.0], [13.0, 20.5, 4.0, 5.0, 9.0, 13.0]
"""Losses in nats."""


def write_run(folder, losses, model="small", windows=WINDOWS, order=None, **changes):
    """Write a results folder; `order` is that of the windows in the file."""
    folder.mkdir()
    rows = [
        {"window": i, "text": text, "start": start, "end": end, "tokens": n, "bytes": end - start, "loss": loss}
        for i, ((text, start, end, n), loss) in enumerate(zip(windows, losses, strict=True))
    ]
    table = pa.Table.from_pylist([rows[i] for i in order or range(len(rows))], SCHEMA)
    pq.write_table(table, folder / "windows.parquet", row_group_size=2)
    values = {**RUN, **changes}
    (folder / "run.json").write_text(json.dumps(values))
    summary = summarize([*values["texts"]], [table])
    summary.update(plan={"model": {"ref": f"org/{model}", "config": None}}, task={"kind": "loss"})
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def expected_error(clusters):
    """Of (difference in nats, tokens): the difference per token and its standard error, step by step."""
    tokens = sum(n for _, n in clusters)
    ratio = sum(d for d, _ in clusters) / tokens
    squares = sum((d - ratio * n) ** 2 for d, n in clusters)
    return ratio, math.sqrt(len(clusters) / (len(clusters) - 1) * squares) / tokens


def test_losses_of_two_runs(tmp_path):
    a = write_run(tmp_path / "a", FIRST)
    # packed in another order
    b = write_run(tmp_path / "b", SECOND, "large", order=[3, 5, 0, 4, 2, 1], packing=False)
    done = run("eval", "compare", a, b, "--json", tmp_path / "x.json")
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "x.json").read_text())
    assert values["models"] == ["small", "large"] and values["unit"] == "nats per token"
    first, second = values["texts"]["a.txt"]["runs"]
    assert first == {"loss_per_token": 40 / 16, "difference": None, "standard_error": None}
    assert second["loss_per_token"] == 37.5 / 16
    by_window = expected_error([(-1.0, 7), (-0.5, 7), (-1.0, 2)])
    assert (second["difference"], second["standard_error"]) == pytest.approx(by_window, rel=1e-12)
    # one window has no error
    assert values["texts"]["b.txt"]["runs"][1] == {"loss_per_token": 2.5, "difference": 0.5, "standard_error": None}
    total = values["total"]
    assert (total["tokens"], total["windows"]) == (27, 6)
    by_text = expected_error([(-2.5, 16), (1.0, 2), (-1.0, 9)])
    assert (total["runs"][1]["difference"], total["runs"][1]["standard_error"]) == pytest.approx(by_text, rel=1e-12)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["small", "2.5000"] in rows and ["large", "2.3438", "-0.15625", f"{by_window[1]:.2g}"] in rows
    assert ["large", "2.5000", "+0.50000", "-"] in rows
    assert ["large", "2.3889", "-0.09259", f"{by_text[1]:.2g}"] in rows
    assert "s.e. = sqrt(m / (m - 1)" in done.stdout


def test_the_error_of_equal_windows_is_that_of_a_mean():
    differences = [0.3, -0.1, 0.7, 0.2]
    ratio, error = ratio_with_error(np.array(differences) * 5, np.full(4, 5))
    assert ratio == pytest.approx(statistics.mean(differences))
    assert error == pytest.approx(statistics.stdev(differences) / 2)
    assert ratio_with_error(np.array([2.0]), np.array([4])) == (0.5, None)


def test_the_error_is_the_spread_of_the_difference():
    """Of texts of many lengths, drawn again and again: the difference spreads as much as its errors say."""
    draw = np.random.default_rng(0)
    ratios, errors = [], []
    for _ in range(2000):
        tokens = draw.integers(10, 1000, 60)
        # tokens of a text depend on each other: a text has a difference of its own
        differences = tokens * draw.normal(0.1, 0.5, 60) + draw.normal(0, 1, 60) * np.sqrt(tokens)
        ratio, error = ratio_with_error(differences, tokens)
        ratios.append(ratio)
        errors.append(error)
    assert np.mean(ratios) == pytest.approx(0.1, abs=0.01)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(ratios), rel=0.05)


def test_texts_that_differ_are_named(tmp_path):
    a = write_run(tmp_path / "a", FIRST)
    texts = {"a.txt": "1", "b.txt": "other", "d.txt": "4"}
    windows = [*WINDOWS[:4], ("d.txt", 0, 4, 3)]
    b = write_run(tmp_path / "b", [*SECOND[:4], 9.0], windows=windows, texts=texts)
    done = run("eval", "compare", a, b, "--json", tmp_path / "x.json")
    assert done.returncode == 0, done.stderr
    assert "left out, because not all runs have these texts: b.txt, c.txt, d.txt\n" in done.stdout
    assert "texts differ: b.txt\n" in done.stdout
    values = json.loads((tmp_path / "x.json").read_text())
    assert [*values["texts"]] == ["a.txt"] and values["left_out"] == ["b.txt", "c.txt", "d.txt"]
    # a single text: no error of the total
    assert values["total"]["runs"][1] == {"loss_per_token": 37.5 / 16, "difference": -2.5 / 16, "standard_error": None}


def test_a_loss_that_is_not_finite(tmp_path):
    a = write_run(tmp_path / "a", FIRST)
    b = write_run(tmp_path / "b", [*SECOND[:3], math.nan, *SECOND[4:]], "large")
    done = run("eval", "compare", a, b, "--json", "-")
    values = json.loads(done.stdout)
    none = {"loss_per_token": None, "difference": None, "standard_error": None}
    assert values["texts"]["b.txt"]["runs"][1] == values["total"]["runs"][1] == none
    assert values["texts"]["a.txt"]["runs"][1]["difference"] == -2.5 / 16


def test_three_runs_are_compared_with_the_first(tmp_path):
    folders = [
        write_run(tmp_path / name, losses) for name, losses in (("a", FIRST), ("b", SECOND), ("c", FIRST))
    ]  # the models have one name: the folders differ
    done = run("eval", "compare", *folders, "--json", "-")
    values = json.loads(done.stdout)
    assert values["models"] == ["a", "b", "c"]
    assert [each["difference"] for each in values["total"]["runs"]] == [None, -2.5 / 27, 0.0]


def test_losses_that_cannot_be_compared(tmp_path):
    a = write_run(tmp_path / "a", FIRST)
    other = {
        "tokens": {"tokenizer": "y"},
        "stride": {"task.stride": 3},
        "texts": {"texts": {"a.txt": "7", "b.txt": "8", "c.txt": "9"}},
    }
    for name, changes in other.items():
        write_run(tmp_path / name, SECOND, name, **changes)
    write_run(tmp_path / "windows", SECOND[:5], "windows", windows=WINDOWS[:5])
    write_run(tmp_path / "stopped", SECOND)
    (tmp_path / "stopped" / "summary.json").unlink()
    extraction = write_run(tmp_path / "extraction", SECOND, task="extraction", protocol={})
    summary = json.loads((extraction / "summary.json").read_text())
    (extraction / "summary.json").write_text(json.dumps({**summary, "plots": {"thresholds": []}}))
    unknown = write_run(tmp_path / "unknown", SECOND, task="generation")
    for folder, message in (
        ("tokens", "tokenizers differ: tokens from small; losses per token of other tokens cannot be compared, their"),
        ("stride", f"{tmp_path}/stride has windows of another protocol than {a}: task.stride 3 instead of 7; compare"),
        ("texts", f"texts differ: a.txt, b.txt, c.txt; {a}, {tmp_path}/texts have no text in common"),
        ("windows", f"{tmp_path}/windows has other windows than {a}; run both evaluations again"),
        ("stopped", f"{tmp_path}/stopped holds a loss that has not ended, without summary.json; run its command again"),
        ("extraction", f"{a} is a loss and {extraction} an extraction; compare runs of one task"),
        ("unknown", f"{unknown}/run.json is of the task 'generation', and compared are loss and extraction"),
    ):
        fails(run("eval", "compare", a, tmp_path / folder), 2, message)
    message = "output: plots are of extraction, and losses are compared; leave output out, or use json"
    fails(run("eval", "compare", a, write_run(tmp_path / "b", SECOND), "--output", tmp_path / "x.png"), 2, message)
