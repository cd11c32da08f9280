"""Runs an evaluation from start to end: texts, plan, weights, all steps, and the results.

A run goes on where an earlier one with the same results folder ended. Results are equal to the bit if mesh and batch
are those of the earlier run; on other devices they differ as floating-point sums in another order do.
"""

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any

import equinox as eqx
import jax
import numpy as np

from shardplan.checkpoint.adapter.adapter import read_adapter
from shardplan.checkpoint.format.index import read_tensor_index
from shardplan.checkpoint.session import Session, prepare
from shardplan.config.command_flags import MonitoringConfig
from shardplan.config.given_plan import load_given_plan
from shardplan.config.plan_config import LoadingConfig
from shardplan.errors import ConfigError, SlowError
from shardplan.eval.experts.run_records import ExpertRecords, check_has_experts
from shardplan.eval.loop.inputs import InputsAhead
from shardplan.eval.loop.lanes import Lanes, find_lanes
from shardplan.eval.loop.loop import Loop, Scored
from shardplan.eval.loop.shards import Shards
from shardplan.eval.run_results.folder import EXPERTS, ResultsFolder, read_windows
from shardplan.eval.task import EvaluationTask
from shardplan.eval.texts.encoding import make_tokenizer
from shardplan.eval.texts.reader import Source, SpecialTokens, make_source, special_tokens
from shardplan.eval.texts.store import TextStore
from shardplan.eval.texts.tokenizer import check_tokens, read_tokenizer
from shardplan.eval.tracking import open_tracker, step_metrics
from shardplan.eval.windows import Windows
from shardplan.eval.workers import count_tokens, make_rows, open_workers
from shardplan.execution import specialize
from shardplan.execution.recorded_program import with_expert_records
from shardplan.monitoring.memory import COMPILED, LOADED
from shardplan.monitoring.run_folder import digest_of
from shardplan.monitoring.run_monitor import RunMonitor, open_monitor
from shardplan.monitoring.step_statistics import LoopStatistics, step_deadline
from shardplan.plan.mapping import mesh_size
from shardplan.plan.plan import Plan
from shardplan.plan.serialization import json_bytes
from shardplan.plan.workload.workload import BATCH_AXIS
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.process_progress import shared_progress
from shardplan.runtime.processes.group import ProcessGroup, open_process_group
from shardplan.runtime.progress import print_note
from shardplan.runtime.signals.preemption import is_preempted
from shardplan.storage import Folder

logger = logging.getLogger(__name__)

MONITORING = MonitoringConfig()
NOUNS = {"texts": "text", "checkpoint": "the checkpoint's file", "adapter": "the adapter's file"}
"""Input that consists of several texts or files -> noun for one of them in messages."""
MAX_NAMED = 1000
"""Maximum number of texts, or of checkpoint files, that processes compare one by one."""


