"""Exit codes and log levels of commands."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest

import shardplan.errors
from shardplan.errors import CheckpointError, ConfigError, InfeasibleError, PeerError, UndecidedError
from shardplan.runtime.exit_codes import run
from shardplan.runtime.signals import interrupts

CODES = [
    (ConfigError, 2), (InfeasibleError, 3), (CheckpointError, 4), (PeerError, 5), (UndecidedError, 6),
    (KeyboardInterrupt, 130),
]  # fmt: skip


@pytest.mark.parametrize(("error", "code"), CODES)
def test_errors_become_one_line_and_a_code(capsys, error, code):
    def main(argv):
        raise error("what, where; remedy")

    assert run("plan", main, []) == code
    message = "interrupted" if error is KeyboardInterrupt else "what, where; remedy"
    assert capsys.readouterr().err == f"shardplan plan: {message}\n"


@pytest.mark.parametrize(
    ("flags", "level"), [([], logging.WARNING), (["--quiet"], logging.ERROR), (["--verbose"], logging.INFO)]
)
def test_flags_set_the_log_level_and_the_command_does_not_see_them(flags, level):
    seen = []
    root = logging.getLogger()
    before = root.level
    try:
        assert run("plan", lambda argv: seen.append((argv, root.level)), ["--a", *flags, "b"]) == 0
    finally:
        root.setLevel(before)
    assert seen == [(["--a", "b"], level)]


def test_every_code_is_in_the_table():
    for error, code in CODES:
        assert f"| {code} | `{error.__name__}` |" in shardplan.errors.__doc__


def test_a_full_disk_is_no_bug(capsys):
    def main(argv):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert run("eval", main, []) == 2
    assert capsys.readouterr().err == "shardplan eval: No space left on device; free some, or write elsewhere\n"


SCRIPT = """
import os, sys
from shardplan.runtime.exit_codes import run

def main(argv):
    os.write(1, b"of a compiled library, as gloo writes\\n")
    print("caf\\u00e9")

code = run("plan", main, [])
print("after")
raise SystemExit(code)
"""


@pytest.mark.parametrize(("encoding", "word"), [("utf-8", "café"), ("ascii", "caf?")])
def test_stdout_is_ours_alone_and_has_the_letters_that_it_can(encoding, word):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == f"{word}\nafter\n"
    assert done.stderr.decode() == "of a compiled library, as gloo writes\n"


INTERRUPTED_IMPORT = """
import signal, time

try:
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.5)
except KeyboardInterrupt:
    print("raised in an import")
done = True
"""


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where a shell that started the tests in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_end_of_an_import(tmp_path, monkeypatch, capsys):
    """Extension modules abort the process when KeyboardInterrupt is raised in them."""
    (tmp_path / "interrupted_import.py").write_text(INTERRUPTED_IMPORT)
    monkeypatch.syspath_prepend(tmp_path)

    def main(argv):
        import interrupted_import

        assert interrupted_import.done
        time.sleep(10)
        print("not interrupted")

    assert run("eval", main, []) == 130
    assert tuple(capsys.readouterr()) == ("", "shardplan eval: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_does_not_wait_for_an_import_that_is_stuck(tmp_path, monkeypatch, capsys):
    (tmp_path / "stuck_import.py").write_text(INTERRUPTED_IMPORT.replace("0.5", "10"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(interrupts, "LONGEST_S", 0.2)
    assert run("eval", lambda argv: import_module("stuck_import"), []) == 0
    assert capsys.readouterr().out == "raised in an import\n"
