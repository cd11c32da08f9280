"""Run a command: its errors become one line on stderr and an exit code."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from shardplan import config, errors

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""


def run(
    main: Callable[[config.Config], None],
    prog: str,
    argv: Sequence[str] | None = None,
    subcommands: Mapping[str, Callable[[Sequence[str]], None]] | None = None,
) -> int:
    """Call `main` with the configuration in `argv` (default: the process's), and return the exit code.

    Where `argv` begins with one of `subcommands`, that is called with the rest instead. For the codes see
    `shardplan.errors`.
    """
    argv = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        if argv and argv[0] in (subcommands or {}):
            (subcommands or {})[argv[0]](argv[1:])
        else:
            main(config.load(argv, prog))
        sys.stdout.flush()
    except errors.ShardplanError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone: that ends the output, it is not a failure of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
