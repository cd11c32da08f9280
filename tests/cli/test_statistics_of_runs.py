"""`eval --expert_statistics`: the summary, the line, the page and the tracker, against a Qwen3 MoE in NumPy."""

import json

import numpy as np
import numpy_qwen3_moe
import pytest
from conftest import fails, run
from evaluation_runs import PLANNING

LENGTHS = (48, 40, 31, 30, 29, 28, 27, 26, 33, 8, 9, 5)
"""Tokens of the texts; the last three share sequences with others."""


@pytest.fixture(scope="module")
def texts(expert_checkpoint, tmp_path_factory):
    """A file of texts, and their tokens."""
    tokens = np.load(expert_checkpoint / "golden.npz")["tokens"]
    rows = [np.roll(tokens[i % 2], -i)[:length] for i, length in enumerate(LENGTHS)]
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [{"id": str(i), "text": " ".join(f"t{t}" for t in row)} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path, rows


@pytest.fixture
def arguments(expert_checkpoint, texts, tmp_path):
    """Of a run of three steps, each a shard of its own."""
    return [
        f"--model.ref={expert_checkpoint}", f"--data.path={texts[0]}", f"--output={tmp_path / 'results'}",
        "--hardware.slice=cpu-8", *PLANNING, "--workload.position=48", "--task.shard=1", "--pin=position=",
        "--expert_statistics=true",
    ]  # fmt: skip


def check_section(section, expert_checkpoint, rows):
    """Loads and entropies are those of all tokens of all texts, each once."""
    routing = [numpy_qwen3_moe.run(expert_checkpoint, row)[1] for row in rows]
    assert (section["windows"], section["all_windows"]) == (len(rows), len(rows))
    assert [each["layer"] for each in section["layers"]] == [0, 1, 2]
    for each, of_texts in zip(section["layers"], zip(*routing, strict=True), strict=True):
        probabilities, chosen = (np.concatenate(parts) for parts in zip(*of_texts, strict=True))
        load = numpy_qwen3_moe.loads(chosen, 8)
        assert each["load"] == load.tolist() and each["tokens"] == len(chosen)
        assert each["load_max_over_mean"] == pytest.approx(load.max() / load.mean())
        assert each["router_entropy"] == pytest.approx(numpy_qwen3_moe.entropies(probabilities).mean(), rel=1e-5)
        assert each["device_rows_max_over_mean"] >= 1


def test_a_run(expert_checkpoint, arguments, texts, tmp_path):
    """And one that goes on after it was interrupted, which computes two of its three steps."""
    page, results = tmp_path / "plan.html", tmp_path / "results"
    done = run("eval", *arguments, f"--report={page}", "--tracker.kind=json")
    assert done.returncode == 0, done.stderr
    first = json.loads((results / "summary.json").read_text())
    assert first["run"]["steps"] == 3
    check_section(first["experts"], expert_checkpoint, texts[1])
    assert json.loads((results / "run.json").read_text())["experts"] == first["experts"]
    busiest = max(first["experts"]["layers"], key=lambda layer: layer["load_max_over_mean"])
    text = f"experts: busiest {busiest['load_max_over_mean']:.2f} x mean (layer {busiest['layer']}), no overflow"
    assert text in done.stdout and text in page.read_text()
    assert page.read_text().count('data-tip="layer ') == 3
    metrics = [json.loads(line)["metrics"] for line in (results / "metrics.jsonl").read_text().splitlines()[1:-1]]
    loads = [[each[f"moe/layer_02/expert_{i:03d}_load"] for i in range(8)] for each in metrics]
    assert np.sum(loads, axis=1) == pytest.approx(np.ones(3)) and len({*map(tuple, loads)}) == 3

    for path in (results / "summary.json", results / "windows.parquet", *sorted((results / "parts").iterdir())[:2]):
        path.unlink()
    sorted((results / "experts").iterdir())[0].unlink()
    done = run("eval", *arguments)
    assert done.returncode == 0, done.stderr
    again = json.loads((results / "summary.json").read_text())
    assert again["run"]["steps"] == 2 and again["experts"] == first["experts"]
    assert json.loads((results / "run.json").read_text())["experts"] == first["experts"]


def test_windows_of_an_extraction(expert_checkpoint, arguments, texts, tmp_path):
    """Several share a sequence, which ends with padding; of the last sequences of the batch all is padding."""
    *arguments, _ = (each for each in arguments if not each.startswith(("--workload.position", "--task.shard")))
    windows = ("--task.kind=extraction", "--task.prefix=6", "--task.suffix=5", "--task.stride=7")
    windows += ("--workload.position=32", "--data.max_documents=2")
    done = run("eval", *arguments, *windows, "--expert_statistics=true")
    assert done.returncode == 0, done.stderr
    parts = [row[start : start + 11] for row in texts[1][:2] for start in range(0, len(row) - 10, 7)]
    check_section(json.loads((tmp_path / "results" / "summary.json").read_text())["experts"], expert_checkpoint, parts)


def test_a_run_that_had_none_at_first(arguments, tmp_path):
    """Its line says of how many windows the statistics are, or that there are none."""
    *without, _ = arguments
    assert run("eval", *without).returncode == 0
    results = tmp_path / "results"
    assert "experts" not in json.loads((results / "summary.json").read_text()) and not (results / "experts").exists()
    done = run("eval", *arguments)
    assert done.returncode == 0 and "no statistics of experts: these results were computed without" in done.stderr
    parts = sorted((results / "parts").iterdir())
    for path in (results / "summary.json", results / "windows.parquet", parts[-1]):
        path.unlink()
    done = run("eval", *arguments)
    assert done.returncode == 0, done.stderr
    assert f" of {len(LENGTHS)} windows" in done.stdout.replace("\n", " ")


@pytest.mark.quick
def test_models_without_statistics(checkpoint, golden, tmp_path):
    argv = (f"--data.path={checkpoint / 'text.jsonl'}", f"--output={tmp_path / 'results'}", *PLANNING)
    flags = ("--hardware.slice=cpu-8", "--expert_statistics=true")
    message = "expert_statistics is true, and this llama has no routed experts; leave it out"
    fails(run("eval", f"--model.ref={checkpoint}", *argv, *flags), 2, message)
    message = "computes the model: statistics are those of shardplan's decoder; leave out expert_statistics, or model."
    mixtral = (f"--model.ref={golden / 'mixtral'}", "--model.levanter_class=levanter")
    fails(run("eval", *mixtral, *argv, *flags), 2, message)
