"""`shardplan eval` with a fault: `python scripts/faulty_eval.py FAULT ARGUMENTS`.

A process writes the name of each phase that it begins to stderr. FAULT is one of

| fault | what happens |
|---|---|
| none | nothing |
| io | when results are written, the main thread reads from a pipe that nobody writes to |
| lock | then it takes a lock of Python that it has already |
| collective | then it begins a sum over the devices of all processes, which no other process begins |
| gil | then it calls a function of C that keeps the GIL, and does not return |
| tokenizer | the tokenizer is read from a pipe that nobody writes to |
| connect | it is killed once the processes have met, before JAX connects them |
| version | it says that it has another version of jax |
| cpus | it says that it has 8 times as many processors |
| pause | it waits for 2 s in each of `PHASES`, so that a signal reaches it there |
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

from shardplan.runtime.deferred_packages import defer_unused_packages
from shardplan.runtime.exit_codes import run


def read_pipe(*_):
    reader, _ = os.pipe()
    os.read(reader, 1)


def take_lock(*_):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def enter_collective(*_):
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("never")


def keep_gil(*_):
    ctypes.PyDLL(None).pause()


def be_killed(*_, **__):
    time.sleep(1)  # until the hub knows what this process has begun
    os.kill(os.getpid(), signal.SIGKILL)


STUCK = {"io": read_pipe, "lock": take_lock, "collective": enter_collective, "gil": keep_gil}
"""Fault -> what the main thread does instead of writing results."""
PHASES = ("planning", "loading", "compiling", "evaluating")
"""Phases in which `pause` waits."""


def announce_phases(pause_s):
    """Write phases to stderr, and pause in some."""
    from shardplan.runtime.processes.group import ProcessGroup

    phase = ProcessGroup.phase

    @contextlib.contextmanager
    def announced(group, name, *arguments):
        with phase(group, name, *arguments) as advance:
            print(f"phase: {name}", file=sys.stderr, flush=True)
            if name in PHASES:
                time.sleep(pause_s)
            yield advance

    ProcessGroup.phase = announced


def inject(fault):
    """Make this process have a fault."""
    announce_phases(2.0 if fault == "pause" else 0.0)
    if fault in STUCK:
        from shardplan.eval.run_results.folder import ResultsFolder

        ResultsFolder.write_part = STUCK[fault]
    elif fault == "tokenizer":
        from shardplan.eval import run

        run.read_tokenizer = read_pipe
    elif fault == "connect":
        import jax

        jax.distributed.initialize = be_killed
    elif fault == "version":
        from shardplan.runtime.processes import start

        versions = start.package_versions()
        start.package_versions = lambda: {**versions, "jax": "0.0.1"}
    elif fault == "cpus":
        count = os.cpu_count()
        os.cpu_count = lambda: 8 * count


def main(argv):
    """The command with the fault; `run` handles what happens while it is imported, as it does for `shardplan eval`."""
    inject(fault)
    from shardplan.commands.eval import eval

    eval.main(argv)


if __name__ == "__main__":
    fault, *argv = sys.argv[1:]
    defer_unused_packages()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    raise SystemExit(run("eval", main, argv))
