"""`shardplan eval --config C`: plan, stream the checkpoint into the plan, evaluate text, and write the results."""

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from shardplan.commands.inputs import input_paths
from shardplan.commands.output import check_outputs, show_plan, side_stream, write_json, write_report
from shardplan.commands.plan.plan import dry_run
from shardplan.config import parse_config
from shardplan.config.command_flags import EvalCommand
from shardplan.config.sections import EvaluationKind
from shardplan.errors import ConfigError
from shardplan.eval.evaluate import draw_extraction, make_task, open_inputs, with_windows
from shardplan.plan.plan import Plan
from shardplan.runtime.signals.stop_signal import set_on_sigterm

if TYPE_CHECKING:
    from shardplan.eval.texts.store import TextStore
    from shardplan.verify.case import Case
    from shardplan.verify.verdict import Verdict

STOPPED = "stopped after a whole shard; the same command goes on from there (results in {})"


def main(argv: Sequence[str]) -> None:
    """Run `shardplan eval` with the arguments `argv`."""
    config = with_windows(parse_config(argv, EvalCommand))
    if config.dry_run:
        plan = dry_run(config)
        if plan is not None and config.data.path is not None:
            print_forecast(config, plan)
        return
    check_outputs(input_paths(config), json=config.json, report=config.report)
    store = open_inputs(config)
    # JAX and Levanter take seconds to import: everything that can be checked without them comes first
    from shardplan.commands.verify import check_fits, show_verdict
    from shardplan.eval.run import run_evaluation
    from shardplan.report.console import console
    from shardplan.report.evaluation import print_evaluation
    from shardplan.runtime.devices import is_first_process
    from shardplan.runtime.progress import print_note

    def report(plan: Plan, verdicts: "Sequence[tuple[Case, Verdict]]", experts: Mapping[str, Any] | None) -> None:
        if config.report is not None and is_first_process():
            write_report(config.report, plan, verdicts, experts=experts)

    reported: list[tuple[Plan, Sequence[tuple[Case, Verdict]]]] = []

    def output(plan: Plan) -> None:
        if is_first_process():
            show_plan(plan, config.json)
            if config.json is not None:
                write_json(plan.to_json(), config.json)
        verdicts = []
        if config.verify:  # in every process, so that all of them stop if the plan does not fit
            with open(os.devnull, "w") as nowhere:
                out = side_stream(config.json)
                verdicts = [show_verdict(config, plan, out if is_first_process() else nowhere)]
        report(plan, verdicts, None)
        reported.append((plan, verdicts))
        if verdicts:
            check_fits(verdicts[0][1])

    stops = threading.Event()
    with ExitStack() as until_the_end:

        def on_plan(plan: Plan) -> None:
            # now that JAX has started: to connect its processes it installs a handler of its own
            until_the_end.enter_context(set_on_sigterm(stops))
            output(plan)

        if config.precision_study is not None:
            study_precision(config, store, on_plan, stops)
            return
        summary = run_evaluation(config, make_task(config), store, config.output, on_plan, config, stops)
    if not is_first_process():
        return
    if summary is None:
        print_note(STOPPED.format(config.output))
        return
    print_evaluation(summary, console(side_stream(config.json)))
    if "experts" in summary:
        report(*reported[0], summary["experts"])
    if config.task.kind is EvaluationKind.EXTRACTION:
        draw_extraction(config.output, summary, store)
    print_note(f"results written to {config.output}")


def print_forecast(config: EvalCommand, plan: Plan) -> None:
    """Print how long the texts take with a plan; to stderr with `--json -`."""
    from shardplan.eval.forecast import forecast_run
    from shardplan.eval.texts.store import open_texts
    from shardplan.report.console import console
    from shardplan.report.evaluation import print_run_forecast
    from shardplan.runtime.progress import print_note

    assert config.data.path is not None
    try:
        store = open_texts(config.data.path, config.data.max_documents)
    except ConfigError as error:  # they may be on the hosts of the slice alone
        print_note(f"no duration of the texts: {error}")
        return
    forecast = forecast_run(make_task(config), store, config.model.ref or plan.model.ref, plan)
    print_run_forecast(asdict(forecast), console(side_stream(config.json)))


def study_precision(
    config: EvalCommand, store: "TextStore", on_plan: Callable[[Plan], None], stops: threading.Event
) -> None:
    """Score the same windows in two types, and print and write the differences."""
    from shardplan.eval.extraction.precision import TYPES, compare_precision
    from shardplan.eval.run import run_evaluation
    from shardplan.eval.run_results.folder import read_windows
    from shardplan.plan.serialization import json_bytes
    from shardplan.report.console import console
    from shardplan.report.extraction.precision import print_precision
    from shardplan.runtime.devices import is_first_process
    from shardplan.runtime.progress import print_note
    from shardplan.storage.writing import OutputFolder

    folders = [f"{config.output}/{dtype}" for dtype in TYPES]
    for dtype, folder in zip(TYPES, folders, strict=True):
        own = replace(config, workload=replace(config.workload, param_dtype=dtype, compute_dtype=dtype))
        if run_evaluation(own, make_task(config), store, folder, on_plan, config, stops) is None:
            if is_first_process():
                print_note(STOPPED.format(config.output))
            return
    if is_first_process():
        study = compare_precision(*(read_windows(folder, ("log_prob", "rank")) for folder in folders))
        print_precision(study, console(sys.stdout))
        with OutputFolder(config.output).create("precision.json") as file:
            file.write(json_bytes(study))
        print_note(f"results written to {config.output}")
