"""`shardplan COMMAND ...`, the same as `python -m shardplan.COMMAND ...`."""

import sys
from importlib import import_module

from shardplan.errors import nearest
from shardplan.runtime.command import run

COMMANDS = ("checkpoint", "eval", "plan", "verify")


def main() -> int:
    """Run the command that the first argument names; returns its exit code."""
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        name = sys.argv[1]
        module = import_module(f"shardplan.{name}.__main__")
        return run(module.main, f"shardplan {name}", sys.argv[2:], getattr(module, "SUBCOMMANDS", None))
    if len(sys.argv) > 1 and sys.argv[1] in ("-h", "--help"):
        print(f"usage: shardplan {{{','.join(COMMANDS)}}} --config FILE [--key value ...]")
        return 0
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    print(f"shardplan: unknown command {given!r}; {nearest(given, COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
