"""A server that forks a process whenever a test starts one: `python tests/process_server.py FOLDER PID`.

An evaluation imports modules for ten seconds, and tests start dozens of them. The server has imported these modules,
and has started no devices, so that a forked process begins where another one has ended its imports. It has arguments,
environment, working folder, output and signals of its own, and ends as `python` does. Forked processes share the seed
of hashes: tests in which processes could disagree for their seeds use several servers (`processes.fork_apart`).

A client connects to FOLDER/socket, and sends JSON with `argv`, `env` and `cwd`, and the descriptors of stdout and
stderr. It receives the process ID, and the wait status once the process has ended. The server ends with process PID.

With `is_torn_down` a process ends as `python` does, which takes a quarter of a second of processor time: it destroys
every module that the server has imported. Others leave their memory to the system.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
from importlib import import_module
from pathlib import Path

from shardplan.runtime.deferred_packages import defer_unused_packages

MODULES = ("shardplan.commands.eval", "shardplan.eval.run", "shardplan.checkpoint.saving.save", "levanter.models.llama")
"""What processes of tests import."""
REQUEST_BYTES = 2**17
DEVICES = "JAX_NUM_CPU_DEVICES"
LATE_VARIABLES = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", DEVICES, "XLA_FLAGS"}
"""Variables that a forked process takes over: XLA reads its flags with the first device, JAX all others on import."""


def serve(folder, test_run):
    """Fork for each client; returns its request in a new process, and None at the end of the tests."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{folder}/socket")
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(os.pidfd_open(test_run), selectors.EVENT_READ)
    clients = {}  # descriptor of a process -> its ID and its client
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client = listener.accept()[0]
                message, descriptors, _, _ = socket.recv_fds(client, REQUEST_BYTES, 2)
                process_id = os.fork()
                if process_id == 0:
                    for each in (client, listener, selector, *(each for _, each in clients.values())):
                        each.close()
                    return json.loads(message), descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
                os.setpgid(process_id, process_id)  # a group of its own, which can be killed
                client.send(str(process_id).encode())
                descriptor = os.pidfd_open(process_id)
                clients[descriptor] = process_id, client
                selector.register(descriptor, selectors.EVENT_READ)
            elif key.fd in clients:
                process_id, client = clients.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                client.send(str(os.waitpid(process_id, 0)[1]).encode())
                client.close()
            else:  # the tests have ended, perhaps by a signal
                for process_id, _ in clients.values():
                    os.kill(process_id, signal.SIGKILL)
                return None


def become(request, descriptors):
    """Make this process what `python ARGV` with the environment would be at its start."""
    for target, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # those of the server belong to a file, in which a position can be set
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    changed = {name for name in request["env"] | os.environ if request["env"].get(name) != os.environ.get(name)}
    too_late = {name for name in changed if name.startswith(("JAX_", "XLA_"))} - LATE_VARIABLES
    assert not too_late, f"JAX has read {too_late} already; start such a process by python"
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # imports may have asked for it, and so read TMPDIR
    if DEVICES in os.environ:
        import_module("jax").config.update(DEVICES.lower(), int(os.environ[DEVICES]))
    os.chdir(request["cwd"])
    sys.path[1:1] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]


def execute(argv):
    """Do what `python ARGV` does."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def execute_and_leave(argv):
    """Do what `python ARGV` does, and exit with its code, as processes that multiprocessing forks do."""
    try:
        execute(argv)
    except SystemExit as error:
        if not isinstance(error.code, int | None):  # `python` prints it
            raise
        code = error.code or 0
    else:
        code = 0
    threading._shutdown()  # waits for threads, as `python` does first
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # a closed pipe, of which `python` is to make an exit code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)
    raise SystemExit(code)


if __name__ == "__main__":
    gc.disable()  # nearly all that an import makes stays
    defer_unused_packages()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for name in MODULES:
        import_module(name)
    gc.freeze()
    gc.enable()
    received = serve(sys.argv[1], int(sys.argv[2]))
    if received is not None:
        become(*received)
        run = execute if received[0]["is_torn_down"] else execute_and_leave
        run(received[0]["argv"])
