"""What a long job shows: a line every few seconds where there is no terminal, nothing with --quiet."""

import io
import logging
import os
import pty
import select
import time

import pytest

from shardplan.hardware import GIB
from shardplan.runtime import progress
from shardplan.runtime.progress import BYTES, Progress, show_progress, show_steps


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.01)


def started(seconds: float) -> float:
    return time.perf_counter() - seconds


def test_bytes_have_a_rate_and_a_time_left():
    job = Progress("loading", BYTES, 4 * GIB, started=started(2.0))
    assert job.describe() == "0.00 of 4.00 GiB (0%)"
    job.update(GIB)
    assert job.describe() == "1.00 of 4.00 GiB (25%), 0.54 GB/s, 6 s left"
    job.set_note("slowest: process 1")
    assert job.describe().endswith(" s left, slowest: process 1")
    small = Progress("loading", BYTES, 4 * 2**20, 2**20, started=started(2.0))
    assert small.describe() == "1.00 of 4.00 MiB (25%), 0.52 MB/s, 6 s left"


def test_steps_are_counted():
    assert Progress("evaluating", "steps", 10, 5, started=started(10.0)).describe() == (
        "5 of 10 steps (50%), 0.5 a second, 10 s left"
    )


def test_a_job_without_an_amount_says_what_it_does_and_for_how_long():
    assert Progress("lint", note="planning the best layout", started=started(61.0)).describe() == (
        "planning the best layout (61 s)"
    )


def wait_for(text: str, read) -> str:
    end = time.monotonic() + 10
    while text not in (seen := read()) and time.monotonic() < end:
        time.sleep(0.01)
    return seen


def test_lines_where_there_is_no_terminal(capsys):
    seen = []

    def read() -> str:
        seen.append(capsys.readouterr())
        return "".join(out.err for out in seen)

    with show_steps("verify") as report:
        report("0 of 2 verdicts")
        wait_for("verify: 0 of 2 verdicts (0 s)\n", read)
        report("1 of 2 verdicts")
        lines = wait_for("1 of 2", read).splitlines()
    assert {"verify: 0 of 2 verdicts (0 s)", "verify: 1 of 2 verdicts (0 s)"} == {*lines}
    assert not any(out.out for out in seen)


def test_nothing_with_quiet(capsys, caplog):
    with caplog.at_level(logging.ERROR), show_steps("verify") as report:
        report("0 of 2 verdicts")
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch):
    """It is drawn on the terminal of stderr, and what is printed on stdout stays there."""
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", stdout := io.StringIO())
    with open(follower, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with show_progress(Progress("loading", BYTES, 4 * GIB)) as job:
            job.update(GIB)
            print("a table")
        drawn = b""
        while b"1.00 of 4.00 GiB (25%)" not in drawn and select.select([leader], [], [], 10)[0]:
            drawn += os.read(leader, 10000)
    os.close(leader)
    assert "1.00 of 4.00 GiB (25%)" in drawn.decode() and "loading" in drawn.decode() and "━" in drawn.decode()
    assert stdout.getvalue() == "a table\n"
