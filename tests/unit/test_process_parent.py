"""A process that ends with its parent does so however the parent is ended."""

import subprocess
import sys

CHILD = """
import time
from shardplan.runtime.processes.watch import parent

parent.POLL_SECONDS = 0.01
parent.end_with_parent()
print("started", flush=True)
time.sleep(10)
print("not ended")
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_process_ends_with_its_killed_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "started\n"
        parent.kill()
        # the child has the other end of the pipe, so that reading ends with it
        assert parent.stdout.read() == ""
