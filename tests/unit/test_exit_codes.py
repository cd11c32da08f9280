"""Exit codes and log levels of commands."""

import logging

import pytest

from shardplan.errors import CheckpointError, ConfigError, InfeasibleError, PeerError
from shardplan.runtime.exit_codes import run


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError, 2), (InfeasibleError, 3), (CheckpointError, 4), (PeerError, 5), (KeyboardInterrupt, 130)],
)
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