def run_evaluation(
    config: LoadingConfig,
    task: EvaluationTask[Any],
    store: TextStore,
    output: str,
    on_plan: Callable[[Plan], None],
    monitoring: MonitoringConfig = MONITORING,
    stops: threading.Event | None = None,
) -> dict[str, Any] | None:
    """Plan (or take the Plan file of `config.plan`), load the checkpoint, evaluate, and write the results folder.

    Args:
        output: the results folder; all processes must see the same one.
        on_plan: called with the Plan before anything is loaded.
        monitoring: how the run is watched.
        stops: once this is set in any process, the run stops after the shard under way.

    Returns:
        In process 0 the summary: the task's parts (`total`, `texts` by id, ...), `run`, `load`, `plan`, `versions`. An
            empty mapping in other processes. None if the run was stopped before its end.

    Raises:
        ConfigError: the plan is not for this task, no text has a window, the folder is of another run, or processes
            have different texts or configurations.
        CheckpointError: tokenizer and weights have different vocabularies, or the checkpoint is damaged.
        PeerError: a process of the run was lost, failed, or is stuck.
        SlowError: the run is slower than `monitoring.gate` allows; the results so far are kept.
    """
    stops = stops or threading.Event()
    config, given = load_given_plan(config)
    task.check_workload(config.workload)  # before a search for a plan
    deadlines = monitoring.deadline
    session = prepare(config, given, deadlines.loading)
    if monitoring.expert_statistics:
        check_has_experts(session.model)
    plan = session.plan
    task.check_workload(plan.workload)  # whose positions may be fewer: those that the model has
    results, name = ResultsFolder(output, task.schema), f"{session.folder.ref}/tokenizer.json"

    def check(largest_token: int) -> None:
        check_tokens(largest_token, session.model, session.folder)

    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(open_process_group())
        with processes.phase("showing the plan", deadlines.compiling):  # which may compile its program
            processes.agree("shown", lambda: on_plan(plan), lambda _: {})
        with processes.phase("preparing", deadlines.loading):
            data, special = processes.agree("tokenizer", lambda: _read_tokenizer(name, session.folder), lambda _: {})
            determinants = processes.agree(
                "determinants",
                lambda: _determinants(session, store, data) | task.determinants(plan),
                _digests,
                _other_determinants,
            )
            processes.broadcast("claim", lambda: results.claim(determinants))
            processes.agree("shared results", results.check_shared, lambda _: {})
        source = make_source(store, data, name)
        # one core is left for this process, which gives the devices their steps
        workers = stack.enter_context(open_workers(source, max(1, (os.cpu_count() or 2) - 1)))
        pieces = _count_all(source, workers, processes, check, deadlines.loading) if task.counts_tokens else []
        windows = task.divide(store, pieces, special, plan)
        if is_first_process():
            _warn_of_padding(windows, plan)
        model = specialize(session.model, plan)
        program = task.program(model, plan, session.mesh, windows)
        experts = None
        if monitoring.expert_statistics:
            experts, program = ExpertRecords(model, results), with_expert_records(program, plan)
        lanes = find_lanes(program)
        shards = _make_shards(windows, task, lanes)
        ranges = [_windows_of(windows, *shards.range(shard)) for shard in range(shards.count)]
        finished = {*processes.broadcast("finished", lambda: results.finished(ranges))}
        remaining = [shard for shard in range(shards.count) if shard not in finished]
        if not remaining:
            if is_first_process():
                print_note("all windows have results already: nothing is loaded or computed")
            return _finish(results, store, task, plan, LoopStatistics(), None, windows, processes, experts)
        total = windows.count(windows.sequences).windows
        with (
            open_tracker(monitoring.tracker, output, plan) as tracker,
            open_monitor(monitoring, output, plan, processes) as monitor,
        ):
            started = time.perf_counter()
            module, _ = session.load(model.template, deadlines.loading)
            size = sum(array.nbytes for array in jax.tree.leaves(eqx.filter(module, eqx.is_array)))
            load = {"ref": session.folder.ref, "seconds": time.perf_counter() - started, "bytes": size}
            if session.adapter is not None:
                load["adapter"] = session.adapter.ref
            monitor.audit(module)
            monitor.record_memory(LOADED)
            with processes.phase("compiling", deadlines.compiling):
                find_tokens = None if experts is None else windows.find_tokens
                loop = Loop(module, program, plan.compiler_options, task.outputs, lanes, find_tokens)
            monitor.record_memory(COMPILED)
            with (
                shared_progress(total, "evaluating", "windows") as progress,
                processes.phase("evaluating", deadlines.step or step_deadline(plan.cost.step_seconds)) as advance,
            ):
                progress.update(sum(ranges[shard][1] - ranges[shard][0] for shard in finished))
                inputs = InputsAhead(
                    shards,
                    remaining,
                    lanes.own,
                    lambda first, last: workers.submit(make_rows, windows.job(first, last)),
                    check,
                )
                for step in loop.run(inputs, _until_stopped(remaining, monitor, stops), windows.count):
                    progress.update(step.count.windows)
                    advance(progress.done, f"step {loop.statistics.steps}")
                    metrics = {} if experts is None else experts.add(step.records)
                    tracked = step_metrics(loop.statistics, plan, progress.done, total) | metrics
                    tracker.log(tracked, step=loop.statistics.timed_steps)
                    monitor.record_step(loop.statistics)
                    if experts is not None and step.ends_shard:
                        experts.end_shard(*ranges[step.shard])
                    _write(results, windows, shards, step.shard, step.lanes)
            processes.wait_for_all("written")
            if is_first_process():
                monitor.record_time(loop.statistics, is_completed=not monitor.is_stopped)
        if monitor.too_slow is not None:
            error = SlowError(f"stopped: {monitor.too_slow}; the same command goes on from here")
            error.is_shared = True  # `_until_stopped` has ended the loop in all processes
            raise error
        if monitor.is_stopped:
            return None
        return _finish(results, store, task, plan, loop.statistics, load, windows, processes, experts)


