"""The environment variables of JAX: one clear line for each that it would refuse with a traceback, or misunderstand."""

import os

import pytest
from conftest import fails, run

from shardplan.errors import ConfigError
from shardplan.runtime.environment import ProcessVariables, read_process_variables

NAMES = {"address": "JAX_COORDINATOR_ADDRESS", "count": "JAX_NUM_PROCESSES", "index": "JAX_PROCESS_ID"}


@pytest.fixture
def variables(monkeypatch):
    """Sets the variables of a process."""

    def set_variables(**values):
        for name in NAMES.values():
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(NAMES[name], value)

    return set_variables


def test_processes(variables):
    variables()
    assert read_process_variables() == ProcessVariables(None, 1, 0)
    variables(count="1", index="0")
    assert read_process_variables() == ProcessVariables(None, 1, 0)
    variables(address="[::1]:1234", count="2", index="1")
    assert read_process_variables() == ProcessVariables("[::1]:1234", 2, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": "2"}, "JAX_NUM_PROCESSES is 2, and JAX_COORDINATOR_ADDRESS is not set; set it to host:port of"),
        ({"count": "two"}, "JAX_NUM_PROCESSES is 'two'; it must be a number, at least 1"),
        ({"count": "0"}, "JAX_NUM_PROCESSES is '0'; it must be a number, at least 1"),
        (
            {"address": "localhost", "count": "2", "index": "0"},
            "is 'localhost'; it must be host:port of process 0, for",
        ),
        ({"address": "localhost:99999", "count": "2", "index": "0"}, "is 'localhost:99999'; it must be host:port"),
        ({"address": "localhost:1", "count": "2"}, "JAX_PROCESS_ID is not set; set it to a number in the environment"),
        (
            {"address": "localhost:1", "count": "2", "index": "5"},
            "JAX_PROCESS_ID is 5, and JAX_NUM_PROCESSES is 2; number the processes from 0",
        ),
        ({"address": "localhost:1", "count": "2", "index": "-1"}, "JAX_PROCESS_ID is '-1'; it must be a number, at"),
    ],
)
def test_variables_that_cannot_be(variables, values, message):
    variables(**values)
    with pytest.raises(ConfigError) as error:
        read_process_variables()
    assert message in str(error.value)


@pytest.mark.parametrize("number", ["abc", "0", ""])
def test_a_number_of_cpu_devices_that_jax_would_refuse(monkeypatch, number):
    """JAX reads it when it is imported, whatever the command."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", number)
    fails(run("plan", "--config=configs/8b.yaml"), 2, f"JAX_NUM_CPU_DEVICES is '{number}'; it must be a number, at")


def test_an_evaluation_names_the_variable(variables, checkpoint, tmp_path):
    """Before it looks for devices: with the number of processes alone it would speak of missing devices."""
    variables(count="2")
    argv = [f"--model.ref={checkpoint}", f"--data.path={checkpoint / 'text.jsonl'}", f"--output={tmp_path / 'r'}"]
    fails(run("eval", *argv), 2, "JAX_NUM_PROCESSES is 2, and JAX_COORDINATOR_ADDRESS is not set")


@pytest.mark.parametrize(
    ("argv", "platform"),
    [
        (["plan"], "cpu"),
        (["plan", "--lint=missing.yaml", "--model=llama-3.1-8b"], "cpu"),
        (["verify"], "cpu"),
        (["checkpoint", "--schedule"], "cpu"),
        (["eval", "--dry_run"], "cpu"),
        (["checkpoint convert", "--to=copy", "--dry_run"], "cpu"),
        (["eval", "--data.path=missing.jsonl"], "tpu"),
    ],
)
def test_only_what_runs_on_devices_looks_for_them(monkeypatch, argv, platform):
    """Elsewhere the platform is overridden before JAX is imported, which would wait for a TPU or refuse to start."""
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    command, *others = argv
    plan = [] if "--lint=missing.yaml" in others else ["--plan=missing.json"]
    done = run(command, *others, *plan)
    assert done.returncode == 2 and "missing" in done.stderr
    assert os.environ["JAX_PLATFORMS"] == platform


def test_the_processes_of_a_slurm_job(monkeypatch):
    """As JAX detects them, without variables of JAX."""
    from shardplan.runtime.private_jax import detect_cluster

    assert detect_cluster() is None
    job = {"JOB_ID": "77", "STEP_NODELIST": "tpu-[3-4]", "NTASKS": "4", "PROCID": "2", "LOCALID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    address, count, index = detect_cluster()
    assert address.startswith("tpu-3:") and (count, index) == (4, 2)
