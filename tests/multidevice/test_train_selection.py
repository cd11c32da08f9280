"""`shardplan train --selection_statistics true`: tracker, heartbeats, run.json, audit and page, and what is refused."""

import json

import pytest
from conftest import ROOT, fails, run
from processes import fork_python

from shardplan.decoder.config import DecoderConfig
from shardplan.decoder.layers.sparse_layers import sparse_attentions
from shardplan.decoder.parts.attention.sparse.statistics import closed_form

CONFIG = ROOT / "configs" / "nsa-tiny.yaml"
STEPS, LAYERS, BATCH, POSITIONS, GROUPS = 3, 2, 16, 128, 2
ROWS = BATCH * POSITIONS * GROUPS


def train(output, *argv):
    """Train on 8 devices, and return what was printed on stderr."""
    arguments = ["-m", "shardplan", "train", "--config", CONFIG, "--output", output, "--trainer.steps_per_eval=1000"]
    process = fork_python([*arguments, f"--trainer.num_train_steps={STEPS}", *argv], ROOT)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    return error


def tracked(output):
    """Step -> the metrics of the tracker."""
    steps = {}
    for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()):
        if line["event"] == "log":
            steps.setdefault(line["step"], {}).update(line["metrics"])
    return steps


def test_a_training_records_its_selection(tmp_path):
    output, page = tmp_path / "r", tmp_path / "page.html"
    train(output, "--selection_statistics=true", "--report", page)
    config = DecoderConfig.from_hf_config(json.loads(CONFIG.with_suffix(".json").read_text()))
    sizes = next(sparse_attentions(config.segments)).sizes
    form = closed_form(sizes, POSITIONS)
    for metrics in tracked(output).values():
        assert {name: metrics[f"train/nsa/{name}"] for name in form} == form
        assert metrics["train/nsa/rows"] == LAYERS * ROWS and metrics["train/nsa/layer_01/rows"] == ROWS
    determinants = json.loads((output / "run.json").read_text())
    selection = determinants["selection"]
    assert determinants["selected_methods"] == {"dense_mask": [0, 1]} and selection["step"] == STEPS
    assert [each["layer"] for each in selection["layers"]] == [0, 1]
    for layer in selection["layers"]:
        assert {name: layer[name] for name in form} == form
        assert len(layer["load"]) == POSITIONS // sizes.selection_block
    assert json.loads((output / "summary.json").read_text())["selection"] == selection
    assert (output / "audit.txt").read_text().endswith("selected blocks of all 2 layers: dense_mask, as planned\n")
    last = json.loads((output / "heartbeat-0.jsonl").read_text().splitlines()[-1])
    assert last["statistics"] == selection["figures"]
    assert f"step {STEPS}: {LAYERS * ROWS:,} rows attend to {form['k_mean']:g} selected tokens" in page.read_text()
    # what a run records of itself does not keep it from going on
    assert "steps are done already" in train(output, "--selection_statistics=true")


def test_other_models_have_no_selection(tmp_path):
    argv = ("--config=configs/tiny-train.yaml", "--dry_run", "--output", tmp_path / "r", "--selection_statistics=true")
    fails(run("train", *argv), 2, "has no native sparse attention; leave it out")


@pytest.mark.whole
def test_nothing_is_recorded_without_statistics(tmp_path):
    train(tmp_path / "r")
    assert not any("nsa" in name for metrics in tracked(tmp_path / "r").values() for name in metrics)
    determinants = json.loads((tmp_path / "r" / "run.json").read_text())
    assert "selection" not in determinants and determinants["selected_methods"] == {"dense_mask": [0, 1]}
