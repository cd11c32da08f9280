"""Connects the processes of a run, first to their hub and then in JAX."""

import atexit
import contextlib
import json
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax

from shardplan.errors import PeerError, ShardplanError
from shardplan.runtime.device_memory import describe_device_memory
from shardplan.runtime.environment import ProcessVariables
from shardplan.runtime.private_jax import abandon_coordination, coordinator_address, key_value_store
from shardplan.runtime.processes.hub.hub import AGAIN, Member
from shardplan.runtime.processes.hub.messages import host_and_port, problem_values
from shardplan.runtime.processes.link import Link, end_together, error_of, open_link, start_hub
from shardplan.runtime.processes.timing import TIMING, ProcessTiming
from shardplan.runtime.processes.watch.stacks import process_stacks
from shardplan.runtime.processes.watch.watch import Watch
from shardplan.runtime.progress import print_note

PACKAGES = (
    "shardplan", "jax", "jaxlib", "libtpu", "marin-haliax", "marin-levanter",
    "transformers", "tokenizers",
)  # fmt: skip
"""Packages that must have the same version in all processes."""
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
"""Settings of JAX that change programs, whether from the environment or not."""
COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables with flags of the compiler."""
STORE_KEY = "shardplan/hub"
"""Key under which process 0 publishes the hub's address if JAX has connected the processes already."""
logger = logging.getLogger(__name__)
_link: Link | None = None
_watch: Watch | None = None


def connect_processes(variables: ProcessVariables, facts: Mapping[str, str]) -> None:
    """Connect the processes of a run at the address in the environment, and start their devices.

    Args:
        facts: name -> value of everything that must be equal in all processes, besides package versions.

    Raises:
        PeerError: a process is missing, or was lost meanwhile.
        ConfigError: two processes have the same id, were started for different numbers of processes, or have different
            facts.
    """
    global _link
    assert variables.address is not None
    if variables.count == 1:
        jax.distributed.initialize(variables.address, num_processes=1, process_id=0)
        return
    if variables.index == 0:
        start_hub(*host_and_port(variables.address), variables.count, has_service=True)
    _link = open_link(variables.address, _member(variables.index, variables.count, facts), print_note)
    # JAX would start its coordination service in process 0, whose end would end all: that of the hub is used instead
    unused = {"coordinator_bind_address": "127.0.0.1:0"} if variables.index == 0 else {}
    with _link.work():  # JAX would wait 300 s for a process that is lost, and end this one by SIGABRT
        jax.distributed.initialize(
            _link.jax_address, num_processes=variables.count, process_id=variables.index, **unused
        )
        atexit.register(_end)  # runs before JAX's
        jax.devices()  # waits for the others, too


def current_watch() -> Watch:
    """Return the watch over this process: a `Link` to the hub, or a `Watch` if there are no other processes."""
    global _link, _watch
    process_stacks().device_lines = describe_device_memory
    if jax.process_count() == 1:
        _watch = _watch or Watch()
        return _watch
    if _link is None:  # connected by the caller, or by the cluster
        _link = _open_through_store()
    return _link


def _end() -> None:
    """Leave the run when the program ends, whether it has failed or not.

    Otherwise JAX would wait for the other processes, and end this one by SIGABRT after 100 s if another one was lost or
    is stuck.
    """
    if hasattr(sys, "last_value"):  # it has failed: the others learn of it when the connection ends
        abandon_coordination()
        return
    if _link is not None and _link.problem is not None:  # it came when this process had done its part
        logger.error("%s", _link.problem)
    try:
        end_together()
    except ShardplanError:
        abandon_coordination()


def _open_through_store() -> Link:
    """Start a hub for processes that JAX has connected, and publish its address in JAX's key-value store."""
    index, count = jax.process_index(), jax.process_count()
    member, store = _member(index, count, {}), key_value_store()
    if index == 0:
        host, _ = host_and_port(coordinator_address() or f"{socket.gethostname()}:0")
        try:
            address = start_hub(host, 0, count, has_service=False)
        except ShardplanError as error:
            store.key_value_set(STORE_KEY, json.dumps(dict(problem_values(error))), allow_overwrite=True)
            raise
        store.key_value_set(STORE_KEY, json.dumps({"address": address}), allow_overwrite=True)
    else:
        address = _hub_address(store)
    link = open_link(address, member, print_note)
    atexit.register(_end)
    return link


def _hub_address(store: Any, timing: ProcessTiming = TIMING) -> str:
    """Wait for the address of the hub that process 0 starts.

    Raises:
        PeerError: process 0 has not started the hub in time.
        ConfigError: process 0 could not start the hub.
    """
    started = time.monotonic()
    while True:
        try:
            message = json.loads(store.blocking_key_value_get(STORE_KEY, round(1000 * timing.no_hub_line_s)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        else:
            if "address" in message:
                return str(message["address"])
            problem = error_of(message)
            raise type(problem)(f"process 0: {problem}")
        seconds = time.monotonic() - started
        if seconds >= timing.start_limit_s:
            raise PeerError(
                f"process 0 has begun no work that needs all processes within {seconds:.0f} s; call the same functions "
                f"of shardplan in every process, and {AGAIN}"
            )
        print_note(f"waiting for process 0, which has begun no work that needs all processes yet, {seconds:.0f} s")


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of every installed package of `PACKAGES`."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _member(index: int, count: int, facts: Mapping[str, str]) -> Member:
    return Member(index, count, socket.gethostname(), os.getpid(), {**package_versions(), **_settings(), **facts})


def _settings() -> dict[str, str]:
    """Return name -> value of the JAX settings and compiler flags that change programs."""
    values = {name: str(getattr(jax.config, name)) for name in SETTINGS}
    for name in COMPILER_FLAGS:
        flags = os.environ.get(name, "").split()
        values[name] = " ".join(sorted(flag for flag in flags if "dump" not in flag))  # a folder of this host
    return values
