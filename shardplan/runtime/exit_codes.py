"""From exceptions to exit codes: an expected error becomes one line on stderr."""

import logging
import os
import sys
from collections.abc import Callable, Sequence

from shardplan.errors import ShardplanError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it."""


def run(name: str, main: Callable[[list[str]], None], argv: Sequence[str]) -> int:
    """Call the command `main` with its arguments, and return the exit code (see `shardplan.errors`).

    `--quiet` and `--verbose`, which every command has, decide here what is logged.
    """
    flags = {"--quiet", "--verbose"} & {*argv}
    level = logging.ERROR if "--quiet" in flags else logging.INFO if "--verbose" in flags else logging.WARNING
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(level)
    try:
        main([argument for argument in argv if argument not in flags])
        sys.stdout.flush()
    except ShardplanError as error:
        print(f"shardplan {name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"shardplan {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader (head, less) has gone: that ends the output, it is not a failure of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
