"""Processes that tests start: forked from `process_server.py`, which spares them their imports."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = "SHARDPLAN_TESTS_FOLDER"
"""Variable with the folder of this run of the tests, whose name ends with the ID of the process that began it."""
START_S = 300
"""Seconds in which the server must have started, on a machine that is busy."""


def fork_python(argv, cwd=ROOT, **variables):
    """Start `python ARGV`, with further variables, in a process that has imported what an evaluation imports."""
    return ForkedProcess(list(map(str, argv)), str(cwd), {**os.environ, **variables})


def fork_apart(argv, cwd=ROOT, **variables):
    """Start a process of a run from the server of its number: the order of sets differs from that in the others.

    It also ends as `python` does, down to the destruction of JAX's modules.
    """
    server = f"server-{variables['JAX_PROCESS_ID']}"
    return ForkedProcess(list(map(str, argv)), str(cwd), {**os.environ, **variables}, server, is_torn_down=True)


class ForkedProcess:
    """A process of the server, with the methods of `subprocess.Popen`.

    Its stdout and stderr are pipes, unless `outputs` has the descriptors of other files. `is_torn_down` has it destroy
    its modules before it ends.
    """

    stdin = stdout = stderr = None

    def __init__(self, argv, cwd, env, server="server-0", outputs=None, is_torn_down=False):
        self.args, self.returncode = argv, None
        self._server = connect(server)
        request = json.dumps({"argv": argv, "cwd": cwd, "env": env, "is_torn_down": is_torn_down}).encode()
        if outputs is None:
            (read_output, output), (read_error, error) = os.pipe(), os.pipe()
            self.stdout, self.stderr = (os.fdopen(read, encoding="utf-8") for read in (read_output, read_error))
            socket.send_fds(self._server, [request], [output, error])
            os.close(output)
            os.close(error)
        else:
            socket.send_fds(self._server, [request], outputs)
        self.pid = int(self._server.recv(64))

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout=None):
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                status = self._server.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            assert status, "the server of processes has ended"
            self.returncode = os.waitstatus_to_exitcode(int(status))
            self._server.close()
        return self.returncode

    def communicate(self, timeout=None):
        """Return what it prints from now on to stdout and stderr."""
        end = None if timeout is None else time.monotonic() + timeout
        texts = {}
        threads = []
        for name in ("stdout", "stderr"):

            def read(name=name):
                texts[name] = getattr(self, name).read()

            threads.append(threading.Thread(target=read, daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return texts["stdout"], texts["stderr"]

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def connect(name):
    """Connect to a server of this run of the tests, which its first client starts."""
    run = Path(os.environ[FOLDER])
    folder = run / name
    folder.mkdir(exist_ok=True)
    path = folder / "socket"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            command = [sys.executable, ROOT / "tests" / "process_server.py", folder, run.name.rpartition("-")[2]]
            path_of_modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            with open(folder / "log", "w") as log:
                server = subprocess.Popen(
                    command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path_of_modules},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            end = time.monotonic() + START_S
            while not path.exists():
                assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.05)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(path))
    return connection
