"""The scripts of `shardplan launch` with the real Slurm and Ray, on this machine."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, run, transformers_losses
from test_eval import TIMEOUT, arguments
from try_launchers import ON_ONE_NODE, PROCESSES, local_slurm

SHARD, WORDS = 16, 12_000
"""Windows of a shard, and words of a text that has about 12 shards."""


def environment():
    """That of the processes: the Python of these tests, and this package."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def write_script(target, path, *argv):
    done = run("launch", *argv, "--to", target, f"--launch.hosts={PROCESSES}")
    assert done.returncode == 0, done.stderr
    path.write_text(done.stdout)


@pytest.mark.skipif(shutil.which("slurmctld") is None, reason="Slurm is not installed")
def test_a_slurm_job_stops_and_goes_on(checkpoint, tmp_path):
    """A signal ends it after a whole shard; submitted again, it does the rest. Names contain what shells replace."""
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    words = np.random.default_rng(0).integers(0, 256, WORDS)
    (folder / "text.txt").write_text(" ".join(f"t{word}" for word in words))
    results, logs = folder / "results", folder / "logs"
    argv = arguments(checkpoint, folder / "text.txt", results, "--task.shard", SHARD, f"--launch.logs={logs}")
    write_script("slurm", folder / "job.sh", *argv)
    (tmp_path / "slurm").mkdir()
    with local_slurm(tmp_path / "slurm") as variables:
        slurm = {"env": {**environment(), **variables}, "check": True, "text": True, "capture_output": True}
        submit = ["sbatch", "--parsable", *ON_ONE_NODE, folder / "job.sh"]
        deadline = time.monotonic() + TIMEOUT

        def wait_until(is_true):
            while not is_true():
                assert time.monotonic() < deadline, "\n".join(log.read_text() for log in logs.iterdir())
                time.sleep(0.05)

        def has_ended(job):
            return not subprocess.run(["squeue", "-h", "-j", job], **slurm).stdout

        first = subprocess.run(submit, **slurm).stdout.strip()
        wait_until(lambda: list(results.glob("parts/*")))
        subprocess.run(["scancel", "--signal=TERM", first], **slurm)
        wait_until(lambda: has_ended(first))
        assert not (results / "summary.json").exists()
        assert "stopped after a whole shard" in (logs / f"shardplan-{first}-0.log").read_text()
        second = subprocess.run(submit, **slurm).stdout.strip()
        wait_until(lambda: has_ended(second))
    assert {path.name for path in logs.iterdir()} == {
        f"shardplan-{job}-{i}.log" for job in (first, second) for i in range(PROCESSES)
    }
    summary = json.loads((results / "summary.json").read_text())
    assert summary["total"]["tokens"] == WORDS - 1
    assert 0 < summary["run"]["tokens"] < WORDS - 1  # the rest


@pytest.fixture
def start_with_ray(tmp_path):
    """Runs what launch prints for Ray, with variables added to the environment."""
    pytest.importorskip("ray", reason="Ray is not installed")

    def start(*argv, **variables):
        write_script("ray", tmp_path / "job.py", *argv)
        return subprocess.run(
            [sys.executable, tmp_path / "job.py"], env={**environment(), **variables}, cwd=tmp_path,
            capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip

    return start


@pytest.mark.whole
def test_ray(checkpoint, tmp_path, start_with_ray):
    done = start_with_ray(*arguments(checkpoint, checkpoint / "text.jsonl", tmp_path / "it's $HOME"))
    assert done.returncode == 0, done.stderr
    assert "exit codes: 0 0" in done.stdout
    results = json.loads((tmp_path / "it's $HOME" / "summary.json").read_text())
    assert results["total"]["loss_per_token"] == pytest.approx(transformers_losses(checkpoint).mean(), abs=2e-6)


def test_ray_numbers_processes_as_the_hosts_of_a_slice(tmp_path, start_with_ray, monkeypatch):
    """On two nodes that say they have TPUs; a stand-in for the evaluation writes down who it is, and fails."""
    from ray.cluster_utils import Cluster

    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho $HOST $JAX_PROCESS_ID >> '{tmp_path}/seen'\nexit $((JAX_PROCESS_ID + 3))\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")

    def node(worker):
        tpu = {"resources": {"TPU": 4}, "labels": {"ray.io/tpu-worker-id": str(worker)}}
        return {"num_cpus": 1, "env_vars": {"HOST": f"host-{worker}"}, **tpu}

    cluster = Cluster(initialize_head=True, head_node_args=node(1))
    try:
        cluster.add_node(**node(0))
        cluster.wait_for_nodes()
        evaluation = ("--model.ref=a/b", "--data.path=gs://b/t", "--hardware.slice=v4-16")
        done = start_with_ray(*evaluation, RAY_ADDRESS=cluster.address)
    finally:
        cluster.shutdown()
    assert done.returncode == 3 and "exit codes: 3 4" in done.stdout, done.stderr
    assert sorted((tmp_path / "seen").read_text().splitlines()) == ["host-0 0", "host-1 1"]
