"""Records the state of this process in heartbeat-N.jsonl, one line every few seconds."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from shardplan.monitoring.records import HEARTBEAT, RunRecords
from shardplan.runtime.device_memory import device_memory, peak_host_bytes
from shardplan.runtime.processes.watch.places import THREAD_PREFIX
from shardplan.runtime.processes.watch.watch import Watch

HEARTBEAT_S, UPLOAD_S = 10.0, 60.0
"""Seconds between two lines, and between two copies of the file to a remote folder."""


@contextlib.contextmanager
def write_heartbeats(
    watch: Watch,
    records: RunRecords,
    figures: Mapping[str, float] = MappingProxyType({}),
    interval_s: float = HEARTBEAT_S,
) -> Iterator[None]:
    """Write a line about this process every `interval_s` seconds within the context, and one at its end.

    Args:
        figures: statistics of the last step by name, which the caller updates; none are written while it is empty.
    """
    path, stop = records.own_file(HEARTBEAT), threading.Event()

    def write() -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_describe(watch, figures)) + "\n")

    def run() -> None:
        uploaded = time.monotonic()
        with contextlib.suppress(OSError):  # of a full disk, which the results report
            while not stop.wait(interval_s):
                write()
                if time.monotonic() - uploaded >= UPLOAD_S:
                    uploaded = time.monotonic()
                    records.upload()

    thread = threading.Thread(target=run, name=f"{THREAD_PREFIX}heartbeat", daemon=True)
    thread.start()
    try:
        write()
        yield
    finally:
        stop.set()
        thread.join(interval_s)
        write()


def _describe(watch: Watch, figures: Mapping[str, float]) -> dict[str, object]:
    activity, memory = watch.activity, device_memory().values()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "phase": activity.phase,
        "done": activity.done,
        "doing": activity.doing,
        "seconds_without_progress": round(time.monotonic() - activity.since, 1),
        "device_bytes": max((each.in_use for each in memory), default=None),
        "device_peak_bytes": max((each.peak for each in memory), default=None),
        "host_peak_bytes": peak_host_bytes(),
        **({"statistics": dict(figures)} if figures else {}),
    }
