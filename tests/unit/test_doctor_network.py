"""`shardplan doctor`: environment variables, the coordinator, checkpoint, texts and Plan."""

import shutil
import socket
from contextlib import ExitStack

import pytest
from conftest import LLAMA_CONFIG, run
from doctor_checks import CPU_8, LLAMA, V4_64, findings, problem, subject

from shardplan.doctor.checks import checkpoint, coordinator, devices, environment, memory, plan_file, texts
from shardplan.doctor.findings import HostFinding, Level
from shardplan.errors import CheckpointError, ConfigError

NAMES = (
    "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """The environment of a process that runs alone, without flags of compilers."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_variables_that_contradict_each_other(monkeypatch, raises_message):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with raises_message(ConfigError):
        findings(environment)
    assert findings(coordinator) == [] and findings(devices, CPU_8) == []
    assert memory.model_bytes(subject(f"--model.ref={LLAMA}", CPU_8)) == 0


def test_a_process_that_would_run_alone(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    found = problem(environment)
    assert found.level is Level.WARNING and "this process would run alone" in found.measured


def test_a_number_of_processes_that_is_not_that_of_hosts(monkeypatch):
    for name, value in (("COORDINATOR_ADDRESS", "localhost:1"), ("NUM_PROCESSES", "4"), ("PROCESS_ID", "0")):
        monkeypatch.setenv(f"JAX_{name}", value)
    assert problem(environment, V4_64).required == "8, one for each host of v4-64"
    assert findings(environment, "--hardware.slice=v4-32")[0].level is Level.OK


def test_a_platform_that_hides_the_tpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = problem(environment, V4_64)
    assert (found.level, found.remedy) == (Level.ERROR, "unset JAX_PLATFORMS")
    assert found.measured == "JAX_PLATFORMS is 'cpu': JAX does not use the TPU"
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert findings(environment, V4_64) == [HostFinding(Level.OK, "JAX_PLATFORMS=tpu,cpu")]


def test_flags_against_the_plan(monkeypatch):
    monkeypatch.setenv(
        "LIBTPU_INIT_ARGS", "--xla_enable_async_all_gather=false --xla_tpu_other --xla_enable_async_all_reduce=true"
    )
    found = problem(environment, V4_64)
    assert (
        found.level is Level.WARNING and found.measured == "LIBTPU_INIT_ARGS sets xla_enable_async_all_gather to false"
    )
    assert found.required.startswith("true: the plan's times") and found.remedy == "leave it out of LIBTPU_INIT_ARGS"
    assert findings(environment, CPU_8)[0].level is Level.OK


def test_flags_of_libtpu_that_end_jax(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_x=1 --xla_tpu_overlap_compute_collective_tc=false")
    found = problem(environment, V4_64)
    assert found.level is Level.ERROR and found.remedy == "set it in LIBTPU_INIT_ARGS"
    assert found.measured.startswith("XLA_FLAGS has xla_tpu_overlap_compute_collective_tc, which only libtpu knows")


@pytest.fixture
def processes(monkeypatch):
    """Sets the address of process 0 and the number of this process, of two."""

    def set_variables(address, index):
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
        monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
        monkeypatch.setenv("JAX_PROCESS_ID", str(index))

    return set_variables


def test_no_coordinator():
    assert "JAX_COORDINATOR_ADDRESS is not set" in findings(coordinator)[0].measured


@pytest.mark.parametrize("index", [0, 1])
def test_an_address_that_does_not_resolve(processes, index):
    processes("no-such-host.invalid:1234", index)
    found = problem(coordinator)
    assert found.measured.startswith("no-such-host.invalid does not resolve: ")
    assert found.remedy == "correct the host in JAX_COORDINATOR_ADDRESS, or DNS"


def test_a_port_in_use_and_a_free_one(processes):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        processes(f"localhost:{port}", 0)
        found = problem(coordinator)
        assert found.measured == f"port {port}: in use: an earlier run is still there"
        assert found.remedy == "end it, or set another port in JAX_COORDINATOR_ADDRESS"
        processes(f"localhost:{port}", 1)
        assert "accepts connections" in findings(coordinator)[0].measured
    processes(f"127.0.0.1:{port}", 0)
    assert findings(coordinator) == [HostFinding(Level.OK, f"process 0 can listen at port {port} of 127.0.0.1")]
    processes(f"127.0.0.1:{port}", 1)
    assert findings(coordinator)[0].level is Level.OK
    assert f"nothing listens at port {port} yet" in findings(coordinator)[0].measured


def test_process_0_on_another_host(processes):
    processes("192.0.2.1:1234", 0)  # for documentation, of no host
    found = problem(coordinator)
    assert found.level is Level.WARNING
    assert found.measured == "192.0.2.1 is 192.0.2.1, which is no address of this host"


def test_a_firewall_in_between(processes, monkeypatch):
    """A listener whose queue is full answers no more, as a firewall that drops packets."""
    monkeypatch.setattr(coordinator, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as open_sockets:
        address = server.getsockname()
        for _ in range(4):
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        processes(f"127.0.0.1:{address[1]}", 1)
        found = problem(coordinator)
    assert found.level is Level.ERROR and found.remedy.startswith("open the port in the firewall between the hosts")
    assert found.measured.endswith("cannot be reached: 127.0.0.1 does not answer within 0.3 s")


def test_a_checkpoint_that_can_be_read():
    (found,) = findings(checkpoint, f"--model.ref={LLAMA}", V4_64)
    assert found.level is Level.OK and "21 tensors, 0.66 MiB in 3 files; 0.66 MiB read at " in found.measured
    assert found.measured.endswith("(25.00 GB/s assumed by forecasts)")


def test_a_checkpoint_with_a_missing_file(tmp_path, raises_message):
    folder = shutil.copytree(LLAMA, tmp_path / "llama")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with raises_message(CheckpointError):
        findings(checkpoint, f"--model.ref={folder}")
    (folder / "config.json").unlink()
    with raises_message(ConfigError):
        findings(checkpoint, f"--model.ref={folder}")


def test_a_server_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(CheckpointError, match=rf"http://127\.0\.0\.1:{port}/llama/config\.json cannot be opened: "):
        findings(checkpoint, f"--model.ref=http://127.0.0.1:{port}/llama")


def test_texts(tmp_path, monkeypatch, raises_message):
    path = tmp_path / "a.txt"
    path.write_text("text " * 1000)
    argv = (f"--data.path={tmp_path}",)
    (found,) = findings(texts, *argv)
    assert found.level is Level.OK and "0.00 MiB in 1 files; 0.00 MiB read at " in found.measured
    with raises_message(ConfigError):
        findings(texts, f"--data.path={tmp_path / 'b.txt'}")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4999))
    found = problem(texts, *argv)
    assert found.level is Level.ERROR and "for the copy of the texts that a run makes" in found.required


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    done = run("plan", f"--model.config={LLAMA_CONFIG}", V4_64, "--workload.position=128", f"--json={path}")
    assert done.returncode == 0, done.stderr
    return str(path)


@pytest.mark.slow
def test_a_plan_decides_the_slice(plan_path):
    (found,) = findings(plan_file, f"--plan={plan_path}")
    assert found.level is Level.OK and f"{LLAMA_CONFIG} on v4-64, mesh " in found.measured
    given = subject(f"--plan={plan_path}")
    assert given.tpu_slice is not None and given.tpu_slice.name == "v4-64"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--plan=missing.json"], "missing.json"),
        (["--hardware.slice=v4-32"], r"hardware\.slice is v4-32, plan .* has v4-64; leave it out, or plan again"),
        (["--model.config=qwen3-32b"], "the plan is for .* the model has .*; plan again"),
    ],
)
def test_a_plan_that_does_not_fit(plan_path, argv, message):
    with pytest.raises(ConfigError, match=message):
        findings(plan_file, f"--plan={plan_path}", *argv)
