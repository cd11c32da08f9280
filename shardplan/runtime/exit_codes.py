"""From exceptions to exit codes: an expected error becomes one line on stderr."""

import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from shardplan.errors import ConfigError, ShardplanError
from shardplan.runtime.environment import check_environment

STDOUT, STDERR = 1, 2
"""File descriptors."""
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
    try:
        with _separate_streams():
            check_environment()
            main([argument for argument in argv if argument not in flags])
    except ShardplanError as error:
        print(f"shardplan {name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"shardplan {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        pass  # the reader (head, less) has gone: that ends the output, it is not a failure of ours
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"shardplan {name}: {error.strerror}; free some, or write elsewhere", file=sys.stderr)
        return ConfigError.exit_code
    return 0


@contextlib.contextmanager
def _separate_streams() -> Iterator[None]:
    """Keep stdout for what this package prints there, in letters that it has; the rest of the process gets stderr.

    gloo writes a line on file descriptor 1 for every connection, which would be part of the JSON of `--json -`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    stdout = sys.__stdout__
    if stdout is None or stdout is not sys.stdout or stdout.fileno() != STDOUT:  # a test or a notebook has its own
        yield
        return
    own = os.dup(STDOUT)
    buffering = 1 if stdout.isatty() else -1
    with open(own, "w", encoding=stdout.encoding, errors="replace", buffering=buffering) as sys.stdout:
        os.dup2(STDERR, STDOUT)
        try:
            yield
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), own)  # or closing it would fail again
            raise
        finally:
            os.dup2(own, STDOUT)
            sys.stdout = stdout