def _read_tokenizer(name: str, folder: Folder) -> tuple[bytes, SpecialTokens]:
    """Return the stored tokenizer of a checkpoint, and its special tokens."""
    data = read_tokenizer(folder)
    return data, special_tokens(make_tokenizer(data, name))


def _determinants(session: Session, store: TextStore, tokenizer: bytes) -> dict[str, Any]:
    """Return the inputs and types on which the results of every task depend."""
    workload = session.plan.workload
    tensors = read_tensor_index(session.folder).tensors
    files = {tensor.file_name: tensor.file.version for tensor in tensors.values()}
    adapter = {} if session.adapter is None else {"adapter": read_adapter(session.adapter).versions}
    return {
        "texts": {text.id: text.digest for text in store.texts},
        "tokenizer": digest_of(tokenizer),
        "checkpoint": dict(sorted(files.items())),
        **adapter,
        "types": {"parameters": workload.param_dtype, "compute": workload.compute_dtype},
    }


def _digests(determinants: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of each text, of each file of the checkpoint, and of each other input or setting.

    More than `MAX_NAMED` texts or files have one digest together, because every process sends all digests.
    """
    digests = {}
    for name, value in determinants.items():
        noun = NOUNS.get(name)
        if noun is None or len(value) > MAX_NAMED:
            digests[name] = digest_of(json_bytes({name: value}))
        else:
            digests.update({f"{noun} {each}": digest for each, digest in value.items()})
    return digests


def _other_determinants(part: str, process: int, value: str | None, expected: str | None) -> ConfigError:
    return ConfigError(
        f"process {process} and process 0 differ in {part}; give all processes the same configuration, checkpoint and "
        "texts"
    )


def _count_all(
    source: Source, workers: Executor, processes: ProcessGroup, check: Callable[[int], None], deadline_s: float
) -> list[np.ndarray]:
    """Return the number of tokens of every piece of every text, int64[piece]; each process counts some pieces.

    Args:
        check: called with the largest token id.
        deadline_s: most seconds without progress.
    """
    pieces = source.all_pieces
    bounds = [len(pieces) * i // processes.process_count for i in range(processes.process_count + 1)]
    own = pieces[bounds[processes.process_index] : bounds[processes.process_index + 1]]
    with (
        shared_progress(len(own), "counting tokens", "pieces of text") as progress,
        processes.phase("counting tokens", deadline_s) as advance,
    ):

        def on_counted(pieces: int) -> None:
            progress.update(pieces)
            advance(progress.done)

        own_counts, own_largest = count_tokens(workers, own, on_counted)
    check(processes.maximum("largest token", own_largest))
    counts = processes.gather("counts", own_counts)
    return source.by_text([count for _, each in sorted(counts.items()) for count in each])


def _make_shards(windows: Windows, task: EvaluationTask[Any], lanes: Lanes) -> Shards:
    """Divide the windows of a run into shards of about the size that the task asks for."""
    total = windows.count(windows.sequences).windows
    step_windows = total / windows.sequences * lanes.count * lanes.sequences
    return Shards(windows.sequences, lanes.count, lanes.sequences, max(1, round(task.shard_windows / step_windows)))


def _windows_of(windows: Windows, first: int, last: int) -> tuple[int, int]:
    """Return the first window of some sequences, and one past the last; `last` may be past the end."""
    begin, end = (windows.count(min(each, windows.sequences)).windows for each in (first, last))
    return begin, end


def _warn_of_padding(windows: Windows, plan: Plan) -> None:
    """Warn that the texts do not fill one batch, and name the smallest batch that they fit in."""
    batch, shards = plan.workload.batch, mesh_size(plan.mesh, plan.compute_mapping.get(BATCH_AXIS, ()))
    # in the plan's own sharding if that is smaller, else in a new plan
    needed = -(-windows.sequences // shards) * shards
    if windows.sequences < batch:
        logger.warning(
            "the texts fill %d of %d rows of %d tokens of a batch: the others are padding; workload.batch %d is enough",
            windows.sequences, batch, plan.workload.position,
            needed if needed < batch else windows.sequences,
        )  # fmt: skip


def _until_stopped(shards: Iterable[int], monitor: RunMonitor, stops: threading.Event) -> Iterator[int]:
    """Yield shards, the same in all processes, until a process has to stop or the run is too slow."""
    for shard in shards:
        if not monitor.goes_on(f"shard {shard}", is_preempted() or stops.is_set()):
            return
        yield shard


def _write(results: ResultsFolder, windows: Windows, shards: Shards, shard: int, scored: Mapping[int, Scored]) -> None:
    """Write the results of a shard's lanes, one part per run of consecutive windows.

    Args:
        scored: lane -> results of the lane.
    """
    lanes = sorted(scored)
    ranges = {lane: _windows_of(windows, *shards.lane_range(shard, lane)) for lane in lanes}
    starts = [i for i, lane in enumerate(lanes) if i == 0 or lanes[i - 1] != lane - 1]
    for begin, end in itertools.pairwise([*starts, len(lanes)]):
        run = lanes[begin:end]
        tables = [windows.table(ranges[lane][0], *scored[lane]) for lane in run]
        results.write_part(ranges[run[0]][0], ranges[run[-1]][1], tables)


def _finish(
    results: ResultsFolder,
    store: TextStore,
    task: EvaluationTask[Any],
    plan: Plan,
    statistics: LoopStatistics,
    load: dict[str, Any] | None,
    windows: Windows,
    processes: ProcessGroup,
    experts: ExpertRecords | None,
) -> dict[str, Any]:
    """Merge the results of all windows, and write and return the summary; only in process 0.

    Args:
        statistics: statistics of this run.
        load: how the weights were loaded; None if all results existed already, so that the earlier summary is kept.
        experts: records of how tokens were routed to experts, if they are requested.
    """
    summary: dict[str, Any] = {}

    def finish() -> None:
        before = results.read_summary() if load is None else None
        if before is not None:
            summary.update(before)
            if experts is not None and EXPERTS not in before:
                print_note("no statistics of experts: these results were computed without; name another output folder")
            return
        all_windows = windows.count(windows.sequences).windows
        results.merge(all_windows)
        summary.update(task.summarize(store, plan, read_windows(results.ref)))
        summary["run"] = {
            **asdict(statistics),
            "windows_per_second": statistics.windows_per_second,
            "tokens_per_second": statistics.tokens_per_second,
        }
        if experts is not None:
            summary[EXPERTS] = experts.summarize(all_windows)
            results.add_experts(summary[EXPERTS])
        summary.update(load=load, task=asdict(task.config), plan=plan.to_json(), versions=plan.versions)
        results.write_summary(summary)

    with processes.phase("merging results"):
        processes.broadcast("summary", finish)
    return summary
