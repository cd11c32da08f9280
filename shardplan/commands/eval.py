"""`shardplan eval --config C`: plan, stream the checkpoint into the plan, evaluate text, and write the results."""

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from shardplan.commands.inputs import check_model_config, input_paths
from shardplan.commands.output import check_outputs, show_plan, side_stream, write_json, write_report
from shardplan.commands.plan import dry_run
from shardplan.config import parse_config
from shardplan.config.command_flags import EvalCommand
from shardplan.config.load import load_command
from shardplan.config.sections import TaskKind
from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.plan.plan import Plan
from shardplan.plan.workload import AUTO_BATCH, AUTO_POSITION, raise_first
from shardplan.runtime.processes.stacks import record_stacks
from shardplan.runtime.stop_signal import set_on_sigterm

if TYPE_CHECKING:
    from shardplan.eval.task import Task
    from shardplan.eval.texts.store import TextStore

OF_THE_COMMAND = ("dry_run", "json", "precision_study", "report", "verify")
"""Keys that only the command has: what they ask for has functions of its own in Python, or is printed."""
STOPPED = "stopped after a whole shard; the same command goes on from there (results in {})"


def main(argv: Sequence[str]) -> None:
    """Run `shardplan eval` with the arguments `argv`."""
    config = with_windows(parse_config(argv, EvalCommand))
    if config.dry_run:
        plan = dry_run(config)
        if plan is not None and config.data.path is not None:
            print_forecast(config, plan)
        return
    check_evaluation(config)
    assert config.data.path is not None
    from shardplan.eval.texts.store import open_texts

    check_outputs(input_paths(config), json=config.json, report=config.report)
    store = open_texts(config.data.path, config.data.max_documents)
    if config.plan is None:
        check_model_config(config)
    # JAX and Levanter take seconds to import: everything that can be checked without them comes first
    from shardplan.commands.verify import check_fits, show_verdict
    from shardplan.eval.run import run_evaluation
    from shardplan.report.evaluation import print_evaluation
    from shardplan.report.tables import console
    from shardplan.runtime.devices import is_first_process
    from shardplan.runtime.progress import print_note

    def output(plan: Plan) -> None:
        if is_first_process():
            show_plan(plan, config.json, config.levanter_schema)
            if config.json is not None:
                write_json(plan.to_json(), config.json)
        verdicts = []
        if config.verify:  # in every process, so that all of them stop if the plan does not fit
            with open(os.devnull, "w") as nowhere:
                out = side_stream(config.json)
                verdicts = [show_verdict(config, plan, out if is_first_process() else nowhere)]
        if config.report is not None and is_first_process():
            write_report(config.report, plan, verdicts, config.levanter_schema)
        if verdicts:
            check_fits(verdicts[0][1])

    stops = threading.Event()
    with record_stacks(), ExitStack() as until_the_end:

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
    if config.task.kind is TaskKind.EXTRACTION:
        draw_extraction(config.output, summary, store)
    print_note(f"results written to {config.output}")


def evaluate(*files: str, **sections: Any) -> dict[str, Any] | None:
    """Evaluate texts as `shardplan eval` does, in a program or a notebook, and write the results folder.

    As in `evaluate("configs/tiny.yaml", output="results/first")`; every process of a run calls it with the same
    arguments. A run that was interrupted goes on.

    Args:
        files: YAML files, of which later ones win.
        sections: keys that override those of the files, such as `data={"path": "texts.jsonl"}`.

    Returns:
        In process 0 the summary, which is in the file summary.json as well: `total`, `texts` (by id) and, of
        extraction, `plots`; empty in the others. None if the run was stopped before its end.

    Raises:
        ConfigError: an unusable configuration, or a key that only the command has.
        InfeasibleError: no plan fits.
        CheckpointError: the checkpoint is damaged, or does not match its tokenizer.
        PeerError: a process of the run was lost, failed, or is stuck.
        SlowError: the run is slower than `gate` allows; the results so far are kept.
    """
    config = load_command(EvalCommand, files, sections)
    for key in OF_THE_COMMAND:
        if key in config.given:
            raise ConfigError(f"evaluate: {key} is a key of the command shardplan eval alone; leave it out")
    config = with_windows(config)
    check_evaluation(config)
    assert config.data.path is not None
    from shardplan.eval.run import run_evaluation
    from shardplan.eval.texts.store import open_texts

    store = open_texts(config.data.path, config.data.max_documents)
    summary = run_evaluation(config, make_task(config), store, config.output, lambda _: None, config)
    if summary and config.task.kind is TaskKind.EXTRACTION:
        draw_extraction(config.output, summary, store)
    return summary


