"""`shardplan COMMAND ...`, the same as `python -m shardplan.COMMAND ...`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from shardplan.errors import nearest

COMMANDS = ("checkpoint", "eval", "plan", "verify")


def main(command: str | None = None, argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code (see `shardplan.errors`).

    Args:
        command: its name; default: the first of `argv`.
        argv: the arguments; default: those of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if command is None:
        if given and given[0] in ("-h", "--help"):
            print(f"usage: shardplan {{{','.join(COMMANDS)}}} --config FILE [--key value ...]")
            return 0
        command = given.pop(0) if given else ""
    if command not in COMMANDS:
        print(f"shardplan: unknown command {command!r}; {nearest(command, COMMANDS)}", file=sys.stderr)
        return 2
    # by name, so that a command pays for what it imports itself, and for nothing that others do
    module = import_module(f"shardplan.commands.{command}")
    code: int = module.run_command(given)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
