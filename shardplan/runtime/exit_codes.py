"""Converts exceptions to exit codes: an expected error becomes one line on stderr."""

import contextlib
import errno
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from shardplan.errors import ConfigError, ShardplanError, check_argument
from shardplan.runtime.environment import check_environment
from shardplan.runtime.processes.link import end_together, has_peers
from shardplan.runtime.processes.watch.frozen import end_if_frozen
from shardplan.runtime.processes.watch.stacks import process_stacks
from shardplan.runtime.processes.watch.watch import handle_problem
from shardplan.runtime.signals.interrupts import interrupts_after_imports

STDOUT, STDERR = 1, 2
"""File descriptors."""
RAISED_S = 2.0
"""Seconds that the main thread gets to raise and report another process's problem by itself."""
INTERRUPTED = 130
"""Exit code after Ctrl-C; see the table in `shardplan.errors`."""


def run(name: str, main: Callable[[list[str]], None], argv: Sequence[str]) -> int:
    """Call the command `main` with its arguments, and return the exit code (see `shardplan.errors`).

    `--quiet` and `--verbose`, which every command has, decide here what is logged.
    """
    flags = {"--quiet", "--verbose"} & {*argv}
    level = logging.ERROR if "--quiet" in flags else logging.INFO if "--verbose" in flags else logging.WARNING
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(level)
    is_reported = threading.Event()

    def end(problem: ShardplanError) -> None:
        """End this process, even if its main thread is in a collective that never returns."""
        if not is_reported.wait(RAISED_S):
            _print_error(name, str(problem))
        _exit(problem.exit_code)

    try:
        with (
            handle_problem(end), process_stacks().on_signal(), end_if_frozen(), _separate_streams(),
            interrupts_after_imports(),
        ):  # fmt: skip
            check_environment()
            main([argument for argument in argv if argument not in flags])
            end_together()
    except ShardplanError as error:
        message, code = str(error), error.exit_code
    except KeyboardInterrupt:
        message, code = "interrupted", INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        message, code = f"{error.strerror}; free some, or write elsewhere", ConfigError.exit_code
    else:
        return 0
    _print_error(name, message)
    is_reported.set()
    if has_peers():  # JAX would wait for all processes of the run before this one ends
        _exit(code)
    return code


def end_process(problem: ShardplanError) -> NoReturn:
    """Print a problem on one line, and end this process with its exit code, without waiting for its threads.

    Programs pass this function to `shardplan.watch`, because their main thread may be in a collective that never
    returns.
    """
    check_argument("end_process", "problem", problem, ShardplanError, "the problem that shardplan.watch reports")
    with contextlib.suppress(OSError):
        print(f"shardplan: {problem}", file=sys.stderr)
    _exit(problem.exit_code)


def _exit(code: int) -> NoReturn:
    """End this process without waiting for its threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _print_error(name: str, message: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be on the disk that is full
        print(f"shardplan {name}: {message}", file=sys.stderr)


class _Output(io.FileIO):
    """A file descriptor that ignores what is written to it after the reader (head, less) has closed it.

    The command continues its work, and its other outputs are not affected.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


@contextlib.contextmanager
def _separate_streams() -> Iterator[None]:
    """Reserve stdout for this package's output, in an encoding that can represent it; other output goes to stderr.

    gloo writes a line on file descriptor 1 for every connection, which would be part of the JSON of `--json -`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    stdout = sys.__stdout__
    if sys.stdout is None:  # closed by the caller; libraries ask it whether it is a terminal
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if stdout is None or stdout is not sys.stdout or stdout.fileno() != STDOUT:  # a test or a notebook has its own
        yield
        return
    own = io.BufferedWriter(_Output(os.dup(STDOUT), "w"))
    with io.TextIOWrapper(own, stdout.encoding, "replace", line_buffering=stdout.isatty()) as sys.stdout:
        os.dup2(STDERR, STDOUT)
        try:
            yield
            sys.stdout.flush()
        finally:
            os.dup2(own.fileno(), STDOUT)
            sys.stdout = stdout
