"""`shardplan lm_eval ...`: the command line of lm_eval, extended by `--model shardplan`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from shardplan.errors import ConfigError
from shardplan.runtime.processes.link import end_together


def main(argv: Sequence[str]) -> None:
    """Run `lm_eval` with the arguments `argv`.

    Raises:
        ConfigError: tasks were left out that the model cannot run, or nothing was run.
    """
    import_module("shardplan.eval.harness")  # registers the model; lm_eval looks for none outside itself
    from lm_eval.__main__ import cli_evaluate

    from shardplan.eval.harness.tasks import left_out, left_out_text

    left_out.clear()
    before = sys.argv
    sys.argv = ["lm_eval", *argv]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    if left_out:  # in all processes, which have written what they have
        end_together()
        raise ConfigError(
            f"the results lack tasks that were left out: {left_out_text(left_out)}; run these with another model"
        )
