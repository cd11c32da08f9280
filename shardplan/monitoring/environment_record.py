"""Records the software and hardware of a process in env.json, to explain why two runs of one plan differ."""

import os
import platform
import socket
import sys
from typing import Any

import jax

from shardplan.plan.plan import CHECKSUM, Plan
from shardplan.runtime.processes.start import package_versions

PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "MEGASCALE_", "OMP_")
"""Prefixes of the environment variables that change how JAX runs."""


def describe_process() -> dict[str, Any]:
    """Return the host, the devices, the versions and the environment variables of this process."""
    devices = jax.local_devices()
    return {
        "process": jax.process_index(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "versions": package_versions(),
        "devices": [str(device) for device in devices],
        "device_kind": devices[0].device_kind,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


def describe_run(plan: Plan, processes: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the command of a run, its plan, and the environment of each process.

    Args:
        processes: process -> its result of `describe_process`.
    """
    return {
        "command": sys.argv,
        "plan": {"model": plan.model.name, "slice": plan.hardware.slice, CHECKSUM: plan.to_json()[CHECKSUM]},
        "processes": [values for _, values in sorted(processes.items())],
    }
