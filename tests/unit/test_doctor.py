"""`shardplan doctor`: the processes of the checks, and the command."""

import json
import socket

import pytest
from conftest import run
from doctor_checks import V4_64, subject
from lora_adapters import matrices, write_adapter

from shardplan.doctor import run as doctor_run
from shardplan.doctor.findings import Check, Level


@pytest.fixture
def with_jax(monkeypatch, tmp_path):
    """Makes one check, of a slice that needs JAX, with another `jax` first on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def check_with(jax_source, check=Check.DEVICES, limit_s=60.0):
        (tmp_path / "jax.py").write_text(jax_source)
        monkeypatch.setattr(doctor_run, "LIMIT_S", limit_s)
        monkeypatch.setattr(doctor_run, "checks_of", lambda _: [check])
        steps = []
        found = doctor_run.run_checks(subject(V4_64), steps.append)
        assert steps == [{check}]
        return found[check]

    return check_with


def test_a_start_of_devices_that_hangs(with_jax):
    (found,) = with_jax("import time; time.sleep(600)", limit_s=1.5)
    assert found.level is Level.ERROR and found.measured == "no result after 1.5 s"
    assert "end other processes that use the TPU" in found.remedy


def test_an_import_that_is_slow(with_jax):
    """As on a busy host: it is said, and does not make the host unfit."""
    (found,) = with_jax("import time; time.sleep(600)", Check.IMPORTS, limit_s=1.5)
    assert (found.level, found.measured) == (Level.WARNING, "no result after 1.5 s")
    assert found.remedy.startswith("start doctor again: the first import")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "measured"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; print('F fatal flag', flush=True); os.abort()", "its process was ended by SIGABRT: F fatal flag"),
        ("raise AttributeError('no such thing')", "its process ended with code 1: AttributeError: no such thing"),
    ],
)
def test_a_jax_that_is_broken(with_jax, source, measured):
    (found,) = with_jax(source)
    assert found.level is Level.ERROR and found.measured.startswith(measured)


def test_a_check_that_prints_more_than_a_pipe_holds(with_jax):
    """What it prints neither blocks it nor is shown."""
    source = (
        "import os\ntry:\n os.write(2, b'x' * 10**6)\n os.write(2, b'x')\nexcept OSError: pass\nimport no_such_module"
    )
    (found,) = with_jax(source)
    assert found.measured == "No module named 'no_such_module'"


@pytest.fixture
def patient(monkeypatch):
    """The machine that runs the tests may be busy."""
    monkeypatch.setattr(doctor_run, "LIMIT_S", 120.0)


@pytest.mark.slow
def test_a_healthy_host(checkpoint, tmp_path, patient):
    own = (f"--model.ref={checkpoint}", f"--data.path={checkpoint / 'text.jsonl'}", f"--output={tmp_path / 'results'}")
    done = run("doctor", "--config=configs/tiny.yaml", *own, "--json=-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["host"] == socket.gethostname() and report["level"] in ("ok", "warning")
    assert {each["check"] for each in report["findings"]} == {*Check} - {Check.PLAN}
    of_this_machine = (Check.DEVICES, Check.MEMORY, Check.DISK, Check.OUTPUT)
    assert {each["level"] for each in report["findings"] if each["check"] not in of_this_machine} == {"ok"}, report
    assert "21 tensors" in done.stderr and not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_plan_by_itself(checkpoint, tmp_path, patient, monkeypatch):
    """It names the checkpoint, its adapter and the slice."""
    # the others take seconds, and are in the test above
    for check in {*Check} - {Check.PLAN, Check.DEVICES, Check.CHECKPOINT}:
        monkeypatch.delitem(doctor_run.MODULES, check)
    path = str(tmp_path / "plan.json")
    planning = ("--workload.batch=4", "--workload.position=64", "--hardware.slice=cpu-2", f"--json={path}")
    adapter = write_adapter(tmp_path / "adapter", matrices({"model.layers.0.self_attn.q_proj": (32, 32)}))
    assert run("plan", f"--model.ref={checkpoint}", f"--model.adapter={adapter}", *planning).returncode == 0
    done = run("doctor", "--plan", path, "--json", "-")
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert f"{adapter}: an adapter that changes 1 of the tensors" in [each["measured"] for each in findings]
    measured = {each["check"]: each["measured"] for each in reversed(findings)}
    assert measured["plan"].startswith(f"{path}: {checkpoint} + {adapter} on cpu-2, mesh ")
    assert measured["devices"].startswith("2 virtual CPU devices") and "21 tensors" in measured["checkpoint"]


@pytest.mark.slow
def test_without_a_configuration(patient, monkeypatch):
    monkeypatch.delitem(doctor_run.MODULES, Check.IMPORTS)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    done = run("doctor")
    assert done.returncode == 2
    host = socket.gethostname()
    message = f"shardplan doctor: {host} is not ready for a run (environment); what to do is in the lines above"
    assert done.stderr.splitlines()[-1] == message
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f"{host}: 1 error, ") and "Traceback" not in done.stderr
    assert any(line.startswith("error    environment  JAX_NUM_PROCESSES is 2, and JAX_COORD") for line in rest)
