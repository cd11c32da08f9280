"""Compares this host's devices with those of a host of the configured slice.

libtpu serves one process at a time, and in a slice of several hosts its start waits for all of them. So what can be
seen without it comes first: chips, device files, the process that holds them. Then JAX starts on this host alone.
"""

import os
import re
from collections.abc import Iterator

from shardplan.doctor import tpu_host
from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.subject import HostSubject
from shardplan.errors import one_line
from shardplan.hardware import Slice, chips_per_host
from shardplan.verify.compiler.libtpu import INSTALL_LIBTPU

PROCESS_CHIPS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Number of chips of a host -> their arrangement, as the value of TPU_CHIPS_PER_PROCESS_BOUNDS."""
OTHER_HOSTS = "MEGASCALE_"
"""Prefix of the variables that connect the hosts of several slices."""
HELD_BY = re.compile(r"already in use by process with pid (\d+)")
"""Pattern for libtpu's message that another process holds the TPU."""
END_IT = "end that process, or wait for it; a run needs the TPU for itself"


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Compare this host's devices with the slice; without a slice, report the devices."""
    if subject.hardware is not None and subject.hardware.is_cpu:
        if subject.processes is not None:
            yield _check_cpus(subject.hardware, subject.processes.count)
        return
    expected = subject.tpu_slice
    # imports JAX, which may be what does not work here
    from shardplan.runtime.private_jax import count_tpu_chips

    chips, generation = count_tpu_chips()
    if chips == 0 and expected is None:
        yield HostFinding(Level.OK, f"no TPU; {_cpus()} CPUs for virtual devices")
        return
    problems = list(_chip_problems(chips, generation, expected)) or list(_access_problems(chips))
    yield from problems or [_check_jax(chips, generation, expected)]


def _check_cpus(expected: Slice, processes: int) -> HostFinding:
    cpus = _cpus()
    if expected.devices % processes:
        return HostFinding(
            Level.ERROR,
            f"{expected.name} does not divide into {processes} processes",
            remedy="set JAX_NUM_PROCESSES, or hardware.slice, to a number that divides",
        )
    devices = expected.devices // processes
    measured = f"{devices} virtual CPU devices of this process on {cpus} CPUs"
    if devices > cpus:
        return HostFinding(Level.WARNING, measured, f"{devices} CPUs, for devices that do not wait for each other")
    return HostFinding(Level.OK, measured)


def _chip_problems(chips: int, generation: str, expected: Slice | None) -> Iterator[HostFinding]:
    """Compare the chips on the PCI bus with the slice."""
    if expected is None:
        return
    expected_chips = chips_per_host(expected)
    required = f"{expected_chips} chips of {expected.generation.name} on each host of {expected.name}"
    remedy = "start the run on the hosts of that slice, or name the slice of this host in hardware.slice"
    if chips == 0:
        yield HostFinding(Level.ERROR, "no TPU chip on the PCI bus of this host", required, remedy)
    elif generation != expected.generation.name or chips != expected_chips:
        yield HostFinding(Level.ERROR, f"{chips} chips of {generation}", required, remedy)


def _access_problems(chips: int) -> Iterator[HostFinding]:
    """Check whether this process can open the chips."""
    files = tpu_host.device_files()
    if len(files) < chips:
        yield HostFinding(
            Level.ERROR,
            f"{chips} TPU chips on the PCI bus, and {len(files)} device files in /dev",
            "one in /dev/accel* or /dev/vfio for each chip",
            "in a container, start it with --privileged, or with the device files",
        )
    elif (pid := tpu_host.lock_holder()) is not None or (pid := tpu_host.file_holder(files)) is not None:
        yield _held_by(pid)
    elif denied := [path for path in files if not os.access(path, os.R_OK | os.W_OK)]:
        yield HostFinding(Level.ERROR, f"{denied[0]} cannot be opened by this user", remedy="run as a user who may")


def _check_jax(chips: int, generation: str, expected: Slice | None) -> HostFinding:
    """Start JAX on this host's TPU only."""
    try:
        platform, kind, count = _start_jax(chips)
    except Exception as error:  # JAX raises RuntimeError, and what libtpu says is in it
        match = HELD_BY.search(str(error))
        return _held_by(int(match[1])) if match else HostFinding(Level.ERROR, f"JAX does not start: {one_line(error)}")
    if platform != "tpu":
        return HostFinding(
            Level.ERROR,
            f"{chips} chips of {generation}, and JAX starts on {platform}",
            "the platform tpu",
            f"install libtpu ({INSTALL_LIBTPU}), and leave JAX_PLATFORMS unset",
        )
    per_chip = expected.generation.devices_per_chip if expected else count // chips
    if count != chips * per_chip:
        return HostFinding(
            Level.ERROR, f"JAX has {count} devices ({kind})", f"{chips * per_chip}: {per_chip} for each chip"
        )
    return HostFinding(Level.OK, f"{chips} chips of {generation}, {count} devices in JAX ({kind})")


def _start_jax(chips: int) -> tuple[str, str, int]:
    """Start JAX in this process, only on the chips of this host; return platform, kind and number of devices."""
    for name in [name for name in os.environ if name.startswith(OTHER_HOSTS)]:
        del os.environ[name]
    if chips in PROCESS_CHIPS:
        os.environ |= {
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": PROCESS_CHIPS[chips],
            "TPU_VISIBLE_CHIPS": ",".join(map(str, range(chips))),
        }
    import jax

    devices = jax.local_devices()
    return devices[0].platform, devices[0].device_kind, len(devices)


def _held_by(pid: int) -> HostFinding:
    holder = f"process {pid} ({tpu_host.command_line(pid) or 'it has ended'})" if pid else "a process outside of here"
    return HostFinding(Level.ERROR, f"the TPU is held by {holder}", remedy=END_IT)


def _cpus() -> int:
    return len(os.sched_getaffinity(0))
