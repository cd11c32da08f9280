"""A process whose C code keeps the GIL ends, with its stacks, if others count on it or a deadline has passed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import contextlib, ctypes, sys
from shardplan.runtime.processes.watch import frozen, watch
from shardplan.runtime.processes.watch.activity import Activity

frozen.MARGIN_S = 0.3
is_command, deadline, is_working = map(eval, sys.argv[1:])

def freeze():
    ctypes.PyDLL(None).usleep(2_000_000)

with frozen.end_if_frozen() if is_command else contextlib.nullcontext():
    process = watch.Watch()
    with process.work():
        process.set_activity(Activity("loading", 1, 0.0, deadline))
        if is_working:
            freeze()
    freeze()
print("not frozen")
"""


@pytest.mark.parametrize(
    ("is_command", "deadline", "is_working", "code"),
    [(True, 0.5, True, 1), (True, 60.0, True, 0), (True, 0.5, False, 0), (False, 0.5, True, 0)],
)
def test_a_process_that_is_frozen(is_command, deadline, is_working, code):
    """Only while it works, only after its deadline, and only if it is a command."""
    argv = map(str, (is_command, deadline, is_working))
    done = subprocess.run([sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("" if code else "not frozen\n")
    assert ("Timeout (0:00:00" in done.stderr and "in freeze\n" in done.stderr) == bool(code), done.stderr
