"""The processes of a run: agreement between them, and detection of a process that is lost.

Every process sends a heartbeat every few seconds through the key-value store of JAX's coordination service, for which
JAX has no public interface. If a process sends none for HEARTBEAT_TIMEOUT_S seconds or reports that it failed, or if
process 0 and with it the store are gone, the other processes print which process it was and exit with code 5, because a
collective that waits for a lost process never returns. Before a collective step, values that must be equal in all
processes, such as the files of a checkpoint, are exchanged through the same store and compared.
"""

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from enum import StrEnum
from typing import Any, NoReturn, TypeVar, assert_never

import jax

from shardplan.errors import CheckpointError, PeerError, ShardplanError, one_line
from shardplan.runtime.private_jax import coordinator_address, key_value_store

HEARTBEAT_INTERVAL_S = 2.0
"""Seconds between heartbeats."""
HEARTBEAT_TIMEOUT_S = 20.0
"""Seconds without a heartbeat after which a process counts as lost."""
BARRIER_TIMEOUT_S = 3600.0
"""Maximum number of seconds that processes wait for each other's values: one of them may have many headers to read."""

T = TypeVar("T")
logger = logging.getLogger(__name__)
_groups_opened = 0
_shared_problem: ShardplanError | None = None
"""The problem that every process knows and ends with."""


def _other_checkpoint(part: str, process: int, other: int) -> ShardplanError:
    return CheckpointError(
        f"process {process} reads a different {part} than process {other}; make all processes read the same checkpoint"
    )


