"""Runs `shardplan COMMAND ...`, the same as `python -m shardplan.COMMAND ...`."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from shardplan.errors import closest, nearest
from shardplan.runtime.deferred_packages import defer_unused_packages
from shardplan.runtime.exit_codes import run

COMMANDS = {
    "plan": "plan.plan",
    "plan diff": "plan.diff",
    "verify": "verify",
    "eval": "eval.eval",
    "eval compare": "eval.compare",
    "lm_eval": "eval.lm_eval",
    "train": "train",
    "launch": "launch.launch",
    "launch train": "launch.train",
    "checkpoint": "checkpoint.checkpoint",
    "checkpoint inspect": "checkpoint.inspect",
    "checkpoint convert": "checkpoint.convert",
    "doctor": "doctor",
    "models": "models",
}
"""Command -> its module in `shardplan.commands`, imported by name so that a command pays only for its own imports."""


def main(command: str | None = None, argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code (see `shardplan.errors`).

    Args:
        command: name of the command; default: the first element of `argv`.
        argv: the arguments; default: the arguments of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if "--version" in given:
        from importlib import metadata  # takes a while, and nothing else needs it

        print(f"shardplan {metadata.version('shardplan')}")
        return 0
    if command is None:
        if given[:1] in (["-h"], ["--help"]):
            print(import_module("shardplan.commands.usage").usage(COMMANDS))
            return 0
        if not given:
            print(f"shardplan: no command; {nearest('', COMMANDS)}", file=sys.stderr)
            return 2
        command = given.pop(0)
    if given and f"{command} {given[0]}" in COMMANDS:
        command = f"{command} {given.pop(0)}"
    if given and (meant := closest(given[0], [name.partition(f"{command} ")[2] for name in COMMANDS])):
        print(f"shardplan {command}: unknown command {given[0]!r}; did you mean {meant!r}?", file=sys.stderr)
        return 2
    if command not in COMMANDS:
        print(f"shardplan: unknown command {command!r}; {nearest(command, COMMANDS)}", file=sys.stderr)
        return 2
    defer_unused_packages()
    # transformers 5 logs that it has no PyTorch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    module = f"shardplan.commands.{COMMANDS[command]}"
    return run(command, lambda argv: import_module(module).main(argv), given)


if __name__ == "__main__":
    raise SystemExit(main())
