"""`shardplan doctor`: the devices of a host that is one of the slice, and of others."""

import os
import subprocess
import sys

import pytest
from doctor_checks import CPU_8, V4_64, findings, problem

from shardplan.doctor import tpu_host
from shardplan.doctor.checks import devices
from shardplan.doctor.findings import HostFinding, Level
from shardplan.runtime import private_jax


def test_more_virtual_devices_than_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    found = problem(devices, CPU_8)
    assert (found.level, found.measured) == (Level.WARNING, "8 virtual CPU devices of this process on 2 CPUs")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert findings(devices, CPU_8)[0].level is Level.OK


def test_virtual_devices_that_do_not_divide(monkeypatch):
    for name, value in (("COORDINATOR_ADDRESS", "localhost:1"), ("NUM_PROCESSES", "3"), ("PROCESS_ID", "0")):
        monkeypatch.setenv(f"JAX_{name}", value)
    assert problem(devices, CPU_8).measured == "cpu-8 does not divide into 3 processes"


@pytest.fixture
def tpu_machine(monkeypatch):
    """Makes this host look like one with TPU chips; the fields of the fixture say what is there."""

    class Host:
        chips, generation, files, lock = 4, "v4", ["/dev/null"] * 4, None
        started = ("tpu", "TPU v4", 4)

        def start(self, _):
            if isinstance(self.started, Exception):
                raise self.started
            return self.started

    host = Host()
    monkeypatch.setattr(private_jax, "count_tpu_chips", lambda: (host.chips, host.generation))
    monkeypatch.setattr(tpu_host, "device_files", lambda: host.files)
    monkeypatch.setattr(tpu_host, "lock_holder", lambda: host.lock)
    monkeypatch.setattr(tpu_host, "file_holder", lambda _: None)
    monkeypatch.setattr(devices, "_start_jax", host.start)
    return host


def test_a_host_of_the_slice(tpu_machine):
    assert findings(devices, V4_64) == [HostFinding(Level.OK, "4 chips of v4, 4 devices in JAX (TPU v4)")]
    assert findings(devices) == [HostFinding(Level.OK, "4 chips of v4, 4 devices in JAX (TPU v4)")]


def test_a_machine_with_a_whole_slice(tpu_machine):
    """The 8 chips of v5e-8 are on one machine, though hosts of larger slices have 4."""
    tpu_machine.chips, tpu_machine.generation, tpu_machine.files = 8, "v5e", ["/dev/null"] * 8
    tpu_machine.started = ("tpu", "TPU v5 lite", 8)
    assert findings(devices, "--hardware.slice=v5e-8")[0].level is Level.OK
    assert problem(devices, "--hardware.slice=v5e-16").measured == "8 chips of v5e"


def test_two_devices_a_chip(tpu_machine):
    tpu_machine.generation, tpu_machine.started = "v3", ("tpu", "TPU v3", 8)
    assert findings(devices, "--hardware.slice=v3-32")[0].level is Level.OK


@pytest.mark.parametrize(
    ("changes", "measured", "remedy"),
    [
        ({"chips": 0, "generation": ""}, "no TPU chip on the PCI bus of this host", "name the slice of this host"),
        ({"generation": "v5p"}, "4 chips of v5p", "start the run on the hosts of that slice"),
        ({"files": []}, "4 TPU chips on the PCI bus, and 0 device files in /dev", "start it with --privileged"),
        ({"lock": 1}, "the TPU is held by process 1 (", "end that process"),
        ({"lock": 0}, "the TPU is held by a process outside of here", "end that process"),
        (
            {"started": RuntimeError("ABORTED: The TPU is already in use by process with pid 999999999. Not")},
            "the TPU is held by process 999999999 (it has ended)",
            "end that process",
        ),
        ({"started": RuntimeError("UNAVAILABLE: no\n route")}, "JAX does not start: UNAVAILABLE: no route", ""),
        ({"started": ("cpu", "cpu", 1)}, "4 chips of v4, and JAX starts on cpu", "install libtpu (pip install"),
        ({"started": ("tpu", "TPU v4", 3)}, "JAX has 3 devices (TPU v4)", ""),
    ],
)  # fmt: skip
def test_a_host_that_is_not_one_of_the_slice(tpu_machine, changes, measured, remedy):
    vars(tpu_machine).update(changes)
    found = problem(devices, V4_64)
    assert found.level is Level.ERROR and found.measured.startswith(measured) and remedy in found.remedy


def test_device_files_that_this_user_may_not_open(tpu_machine, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert problem(devices, V4_64).measured == "/dev/null cannot be opened by this user"


def test_who_holds_a_lock_and_a_file(tmp_path):
    """As libtpu locks its lock file, and opens its device files."""
    lock = tmp_path / "lock"
    lock.touch()
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    assert tpu_host.lock_holder(str(lock)) is None and tpu_host.lock_holder(str(tmp_path / "none")) is None
    with subprocess.Popen([sys.executable, "-c", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline()
        assert tpu_host.lock_holder(str(lock)) == holder.pid
        assert tpu_host.file_holder([str(lock)]) == holder.pid
        assert "fcntl.lockf" in tpu_host.command_line(holder.pid)
        holder.stdin.close()
    assert tpu_host.lock_holder(str(lock)) is None and tpu_host.file_holder([str(lock)]) is None


def test_jax_starts_for_the_chips_of_this_host_alone(monkeypatch):
    import jax

    seen = {}
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "other:1")
    for name in ("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS"):
        monkeypatch.setenv(name, "")
    original = jax.local_devices
    monkeypatch.setattr(jax, "local_devices", lambda: seen.update(os.environ) or original())
    assert devices._start_jax(4) == ("cpu", "cpu", 8)
    assert "MEGASCALE_COORDINATOR_ADDRESS" not in seen
    bounds = (seen["TPU_PROCESS_BOUNDS"], seen["TPU_CHIPS_PER_PROCESS_BOUNDS"], seen["TPU_VISIBLE_CHIPS"])
    assert bounds == ("1,1,1", "2,2,1", "0,1,2,3")
