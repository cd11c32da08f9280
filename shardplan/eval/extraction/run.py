"""An extraction run from start to end: texts, plan, weights, scores of every window, and what they say.

The run goes on where an earlier one with the same results folder ended. Results are equal to the bit if mesh and batch
are those of the earlier run; on other devices they differ as floating-point sums in another order do.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from shardplan.checkpoint.format.index import read_index
from shardplan.checkpoint.session import Session, prepare
from shardplan.config.command_flags import LoadingConfig
from shardplan.config.given_plan import load_given_plan
from shardplan.config.sections import StrideUnit, TaskConfig
from shardplan.errors import ConfigError
from shardplan.eval.extraction.summary import summarize
from shardplan.eval.extraction.windows import Protocol, Shards, WindowIndex, make_index
from shardplan.eval.results_folder import ResultsFolder, digest_of
from shardplan.eval.score_loop import LoopStatistics, ScoreLoop
from shardplan.eval.texts.store import TextStore
from shardplan.eval.texts.tokenizer import check_tokens, read_tokenizer
from shardplan.eval.window_maker import Source, count_tokens, make_source, open_workers, split
from shardplan.plan.plan import Plan
from shardplan.runtime.process_group import ProcessGroup, open_process_group
from shardplan.runtime.process_progress import shared_progress
from shardplan.step import specialize


def protocol_of(task: TaskConfig) -> Protocol:
    """Return the protocol that a configuration describes."""
    return Protocol(task.prefix, task.suffix, task.stride, task.stride_unit)


def run_extraction(
    config: LoadingConfig, task: TaskConfig, store: TextStore, output: str, on_plan: Callable[[Plan], None]
) -> dict[str, Any] | None:
    """Score the windows of all texts, and write the results folder.

    Args:
        on_plan: called with the Plan before anything is loaded.

    Returns:
        The summary: `total`, `texts` (by id), `run`, `plan`, `versions`; None if the run was asked to stop before its
        end.

    Raises:
        ConfigError: the plan is not for this protocol, no text has a window, or the folder is of another run.
        CheckpointError: tokenizer and weights have different vocabularies, or the checkpoint is damaged.
    """
    protocol = protocol_of(task)
    config, given = load_given_plan(config)
    session = prepare(config, given)
    plan = session.plan
    _check_plan(plan, protocol, task.top_k)
    on_plan(plan)
    data = read_tokenizer(session.folder)
    source = make_source(store, data, f"{session.folder.ref}/tokenizer.json")
    count = max(1, (os.cpu_count() or 2) - 1)
    with _stop_on_sigterm() as stops, open_process_group() as processes, open_workers(source, count) as workers:
        results = ResultsFolder(output, protocol.suffix)
        determinants = _determinants(session, store, protocol, data)
        processes.broadcast("claim", lambda: results.claim(determinants))
        sizes = _count_all(source, protocol, workers, processes)
        index = make_index(protocol, [int(each.sum()) for each in sizes] if sizes else source.characters)
        model = specialize(session.model, plan)
        module, _ = session.load(model.template)
        loop = ScoreLoop(module, model, plan, session.mesh)
        per_step = loop.lane_windows * loop.lanes.count
        shards = Shards(index.total, loop.lanes.count, loop.lane_windows, max(1, task.shard // per_step))
        finished = processes.broadcast("finished", lambda: results.finished(shards))
        remaining = [shard for shard in range(shards.count) if shard not in {*finished}]
        ids = [text.id for text in store.texts]
        done = index.total - sum(_windows_of(shards, shard) for shard in remaining)
        with shared_progress(index.total, "scoring", "windows") as progress:
            progress.update(done)
            completed = loop.run(
                shards,
                remaining,
                index,
                sizes,
                workers,
                lambda shard, lane, rows, scores: results.write_part(
                    shards.lane_range(shard, lane)[0], rows, ids, scores, index.total
                ),
                lambda shard: not any(processes.gather(f"stop before {shard}", stops.is_set()).values()),
                progress.update,
                lambda largest: check_tokens(largest, session.model, session.folder),
            )
        processes.gather("written", None)
        if not completed:
            return None
        return processes.broadcast("summary", lambda: _finish(results, store, task, session, loop.statistics, index))


def _check_plan(plan: Plan, protocol: Protocol, top_k: int) -> None:
    """Check that a plan is for windows of the protocol's length, and for the top k that are asked for."""
    workload = plan.workload
    if not workload.is_scoring:
        raise ConfigError(f"workload.kind is {workload.kind}; extraction needs the kind score")
    if workload.top_k != top_k:
        raise ConfigError(
            f"task.top_k is {top_k}, the plan has {workload.top_k}; set task.top_k to that, or plan again"
        )
    length = workload.window or workload.position
    if length != protocol.length:
        raise ConfigError(
            f"the plan is for windows of {length} tokens; task.prefix {protocol.prefix} and task.suffix "
            f"{protocol.suffix} need {protocol.length}"
        )


def _determinants(session: Session, store: TextStore, protocol: Protocol, tokenizer: bytes) -> dict[str, Any]:
    """Return what determines the results of a run."""
    workload = session.plan.workload
    files = {tensor.file.name.rpartition("/")[2]: tensor.file.version for tensor in read_index(session.folder).values()}
    return {
        "texts": {text.id: text.digest for text in store.texts},
        "tokenizer": digest_of(tokenizer),
        "protocol": asdict(protocol),
        "checkpoint": dict(sorted(files.items())),
        "types": {"parameters": workload.param_dtype, "compute": workload.compute_dtype},
        "top_k": workload.top_k,
    }


def _count_all(source: Source, protocol: Protocol, workers: Executor, processes: ProcessGroup) -> list[np.ndarray]:
    """Return the number of tokens of every piece of every text, int64[piece]; nothing for a stride in characters.

    Each process counts its part of the pieces.
    """
    if protocol.unit is StrideUnit.CHARACTERS:
        return []
    pieces = source.all_pieces
    bounds = [len(pieces) * i // processes.process_count for i in range(processes.process_count + 1)]
    own = pieces[bounds[processes.process_index] : bounds[processes.process_index + 1]]
    counted = [count for part in workers.map(count_tokens, split(own)) for count in part]
    parts = processes.gather("counts", counted)
    counts = iter([count for i in range(processes.process_count) for count in parts[i]])
    return [np.array([next(counts) for _ in range(len(each) - 1)], np.int64) for each in source.pieces]


def _windows_of(shards: Shards, shard: int) -> int:
    return min((shard + 1) * shards.size, shards.total) - shard * shards.size


@contextmanager
def _stop_on_sigterm() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM sets: the shard under way is finished then."""
    stops = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stops.set())
    try:
        yield stops
    finally:
        signal.signal(signal.SIGTERM, before)


def _finish(
    results: ResultsFolder,
    store: TextStore,
    task: TaskConfig,
    session: Session,
    statistics: LoopStatistics,
    index: WindowIndex,
) -> dict[str, Any]:
    """Merge the results of all windows, and write and return the summary."""
    results.merge()
    measured = summarize(results.read_windows(), store.texts, session.plan.workload.top_k)
    summary = {
        **measured,
        "total": {**measured["total"], "planned_windows": index.total},
        "run": {**asdict(statistics), "windows_per_second": _rate(statistics)},
        "task": asdict(task),
        "plan": session.plan.to_json(),
        "versions": session.plan.versions,
    }
    results.write_summary(summary)
    return summary


def _rate(statistics: LoopStatistics) -> float | None:
    return statistics.timed_windows / statistics.seconds if statistics.seconds else None
