"""`shardplan lm_eval ...`: the command line of lm_eval, in which `--model shardplan` is known."""

import sys
from collections.abc import Sequence
from importlib import import_module


def main(argv: Sequence[str]) -> None:
    """Run `lm_eval` with the arguments `argv`."""
    import_module("shardplan.eval.harness")  # registers the model; lm_eval looks for none outside itself
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["lm_eval", *argv]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
