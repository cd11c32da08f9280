"""Reads and sets, before JAX is imported, the environment variables that it reads at its start. Imports no JAX."""

import atexit
import gc
import os
import time
from dataclasses import dataclass

from shardplan.errors import ConfigError

STARTED = time.monotonic()
"""Time, by the monotonic clock, at which this process began to import this package."""
PLATFORMS, CPU_DEVICES = "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"
ADDRESS, PROCESS_COUNT, PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
MAX_PORT = 65535


@dataclass(frozen=True)
class ProcessVariables:
    """The processes of a run, as each process's environment describes them."""

    address: str | None
    """Host and port of process 0; None if JAX has to find the others, or if this is the only process."""
    count: int
    index: int
    """Index of this process within the run."""


def compute_on_cpu() -> None:
    """Make JAX use only the CPU, whatever the environment says, because planning and compiling need no accelerator.

    Otherwise, if libtpu is installed, JAX looks for a TPU, which takes seconds, and fails if there is none. Garbage
    collection is disabled too, also at exit: imports and searches make millions of objects, nearly all of which stay,
    and visiting them takes a third of a command's time.
    """
    os.environ[PLATFORMS] = "cpu"
    gc.disable()
    atexit.register(gc.freeze)


def check_environment() -> None:
    """Check JAX_NUM_CPU_DEVICES, for which JAX itself would raise an error with a traceback when it is imported.

    Raises:
        ConfigError: the variable is not a number.
    """
    if CPU_DEVICES in os.environ:
        _number(CPU_DEVICES, minimum=1)


def read_process_variables() -> ProcessVariables:
    """Read the coordinator's address, the number of processes and this process's index from the environment.

    Raises:
        ConfigError: a variable is missing, or has an invalid value.
    """
    address = os.environ.get(ADDRESS)
    count = _number(PROCESS_COUNT, minimum=1) if PROCESS_COUNT in os.environ else 1
    if address is None:
        if count > 1:
            raise ConfigError(f"{PROCESS_COUNT} is {count}, and {ADDRESS} is not set; set it to host:port of process 0")
        return ProcessVariables(None, 1, 0)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError(f"{ADDRESS} is {address!r}; it must be host:port of process 0, for example 'localhost:1234'")
    index = _number(PROCESS_ID, minimum=0)
    if index >= count:
        raise ConfigError(f"{PROCESS_ID} is {index}, and {PROCESS_COUNT} is {count}; number the processes from 0")
    return ProcessVariables(address, count, index)


def _number(name: str, minimum: int) -> int:
    """Return the value of a variable that must hold a number."""
    text = os.environ.get(name)
    if text is None:
        raise ConfigError(f"{name} is not set; set it to a number in the environment of every process")
    if not text.isdecimal() or int(text) < minimum:
        raise ConfigError(f"{name} is {text!r}; it must be a number, at least {minimum}")
    return int(text)
