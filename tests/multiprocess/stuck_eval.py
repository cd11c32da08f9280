"""`shardplan eval` in which the main thread of a process gets stuck: `python stuck_eval.py PROCESS PLACE ARGUMENTS`.

PLACE is `io` (it reads from a pipe that nobody writes to) or `lock` (of Python), when results are written.
"""

import os
import sys
import threading

from shardplan.__main__ import main
from shardplan.eval.results_folder import ResultsFolder


def read_pipe(*_):
    reader, _ = os.pipe()
    os.read(reader, 1)


def take_lock(*_):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


if __name__ == "__main__":
    process, place, *argv = sys.argv[1:]
    if os.environ.get("JAX_PROCESS_ID", "0") == process:
        ResultsFolder.write_part = {"io": read_pipe, "lock": take_lock}[place]
    raise SystemExit(main("eval", argv))
