"""Checks host memory against the needs of a load, shared memory, and the limit of open files."""

import math
import resource
import shutil
from collections.abc import Iterator

from shardplan.checkpoint.format.index import read_index
from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.host_memory import available_bytes
from shardplan.doctor.subject import HostSubject
from shardplan.errors import ShardplanError
from shardplan.hardware import GIB, chips_per_host
from shardplan.plan.workload.dtypes import itemsize
from shardplan.runtime.progress import size_text
from shardplan.storage import open_folder

PROCESS_GIB = 1.0
"""GiB that a process holds besides the model and load.gib: JAX, Levanter, programs and texts.

The process in docs/benchmarks/loader.md peaked at 0.45 GiB beside a model of 2.06 GiB, buffers of the load included.
"""
SHARED_MEMORY = "/dev/shm"
SHARED_BYTES = 2**20
"""Bytes of shared memory that the semaphores of worker processes take."""
OPEN_FILES = 1024
"""Limit of open files that is enough for a checkpoint's files, all open at once (405B has 191), and for connections."""


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Check memory, shared memory and the limit of open files."""
    yield _check_memory(subject)
    yield _check_shared_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES and soft != resource.RLIM_INFINITY:
        yield HostFinding(Level.WARNING, f"at most {soft} open files", str(OPEN_FILES), f"ulimit -n {4 * OPEN_FILES}")


def _check_memory(subject: HostSubject) -> HostFinding:
    available, source = available_bytes()
    model, activations = model_bytes(subject), activation_bytes(subject)
    needed, parts = int(PROCESS_GIB * GIB) + model + activations, [f"{PROCESS_GIB:g} GiB for the process"]
    remedy = "end other processes"
    if not subject.config.workload.is_training:  # Levanter's training loads weights by itself
        budget = subject.config.load.gib
        needed += int(budget * GIB)
        parts.insert(0, f"load.gib {budget:g}")
        remedy += ", or set a smaller load.gib"
    if model:
        parts.append(f"at least {size_text(model)} for the model, whose devices are CPUs")
    if activations:
        parts.append(f"{size_text(activations)} for activations of the devices")
        remedy += ", or plan with a smaller hardware.host_gib"
    required = f"{size_text(needed)}: {', '.join(parts)}"
    measured = f"{size_text(available)} available{source}"
    if available < needed:
        return HostFinding(Level.ERROR, measured, required, remedy)
    return HostFinding(Level.OK, measured, required)


def _check_shared_memory() -> HostFinding:
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        return HostFinding(Level.ERROR, f"{SHARED_MEMORY}: {error.strerror}", "shared memory", "mount a tmpfs there")
    if free < SHARED_BYTES:
        remedy = f"remove files in {SHARED_MEMORY}, or start the container with more (--shm-size)"
        return HostFinding(Level.ERROR, f"{size_text(free)} free in {SHARED_MEMORY}", size_text(SHARED_BYTES), remedy)
    return HostFinding(Level.OK, f"{size_text(free)} free in {SHARED_MEMORY}")


def model_bytes(subject: HostSubject) -> int:
    """Return the bytes of this host's memory that the model takes; 0 if its devices have memory of their own.

    Without a plan, the result is a lower bound that counts every parameter once; it is 0 if the checkpoint cannot be
    read.
    """
    hardware, config = subject.hardware, subject.config
    if hardware is None or not hardware.is_cpu or subject.processes is None:
        return 0
    if subject.plan is not None:
        per_device = sum(parameter.bytes_per_device for parameter in subject.plan.parameters)
        return per_device * hardware.devices // subject.processes.count
    if not config.model.ref:
        return 0
    try:
        tensors = read_index(open_folder(config.model.ref))
    except ShardplanError:  # the check of the checkpoint says why
        return 0
    elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return elements * itemsize(config.workload.param_dtype) // subject.processes.count


def activation_bytes(subject: HostSubject) -> int:
    """Return the bytes that the plan moves from this host's devices to its memory; 0 without a plan."""
    if subject.plan is None or subject.tpu_slice is None:
        return 0
    hardware = subject.tpu_slice
    return subject.plan.memory.host * chips_per_host(hardware) * hardware.generation.devices_per_chip
