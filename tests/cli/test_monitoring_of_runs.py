"""What `shardplan eval` records of a run, and how it judges one."""

import json
from pathlib import Path

import jax
import pytest
from conftest import run, start
from evaluation_runs import arguments, summary

STAGES = ["started", "loaded", "compiled", "first step"]


@pytest.fixture
def steps(checkpoint, tmp_path):
    """Arguments of a run of 36 steps, in shards of a few steps each."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"t{i % 256}" for i in range(1000)))
    return [*arguments(checkpoint, tmp_path), "--workload.position=8", "--task.shard=8", f"--data.path={text}"]


def records(tmp_path: Path, name: str):
    return json.loads((tmp_path / "results" / name).read_text())


def test_a_run_has_records(steps, tmp_path):
    trace = tmp_path / "trace"
    done = run("eval", *steps, f"--profile={trace}")
    assert done.returncode == 0, done.stderr
    plan = summary(tmp_path)["plan"]
    environment = records(tmp_path, "env.json")
    assert environment["plan"]["checksum"] == plan["checksum"]
    assert [each["devices"] for each in environment["processes"]] == [[str(device) for device in jax.local_devices()]]
    memory = records(tmp_path, "memory.json")
    assert memory["planned"] == plan["memory"] and [*memory["measured"]] == STAGES
    loaded = memory["measured"]["loaded"]["arrays"] - memory["measured"]["started"]["arrays"]
    assert loaded == plan["memory"]["parameters"]
    audit = (tmp_path / "results" / "audit.txt").read_text().splitlines()
    assert len(audit) == len(plan["parameters"]) + 2
    goodput = records(tmp_path, "goodput.json")
    [attempt] = goodput["attempts"]
    assert attempt["is_completed"] and attempt["windows"] == summary(tmp_path)["run"]["windows"]
    assert 0 < goodput["goodput"] < 1 and attempt["phases"].keys() >= {"loading", "compiling", "evaluating"}
    [profile] = trace.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(profile)).planes
    assert any("CPU" in plane.name for plane in planes)


def test_a_run_that_is_too_slow_is_stopped_and_goes_on(steps, tmp_path, caplog):
    """The limit is a rate that no run has."""
    done = start("eval", *steps, "--gate.factor=1e9", "--gate.stop=true")
    [line] = [line for line in done.stderr.splitlines() if line.startswith("shardplan eval: ")]
    assert done.returncode == 7 and line.startswith("shardplan eval: stopped: "), done.stderr
    assert "that the plan predicts, below gate.factor 1e+09; in " in line
    assert line.endswith("; the same command goes on from here")
    first = records(tmp_path, "goodput.json")["attempts"]
    assert [each["is_completed"] for each in first] == [False] and not (tmp_path / "results/summary.json").exists()
    done = run("eval", *steps, "--gate.factor=1e9")
    assert done.returncode == 0 and "below gate.factor 1e+09" in caplog.text
    attempts = records(tmp_path, "goodput.json")["attempts"]
    assert [each["is_completed"] for each in attempts] == [False, True]
    windows = sum(each["windows"] for each in attempts)
    assert attempts[0]["windows"] >= 40 and windows == 143  # (1000 - 1) / 7, of which none is scored twice