class ProcessState(StrEnum):
    """The state that a process reports in its heartbeats."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class ProcessGroup:
    """All processes of a run, during a step that needs all of them."""

    def __init__(self, name: str) -> None:
        """Make the group of all processes; `name` separates the keys of one group from those of others."""
        self.process_index, self.process_count = jax.process_index(), jax.process_count()
        self.done = 0
        """Amount of work that this process has done, which heartbeats report to the others."""
        self.progress: dict[int, int] = {}
        """Process -> amount of work done at its last heartbeat."""
        self._prefix = f"shardplan/{name}"
        self._state = ProcessState.RUNNING
        self._problem = ""
        """Why this process failed."""
        self._last_heartbeat: dict[int, tuple[str, float]] = {}
        """Process -> its last heartbeat, and when it arrived."""
        self._finished: set[int] = set()
        """Processes that have finished; their heartbeats have stopped."""
        self._stop = threading.Event()
        self._heartbeats = 0

    def agree(
        self,
        name: str,
        compute: Callable[[], T],
        describe: Callable[[T], Mapping[str, str]],
        disagreement: Callable[[str, int, int], ShardplanError] = _other_checkpoint,
    ) -> T:
        """Compute a value in every process, and return it once the values of all processes are known to be equal.

        Args:
            name: key of the exchange; it must be new in this group.
            compute: makes the value of this process.
            describe: value -> name of each part and a digest of it; the digests must be equal in all processes.
            disagreement: takes the part that differs, and two processes; makes the error.

        Raises:
            ShardplanError: that of `disagreement`; the values of two processes differ.
            ShardplanError: whatever `compute` raised, in this process or in another.
        """
        if self.process_count == 1:
            return compute()
        message: dict[str, Any] = {}
        problem = None
        try:
            value = compute()
            message["parts"] = dict(describe(value))
        except ShardplanError as error:
            message |= {"error": str(error), "kind": type(error).__name__}
            problem = error
        messages = self.gather(name, message)
        problem = problem or _find_problem(messages, disagreement)
        if problem is None:
            return value
        self._fail_together(name, problem)

    def gather(self, name: str, value: Any) -> dict[int, Any]:
        """Send a short JSON value to all processes, and return process -> value once all have sent theirs."""
        if self.process_count == 1:
            return {self.process_index: value}
        self._set(f"{name}/{self.process_index}", json.dumps(value))
        return self._wait_for_all(name)

    def broadcast(self, name: str, compute: Callable[[], Any]) -> Any:
        """Compute a JSON value in process 0, and return it in all processes.

        Args:
            name: key of the exchange; it must be new in this group.

        Raises:
            ShardplanError: whatever `compute` raised, in all processes.
        """
        if self.process_count == 1:
            return compute()
        if self.process_index == 0:
            try:
                value = compute()
            except ShardplanError as error:
                self._set(f"{name}/0", json.dumps({"error": str(error), "kind": type(error).__name__}))
                self._fail_together(name, error)
            self._set(f"{name}/0", json.dumps({"value": value}))
            return value
        message = self._wait_for(name, {0})[0]
        if "error" in message:
            self._fail_together(name, _error_of(0, message))
        return message["value"]

    def exchange(self, name: str, messages: Mapping[int, Any]) -> dict[int, Any]:
        """Send each process its own message, and return process -> the message that it sent to this one.

        Args:
            name: key of the exchange; it must be new in this group.
            messages: process -> JSON value for it.
        """
        if self.process_count == 1:
            return {self.process_index: messages[self.process_index]}
        for process, message in messages.items():
            self._set(f"{name} for {process}/{self.process_index}", json.dumps(message))
        self.gather(name, None)
        received = self._get_all(f"{name} for {self.process_index}")
        return {process: json.loads(text) for process, text in received.items()}

    def monitor(self) -> None:
        """Send and check heartbeats until `finish` is called; exit this process if another is lost or failed."""
        while not self._stop.wait(HEARTBEAT_INTERVAL_S):
            self.send_heartbeat()
            now = time.monotonic()
            for process, text in self._get_all("alive").items():
                if process == self.process_index or process in self._finished:
                    continue
                if self._last_heartbeat.get(process, ("", 0.0))[0] != text:
                    self._last_heartbeat[process] = (text, now)
                    self._handle_heartbeat(process, json.loads(text))
            for process in range(self.process_count):
                _, since = self._last_heartbeat.setdefault(process, ("", now))
                is_expected = process != self.process_index and process not in self._finished
                if is_expected and now - since > HEARTBEAT_TIMEOUT_S:
                    _exit(
                        f"process {process} of {self.process_count} was lost: no heartbeat for "
                        f"{HEARTBEAT_TIMEOUT_S:.0f} s"
                    )

    def send_heartbeat(self) -> None:
        """Report that this process is alive, with its state and the work that it has done."""
        self._heartbeats += 1
        heartbeat = {"beat": self._heartbeats, "done": self.done, "state": self._state, "problem": self._problem}
        self._set(f"alive/{self.process_index}", json.dumps(heartbeat))

    def finish(self, problem: str = "", is_shared: bool = False) -> None:
        """Send the last heartbeat: the process has finished, or failed with a problem.

        Args:
            is_shared: whether the others know the problem, and fail with it themselves.
        """
        self._stop.set()
        if is_shared:
            return  # the others end by themselves, and with process 0 the store
        if problem:
            self._problem = problem  # before the state: the monitor sends heartbeats at the same time
            self._state = ProcessState.FAILED
        else:
            self._state = ProcessState.FINISHED
        self.send_heartbeat()

    def _fail_together(self, name: str, problem: ShardplanError) -> NoReturn:
        """Raise the problem, which every process knows and raises, once process 0 knows that all have received it."""
        global _shared_problem
        _shared_problem = problem
        self._set(f"{name} received/{self.process_index}", "")
        if self.process_index == 0:  # the store is in this process
            with contextlib.suppress(PeerError):
                self._wait_for_all(f"{name} received", HEARTBEAT_TIMEOUT_S)
        raise problem

    def _handle_heartbeat(self, process: int, heartbeat: Mapping[str, Any]) -> None:
        """Note the progress of another process, and whether it has finished; exit if it has failed."""
        self.progress[process] = heartbeat["done"]
        match state := ProcessState(heartbeat["state"]):
            case ProcessState.RUNNING:
                pass
            case ProcessState.FINISHED:
                self._finished.add(process)
            case ProcessState.FAILED:
                _exit(f"process {process} of {self.process_count} failed: {heartbeat['problem']}")
            case _:
                assert_never(state)

    def _wait_for_all(self, name: str, timeout: float = BARRIER_TIMEOUT_S) -> dict[int, Any]:
        """Return process -> value once all processes have set a value under `name`."""
        return self._wait_for(name, {*range(self.process_count)}, timeout)

    def _wait_for(self, name: str, expected: Set[int], timeout: float = BARRIER_TIMEOUT_S) -> dict[int, Any]:
        """Return process -> value once the `expected` processes have set a value under `name`."""
        end = time.monotonic() + timeout
        values: dict[int, str] = {}
        while time.monotonic() < end:
            values = self._get_all(name)
            if expected <= values.keys():
                return {process: json.loads(text or "null") for process, text in values.items()}
            time.sleep(0.05)
        missing = [str(process) for process in sorted(expected - values.keys())]
        raise PeerError(
            f"timed out after {timeout:.0f} s waiting for {name!r}; no message from "
            f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)}"
        )

    def _set(self, key: str, value: str) -> None:
        with self._store() as store:
            store.key_value_set(f"{self._prefix}/{key}", value, allow_overwrite=True)

    def _get_all(self, key: str) -> dict[int, str]:
        """Return process -> the text that it has set under `key`."""
        with self._store() as store:
            entries = store.key_value_dir_get(f"{self._prefix}/{key}/")
        return {int(name.rpartition("/")[2]): text for name, text in entries}

    @contextlib.contextmanager
    def _store(self) -> Iterator[Any]:
        try:
            yield key_value_store()
        except Exception as error:  # the store is in process 0: any error means that it is gone
            _exit_without_process_0(self.process_count, error)


def _find_problem(
    messages: Mapping[int, Mapping[str, Any]], disagreement: Callable[[str, int, int], ShardplanError]
) -> ShardplanError | None:
    """Return the error of the first process that failed, or whose parts are not those of process 0; else None."""
    for process, message in sorted(messages.items()):
        if "error" in message:
            return _error_of(process, message)
    expected = messages[0]["parts"]
    for process, message in sorted(messages.items()):
        parts = message["parts"]
        for part in sorted({*expected, *parts}):
            if parts.get(part) != expected.get(part):
                return disagreement(part, process, 0)
    return None


def _error_of(process: int, message: Mapping[str, Any]) -> ShardplanError:
    """Return the error that another process reports."""
    kind = next(kind for kind in ShardplanError.__subclasses__() if kind.__name__ == message["kind"])
    return kind(f"process {process}: {message['error']}")


@contextlib.contextmanager
def open_process_group() -> Iterator[ProcessGroup]:
    """Open the group of all processes, which is monitored until the block ends.

    Every process must enter the block, and equally often.
    """
    global _groups_opened, _shared_problem
    _groups_opened += 1
    _shared_problem = None
    processes = ProcessGroup(str(_groups_opened))
    if processes.process_count == 1:
        yield processes
        return
    _handle_abort(processes.process_count)
    processes.send_heartbeat()
    thread = threading.Thread(target=processes.monitor, daemon=True)
    thread.start()
    try:
        yield processes
    except ShardplanError as error:
        processes.finish(str(error), is_shared=error is _shared_problem)
        raise
    except BaseException as error:
        # most likely a collective failed because a process was lost: wait until the monitor knows which
        if isinstance(error, Exception):
            logger.warning("%s", one_line(error))
            time.sleep(HEARTBEAT_TIMEOUT_S + 2 * HEARTBEAT_INTERVAL_S)
        processes.finish(one_line(error) or type(error).__name__)
        raise
    processes.finish()
    thread.join()


def _exit(problem: str) -> None:
    """Print the problem and exit without waiting for threads, which may be blocked in a collective."""
    print(f"shardplan: {problem}; start the run again", file=sys.stderr, flush=True)
    if jax.process_index() == 0:
        time.sleep(3 * HEARTBEAT_INTERVAL_S)  # the others read the same from the store, which is in this process
    os._exit(PeerError.exit_code)


def _exit_without_process_0(count: int, error: Exception) -> None:
    """Exit because process 0 is gone: it was lost, unless all processes end with a problem that they share."""
    if _shared_problem is None:
        _exit(f"process 0 of {count} was lost: {one_line(error)}")
    else:  # the main thread is about to print it and exit
        time.sleep(HEARTBEAT_TIMEOUT_S)
        os._exit(_shared_problem.exit_code)


_handlers: list[Any] = []


def _handle_abort(count: int) -> None:
    """Install a handler that reports the loss of process 0, for which JAX's runtime aborts; see `_exit`."""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS") or coordinator_address()
    if jax.process_index() == 0 or not address or _handlers:
        return
    host, _, port = address.rpartition(":")

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handle(_: int) -> None:
        try:
            socket.create_connection((host, int(port)), timeout=HEARTBEAT_INTERVAL_S).close()
        except OSError as error:
            _exit_without_process_0(count, error)

    _handlers.append(handle)  # keeps the callback alive as long as the process
    ctypes.CDLL(None).signal(signal.SIGABRT, handle)
