"""`shardplan train --config C`: plan, and run Levanter's training with the plan, watched."""

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from shardplan.commands.inputs import input_paths
from shardplan.commands.output import check_outputs, show_plan, side_stream, write_json, write_report
from shardplan.config import parse_config
from shardplan.config.command_flags import TrainCommand
from shardplan.config.model_config import check_model_config
from shardplan.plan.plan import Plan
from shardplan.runtime.environment import compute_on_cpu
from shardplan.runtime.signals.stop_signal import set_on_sigterm

if TYPE_CHECKING:
    from shardplan.verify.case import Case
    from shardplan.verify.verdict import Verdict


def main(argv: Sequence[str]) -> None:
    """Run `shardplan train` with the arguments `argv`."""
    config = parse_config(argv, TrainCommand)
    check_outputs(input_paths(config), json=config.json, report=config.report)
    if config.plan is None:
        check_model_config(config)
    if config.dry_run:
        dry_run(config)
        return
    # JAX and Levanter take seconds to import: everything that can be checked without them comes first
    from shardplan.runtime.devices import is_first_process
    from shardplan.runtime.progress import print_note
    from shardplan.train.run import run_training

    stops = threading.Event()
    with ExitStack() as until_the_end:
        shown: list[tuple[Plan, Sequence[tuple[Case, Verdict]]]] = []

        def on_plan(plan: Plan) -> None:
            # now that JAX has started: to connect its processes it installs a handler of its own
            until_the_end.enter_context(set_on_sigterm(stops))
            shown.append((plan, show(config, plan, is_first_process())))

        summary = run_training(config, on_plan, stops)
    if not is_first_process():
        return
    if summary is None:
        print_note(f"stopped; the same command goes on from there (checkpoints in {config.output})")
        return
    if config.report is not None and "selection" in summary:
        write_report(config.report, *shown[0], selection=summary["selection"])
    loss = "" if summary["loss"] is None else f", loss {summary['loss']:.4f}"  # none where only the export was missing
    print_note(f"{summary['steps']} steps are done{loss}; all is in {config.output}")


def dry_run(config: TrainCommand) -> None:
    """Plan, and write the plan and Levanter's file to the output folder."""
    compute_on_cpu()
    from shardplan.runtime.progress import print_note
    from shardplan.train.run import plan_training, write_files

    prepared = plan_training(config)
    show(config, prepared.plan, True)
    write_files(prepared)
    print_note(f"plan.json and levanter.yaml written to {config.output}")


def show(config: TrainCommand, plan: Plan, is_first: bool) -> "Sequence[tuple[Case, Verdict]]":
    """Print the plan, and compile it if the configuration requests this; every process calls this function.

    Returns:
        The verdict of the compiler, in a list that is empty if nothing was compiled.
    """
    from shardplan.commands.verify import check_fits, show_verdict

    if is_first:
        show_plan(plan, config.json)
        if config.json is not None:
            write_json(plan.to_json(), config.json)
    verdicts: list[tuple[Case, Verdict]] = []
    if config.verify:  # in every process, so that all of them stop if the plan does not fit
        with open(os.devnull, "w") as nowhere:
            verdicts = [show_verdict(config, plan, side_stream(config.json) if is_first else nowhere)]
    if config.report is not None and is_first:
        write_report(config.report, plan, verdicts)
    if verdicts:
        check_fits(verdicts[0][1])
    return verdicts
