"""`shardplan train` of Native Sparse Attention with positions over 4 devices, against the same training on one."""

import json

import pytest
from conftest import ROOT
from processes import fork_python

CONFIG = ROOT / "configs" / "nsa-tiny.yaml"
STEPS = 3
SHARDED = ("--pin", "position=data", "mesh.data=4")
STATISTICS = ("k_mean", "k_max", "pct_at_max", "rows")


def train(output, *argv):
    """Train three steps, and return the metrics of each step, and those of the evaluation after the last one."""
    arguments = ["-m", "shardplan", "train", "--config", CONFIG, "--output", output, "--selection_statistics=true"]
    process = fork_python(
        [*arguments, f"--trainer.num_train_steps={STEPS}", "--trainer.steps_per_eval=1000", *argv], ROOT
    )
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    steps = {}
    for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()):
        if line["event"] == "log":
            steps.setdefault(line["step"], {}).update(line["metrics"])
    return steps


def test_losses_are_those_of_one_device(tmp_path):
    """The plan is the pinned one, and losses, evaluation and statistics of the selection agree."""
    many = train(tmp_path / "many", "--hardware.slice=cpu-4", *SHARDED)
    one = train(tmp_path / "one", "--hardware.slice=cpu-1")
    plan = json.loads((tmp_path / "many" / "plan.json").read_text())
    assert plan["compute_mapping"] == {"position": ["data"]}
    assert (plan["attention"]["strategy"], plan["attention"]["ring"]) == ("all_gather", 4)
    losses = {name for metrics in one.values() for name in metrics if name.endswith("loss")}
    assert {"train/loss", "eval/loss"} <= losses
    trained = [step for step, metrics in one.items() if "train/loss" in metrics]
    assert len(trained) >= STEPS
    for step, metrics in one.items():
        for name in losses & {*metrics}:
            assert many[step][name] == pytest.approx(metrics[name], rel=1e-4), (step, name)
        for name in (f"train/nsa/{each}" for each in STATISTICS if "train/loss" in metrics):
            assert many[step][name] == metrics[name], (step, name)
