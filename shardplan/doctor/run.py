"""Runs the checks, each in its own process, so that a check that hangs or is killed is a finding as well.

All run at the same time, and those that have not ended within `LIMIT_S` seconds are killed.
"""

import os
import signal
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection

from shardplan.doctor.findings import Check, HostFinding, HostFindings, Level
from shardplan.doctor.subject import HostSubject
from shardplan.errors import ShardplanError, one_line

LIMIT_S = 10.0
"""Maximum seconds of a check."""
LOG_BYTES = 2**16
"""Bytes of a check's output that are kept: the capacity of a pipe."""

MODULES = {
    Check.VERSIONS: "versions",
    Check.IMPORTS: "imports",
    Check.DEVICES: "devices",
    Check.MEMORY: "memory",
    Check.DISK: "disk",
    Check.OUTPUT: "output",
    Check.ENVIRONMENT: "environment",
    Check.COORDINATOR: "coordinator",
    Check.CHECKPOINT: "checkpoint",
    Check.TEXTS: "texts",
    Check.PLAN: "plan_file",
}
"""Check -> the module in `checks` whose function `check` makes it; only the check's process imports the module."""
FIRST_IMPORT = "start doctor again: the first import reads all packages from the disk"
REACH = "see whether this host reaches {}: network, credentials, mounts"
LATE = {
    Check.IMPORTS: FIRST_IMPORT,
    Check.PLAN: FIRST_IMPORT,
    Check.DEVICES: f"{FIRST_IMPORT}; then end other processes that use the TPU, turn transparent hugepages on, without "
    "which it starts slowly, or restart the host",
    Check.COORDINATOR: "see whether its host resolves, as with `getent hosts NAME`",
    Check.CHECKPOINT: REACH.format("model.ref"),
    Check.TEXTS: REACH.format("data.path"),
    Check.OUTPUT: REACH.format("output"),
    Check.DISK: "see whether a network file system hangs, as with `df`",
}
"""Check -> the remedy if it takes too long."""
SLOW = (Check.IMPORTS, Check.PLAN)
"""Checks that import large packages, so that exceeding the time limit need not mean a fault."""
FATAL_FLAG = "leave out of XLA_FLAGS what JAX does not know; options of libtpu belong in LIBTPU_INIT_ARGS"
ENDED = {Check.IMPORTS: FATAL_FLAG, Check.DEVICES: FATAL_FLAG, Check.PLAN: FATAL_FLAG}
"""Check -> the remedy if its process ends."""


def checks_of(subject: HostSubject) -> list[Check]:
    """Return the checks that apply to the configuration."""
    named = {
        Check.CHECKPOINT: subject.config.model.ref,
        Check.TEXTS: subject.config.data.path,
        Check.PLAN: subject.config.plan,
    }
    return [check for check in MODULES if named.get(check, True)]


def run_checks(subject: HostSubject, on_done: Callable[[set[Check]], None]) -> HostFindings:
    """Run all checks at the same time.

    Args:
        on_done: called with the checks that are still running, whenever a check has ended.
    """
    running = {process.result: process for process in (_CheckProcess(check, subject) for check in checks_of(subject))}
    deadline = time.monotonic() + LIMIT_S
    findings: HostFindings = {process.check: [] for process in running.values()}
    try:
        while running:
            on_done({process.check for process in running.values()})
            ready = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
            for result in ready or list(running):
                assert isinstance(result, Connection)
                process = running.pop(result)
                findings[process.check] = process.receive() if ready else process.give_up()
    finally:
        for process in running.values():
            process.kill()
    return findings


class _CheckProcess:
    """The process of one check."""

    def __init__(self, check: Check, subject: HostSubject) -> None:
        """Start the process of a check."""
        context = get_context("spawn")
        self.check = check
        self.result, result = context.Pipe(duplex=False)
        self._log, log = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_check, args=(check, subject, result, log), daemon=True)
        self._process.start()
        result.close()
        log.close()

    def receive(self) -> list[HostFinding]:
        """Return the findings of the check, or how its process ended."""
        try:
            findings: list[HostFinding] = self.result.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            lines = os.read(self._log.fileno(), LOG_BYTES).decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
            measured = f"its process {end}: {one_line(RuntimeError(last))}"
            return [HostFinding(Level.ERROR, measured, remedy=ENDED.get(self.check, ""))]
        return findings

    def give_up(self) -> list[HostFinding]:
        """End a check that takes too long."""
        self.kill()
        level = Level.WARNING if self.check in SLOW else Level.ERROR
        return [HostFinding(level, f"no result after {LIMIT_S:g} s", remedy=LATE.get(self.check, ""))]

    def kill(self) -> None:
        """End the process."""
        self._process.kill()


def _run_check(check: Check, subject: HostSubject, result: Connection, log: Connection) -> None:
    """Run a check in this process, and send its findings."""
    # what libraries print is shown only if this process is ended by it; once the pipe is full it is lost
    os.set_blocking(log.fileno(), False)
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    try:
        findings = list(import_module(f"shardplan.doctor.checks.{MODULES[check]}").check(subject))
    except ShardplanError as error:
        findings = [HostFinding(Level.ERROR, str(error))]
    except ImportError as error:
        findings = [HostFinding(Level.ERROR, one_line(error), remedy="see what the check of imports says")]
    result.send(findings)
