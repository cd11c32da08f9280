"""The other processes of a run: what they say of themselves, and what happens where one is lost.

Every process gives a sign of life every few seconds, through the key-value store of JAX's coordination service (which
JAX offers no public way to). Where one has been silent for long, has said that it failed, or where process 0 and with
it the store are gone, the others say which process it was and end with exit code 5: a collective that waits for it
would wait for ever. What all must agree on, as the files they see, is exchanged in the same way before they go on.
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from jax._src import distributed

from shardplan.errors import CheckpointError, PeerError, ShardplanError, one_line

HEARTBEAT_INTERVAL_S = 2.0
"""Seconds between signs of life."""
HEARTBEAT_TIMEOUT_S = 20.0
"""Seconds without one, after which a process is lost."""
BARRIER_TIMEOUT_S = 3600.0
"""Most seconds that processes wait for each other where they must agree: one may have many headers to read."""
RUNNING, THROUGH = "running", "through"

T = TypeVar("T")
logger = logging.getLogger(__name__)
_runs = 0


class ProcessGroup:
    """The processes of a run, while something is done that needs all of them."""

    def __init__(self, name: str) -> None:
        self.here, self.count = jax.process_index(), jax.process_count()
        self.done = 0
        """What this process has done of its part, as `progress` tells it of the others."""
        self.progress: dict[int, int] = {}
        """Process -> what it had done at its last sign of life."""
        self._prefix = f"shardplan/{name}"
        self._state = RUNNING
        self._heard: dict[int, tuple[str, float]] = {}
        """Process -> its last sign of life, and when it came."""
        self._gone: set[int] = set()
        """Processes that are through."""
        self._has_said = False
        """Whether the others know what ends this process: it ends them too."""
        self._stop = threading.Event()
        self._beats = 0

    def agree(self, what: str, find: Callable[[], T], describe: Callable[[T], Mapping[str, str]]) -> T:
        """What `find` finds here, once all processes have found the same.

        Args:
            what: a name for it.
            describe: names of its parts, and what must be equal of them.

        Raises:
            CheckpointError: two found something else; or whatever `find` raised, in this process or another.
        """
        if self.count == 1:
            return find()
        said: dict[str, Any] = {}
        problem = None
        try:
            found = find()
            said["parts"] = dict(describe(found))
        except ShardplanError as error:
            said |= {"error": str(error), "kind": type(error).__name__}
            problem = error
        everybody = self.gather(what, said)
        problem = problem or self._disagreement(said, everybody)
        if problem is None:
            return found
        self._has_said = True
        self._set(f"{what} seen/{self.here}", "")
        if self.here == 0:  # the others read the store in this process
            with contextlib.suppress(PeerError):
                self._wait_for_all(f"{what} seen", HEARTBEAT_TIMEOUT_S)
        raise problem

    def gather(self, what: str, said: Any) -> dict[int, Any]:
        """Process -> what it says under a name, once all have said it; JSON, and short."""
        if self.count == 1:
            return {self.here: said}
        self._set(f"{what}/{self.here}", json.dumps(said))
        return self._wait_for_all(what)

    def tell(self, what: str, said: Mapping[int, Any]) -> dict[int, Any]:
        """Process -> what it says to this one under a name, once all have said everything; JSON.

        Args:
            said: process -> what this one says to it.
        """
        if self.count == 1:
            return {self.here: said[self.here]}
        for process, each in said.items():
            self._set(f"{what} for {process}/{self.here}", json.dumps(each))
        self.gather(what, None)
        return {process: json.loads(text) for process, text in self._all(f"{what} for {self.here}").items()}

    def _disagreement(self, mine: Mapping[str, Any], said: Mapping[int, Mapping[str, Any]]) -> ShardplanError | None:
        for process, theirs in sorted(said.items()):
            if "error" in theirs:
                kind = next(kind for kind in ShardplanError.__subclasses__() if kind.__name__ == theirs["kind"])
                return kind(f"process {process}: {theirs['error']}")
            for part in sorted({*mine["parts"], *theirs["parts"]}):
                if mine["parts"].get(part) != theirs["parts"].get(part):
                    return CheckpointError(
                        f"process {process} sees another {part} than process {self.here}; make all processes read "
                        "the same checkpoint"
                    )
        return None

    def _wait_for_all(self, what: str, seconds: float = BARRIER_TIMEOUT_S) -> dict[int, Any]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            said = self._all(what)
            if len(said) == self.count:
                return {process: json.loads(text or "null") for process, text in said.items()}
            time.sleep(0.05)
        raise PeerError(f"only {len(said)} of {self.count} processes have told of the {what}")

    def watch(self) -> None:
        """Give and hear signs of life until told to stop; ends the process where another is lost."""
        while not self._stop.wait(HEARTBEAT_INTERVAL_S):
            self.beat()
            now = time.monotonic()
            for process, text in self._all("alive").items():
                if process == self.here or process in self._gone:
                    continue
                if self._heard.get(process, ("", 0.0))[0] != text:
                    self._heard[process] = (text, now)
                    self._hear(process, json.loads(text))
            for process in range(self.count):
                _, since = self._heard.setdefault(process, ("", now))
                if process != self.here and process not in self._gone and now - since > HEARTBEAT_TIMEOUT_S:
                    _end(f"process {process} of {self.count} was lost: no sign of life for {HEARTBEAT_TIMEOUT_S:.0f} s")

    def _hear(self, process: int, said: Mapping[str, Any]) -> None:
        self.progress[process] = said["done"]
        if said["state"] == THROUGH:
            self._gone.add(process)
        elif said["state"] != RUNNING:
            _end(f"process {process} of {self.count} failed: {said['state']}")

    def beat(self) -> None:
        """Give a sign of life."""
        self._beats += 1
        self._set(f"alive/{self.here}", json.dumps({"beat": self._beats, "done": self.done, "state": self._state}))

    def finish(self, problem: str = "") -> None:
        """The last sign of life."""
        self._stop.set()
        self._state = THROUGH if self._has_said or not problem else problem
        self.beat()

    def _set(self, key: str, value: str) -> None:
        with self._store() as store:
            store.key_value_set(f"{self._prefix}/{key}", value, allow_overwrite=True)

    def _all(self, key: str) -> dict[int, str]:
        """Process -> what it has said under a key."""
        with self._store() as store:
            said = store.key_value_dir_get(f"{self._prefix}/{key}/")
        return {int(name.rpartition("/")[2]): text for name, text in said}

    @contextlib.contextmanager
    def _store(self) -> Iterator[Any]:
        try:
            yield distributed.global_state.client
        except Exception as error:  # whatever the store raises: it lives in process 0
            _end(f"process 0 of {self.count} was lost: {one_line(error)}")


@contextlib.contextmanager
def watched() -> Iterator[ProcessGroup]:
    """The processes of this run, watched while the block runs; every process enters it, as often as the others."""
    global _runs
    _runs += 1
    processes = ProcessGroup(str(_runs))
    if processes.count == 1:
        yield processes
        return
    _on_abort(processes.count)
    processes.beat()
    thread = threading.Thread(target=processes.watch, daemon=True)
    thread.start()
    try:
        yield processes
    except ShardplanError as error:
        processes.finish(str(error))
        raise
    except BaseException as error:
        # most likely a collective that a lost process was to take part in: soon it is known which
        if isinstance(error, Exception):
            logger.warning("%s", one_line(error))
            time.sleep(HEARTBEAT_TIMEOUT_S + 2 * HEARTBEAT_INTERVAL_S)
        processes.finish(one_line(error) or type(error).__name__)
        raise
    processes.finish()
    thread.join()


def _end(problem: str) -> None:
    """Leave: threads wait for what will not come."""
    print(f"shardplan: {problem}; start the run again", file=sys.stderr, flush=True)
    if jax.process_index() == 0:
        time.sleep(3 * HEARTBEAT_INTERVAL_S)  # the others find the same, in the store in this process
    os._exit(PeerError.exit_code)


_handlers: list[Any] = []


def _on_abort(count: int) -> None:
    """Where JAX's runtime aborts since process 0 and the coordination service are gone, say so; see `_end`."""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS") or getattr(
        distributed.global_state, "coordinator_address", None
    )
    if jax.process_index() == 0 or not address or _handlers:
        return
    host, _, port = address.rpartition(":")

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handle(_: int) -> None:
        try:
            socket.create_connection((host, int(port)), timeout=HEARTBEAT_INTERVAL_S).close()
        except OSError as error:
            _end(f"process 0 of {count} was lost: {one_line(error)}")

    _handlers.append(handle)  # alive as long as the process
    ctypes.CDLL(None).signal(signal.SIGABRT, handle)
