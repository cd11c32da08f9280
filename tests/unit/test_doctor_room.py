"""`shardplan doctor`: memory and disks, as they are on hosts on which runs fail."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import GOLDEN, run
from doctor_checks import CPU_8, LLAMA, V4_64, findings, problem, subject

from shardplan.doctor import folder_space, host_memory
from shardplan.doctor.checks import disk, memory, output
from shardplan.doctor.findings import HostFinding, Level
from shardplan.errors import ConfigError
from shardplan.hardware import GIB


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: (2 * GIB, ""))
    found = problem(memory)
    assert found.level is Level.ERROR and found.measured == "2.00 GiB available"
    assert found.required == "3.00 GiB: load.gib 2, 1 GiB for the process"
    assert "set a smaller load.gib" in found.remedy
    assert [each.level for each in findings(memory, "--load.gib=0.5")] == [Level.OK, Level.OK]


def test_a_model_on_virtual_devices_is_in_host_memory(tmp_path):
    """Without a plan every parameter counts once, with a plan as often as it is stored."""
    argv = (f"--model.ref={LLAMA}", "--workload.param_dtype=float32")
    once = memory.model_bytes(subject(*argv, CPU_8))
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    assert once > 4 * config["vocab_size"] * config["hidden_size"]
    assert memory.model_bytes(subject(*argv, V4_64)) == 0
    path = str(tmp_path / "plan.json")
    assert run("plan", *argv, CPU_8, "--workload.batch=8", "--workload.position=64", "--json", path).returncode == 0
    per_device = sum(parameter["bytes_per_device"] for parameter in json.loads(Path(path).read_text())["parameters"])
    assert memory.model_bytes(subject(f"--plan={path}")) == 8 * per_device >= once
    assert memory.model_bytes(subject("--model.ref=nowhere/at/all", CPU_8)) == 0


def test_memory_of_a_training(monkeypatch):
    """Activations that a plan moves to the hosts count, once for each of their devices; load.gib does not."""
    training = subject("--model=pythia-70m", "--hardware.slice=v6e-16", "--workload.kind=train")
    plan = SimpleNamespace(memory=SimpleNamespace(host=3 * GIB))
    monkeypatch.setattr(memory, "available_bytes", lambda: (8 * GIB, ""))
    found = next(memory.check(replace(training, plan=plan)))
    assert found.level is Level.ERROR
    assert found.required == "13.00 GiB: 1 GiB for the process, 12.00 GiB for activations of the devices"
    assert found.remedy == "end other processes, or plan with a smaller hardware.host_gib"
    without = next(memory.check(training))
    assert without.level is Level.OK and without.required == "1.00 GiB: 1 GiB for the process"


def test_the_limit_of_a_container(tmp_path, monkeypatch):
    """A control group inside another one, whose page cache gives way."""
    group = tmp_path / "pod" / "container"
    group.mkdir(parents=True)
    files = {"memory.max": 8 * GIB, "memory.current": 6 * GIB, "memory.stat": f"anon 1\ninactive_file {GIB}"}
    for name, text in files.items():
        (group / name).write_text(f"{text}\n")
        (group.parent / name).write_text("max\n" if name == "memory.max" else f"{text}\n")
    (tmp_path / "own").write_text("4:memory:/other\n0::/pod/container\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {100 * 2**20} kB\n")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    assert host_memory.available_bytes() == (3 * GIB, f" (limit of the control group {group})")
    (group / "memory.max").write_text("max\n")
    assert host_memory.available_bytes() == (100 * GIB, "")


def test_shared_memory_and_open_files(monkeypatch):
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (256, 4096))
    found = problem(memory)
    assert (found.level, found.measured, found.remedy) == (Level.WARNING, "at most 256 open files", "ulimit -n 4096")
    monkeypatch.undo()
    monkeypatch.setattr(memory, "SHARED_MEMORY", "/nowhere")
    assert problem(memory).measured == "/nowhere: No such file or directory"
    monkeypatch.undo()
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    assert "start the container with more (--shm-size)" in problem(memory).remedy


def test_a_results_folder_that_cannot_be_written(tmp_path):
    found = problem(output, "--output=/sys/results")
    assert found.level is Level.ERROR and found.remedy == "make room, or name another folder in output"
    assert found.measured in {
        f"output '/sys/results' cannot be written: {os.strerror(number)} (/sys)"
        for number in (errno.EACCES, errno.EPERM, errno.EROFS)
    }
    (tmp_path / "file").touch()
    found = problem(output, f"--output={tmp_path / 'file' / 'results'}")
    assert f"cannot be written: Not a directory ({tmp_path / 'file'})" in found.measured


def test_a_results_folder_is_not_made(tmp_path):
    assert findings(output, f"--output={tmp_path / 'a' / 'b'}")[0].level is Level.OK
    assert not (tmp_path / "a").exists()


def test_a_full_disk(tmp_path, monkeypatch):
    """What can be opened there and takes no data."""
    monkeypatch.setattr(folder_space.tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    found = problem(output, f"--output={tmp_path}")
    assert found.measured == f"output '{tmp_path}' cannot be written: No space left on device"


def test_little_room(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=GIB // 2))
    found = problem(output, f"--output={tmp_path}")
    assert (found.level, found.required) == (Level.WARNING, "1.00 GiB")
    assert found.measured == f"output '{tmp_path}': 0.50 GiB free"


@pytest.mark.slow
def test_results_in_an_object_store(store):
    client, _, _ = store
    assert findings(output, "--output=s3://models/results") == [
        HostFinding(Level.OK, "output s3://models/results can be written")
    ]
    assert "Contents" not in client.list_objects_v2(Bucket="models")
    with pytest.raises(ConfigError, match="s3://nowhere/results cannot be written to: "):
        findings(output, "--output=s3://nowhere/results")


def test_temporary_files_and_caches(tmp_path, monkeypatch):
    """A cache that cannot be written is a warning: runs go on without it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "jax"))
    found = problem(disk)
    assert found.level is Level.WARNING and found.remedy.endswith("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")

    def fail():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(disk.tempfile, "gettempdir", fail)
    assert "No usable temporary directory found in" in problem(disk).measured