def check_evaluation(config: EvalCommand) -> None:
    """Check that a configuration names what an evaluation needs.

    Raises:
        ConfigError: there are no texts or no weights, or the output is no folder.
    """
    if config.data.path is None:
        raise ConfigError("data.path is not set; name a file or folder of texts to evaluate, or use --dry_run")
    if not config.model.ref and config.plan is None:
        raise ConfigError("model.ref is not set; an evaluation needs the weights of a checkpoint, or use --dry_run")
    if config.output == "-" or config.output.endswith(".json"):
        raise ConfigError(
            f"output is {config.output!r}; it must be a folder, such as results/eval: its summary.json has the results"
        )


def make_task(config: EvalCommand) -> "Task[Any]":
    """Return the task that a configuration asks for."""
    from shardplan.eval.extraction.task import ExtractionTask
    from shardplan.eval.loss.task import LossTask

    if config.task.kind is TaskKind.EXTRACTION:
        return ExtractionTask(config.task, config.precision_study)
    return LossTask(config.task)


def print_forecast(config: EvalCommand, plan: Plan) -> None:
    """Print how long the texts take with a plan; to stderr with `--json -`."""
    from shardplan.eval.forecast import forecast_run
    from shardplan.eval.texts.store import open_texts
    from shardplan.report.evaluation import print_run_forecast
    from shardplan.report.tables import console
    from shardplan.runtime.progress import print_note

    assert config.data.path is not None
    try:
        store = open_texts(config.data.path, config.data.max_documents)
    except ConfigError as error:  # they may be on the hosts of the slice alone
        print_note(f"no duration of the texts: {error}")
        return
    forecast = forecast_run(make_task(config), store, config.model.ref or plan.model.ref, plan)
    print_run_forecast(asdict(forecast), console(side_stream(config.json)))


def with_windows(config: EvalCommand) -> EvalCommand:
    """Return the configuration; of extraction with the workload that it needs: windows, and their scores.

    Where they are not set, the batch is the fastest one, and the sequences those that windows fill best.
    """
    if config.task.kind is not TaskKind.EXTRACTION or config.plan is not None:
        return config
    from shardplan.plan.packing import packed_length  # imports numpy

    task, work = config.task, config.workload
    length = task.prefix + task.suffix + bool(task.special_tokens)
    is_cpu = parse_slice(config.hardware.slice).is_cpu  # whose attention needs no kernel
    position = length if is_cpu else packed_length(length)
    if "workload.position" in config.given:
        position = packed_length(length) if work.position == AUTO_POSITION else work.position
    window = length if position != length else None
    batch = work.batch if "workload.batch" in config.given else AUTO_BATCH
    changed = replace(work, kind="score", top_k=task.top_k, batch=batch, position=position, window=window)
    for key in ("kind", "top_k", "window"):
        given, needed = getattr(work, key), getattr(changed, key)
        if f"workload.{key}" in config.given and given != needed:
            raise ConfigError(f"workload.{key} is {given}, task.kind extraction needs {needed}; leave it out")
    raise_first(changed.problems())
    return replace(config, workload=changed)


def study_precision(
    config: EvalCommand, store: "TextStore", on_plan: Callable[[Plan], None], stops: threading.Event
) -> None:
    """Score the same windows in two types, and print and write what that changes."""
    from shardplan.eval.extraction.precision import TYPES, compare_precision
    from shardplan.eval.results_folder import read_windows
    from shardplan.eval.run import run_evaluation
    from shardplan.plan.serialization import json_bytes
    from shardplan.report.extraction.precision import print_precision
    from shardplan.report.tables import console
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


def draw_extraction(output: str, summary: Mapping[str, Any], store: "TextStore") -> None:
    """Draw the results of an extraction run; done by one process, because the others have nothing to wait for."""
    from shardplan.eval.extraction.pictures import COLUMNS, INDEX, write_pictures
    from shardplan.eval.results_folder import read_windows
    from shardplan.runtime.progress import print_note, show_steps

    with show_steps("drawing") as report:
        left_out = write_pictures(output, lambda: read_windows(output, COLUMNS), store, summary, report)
    for line in left_out:
        print_note(line)
    print_note(f"{INDEX} in the results folder shows them")
