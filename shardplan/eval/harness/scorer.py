"""Scores packed requests on the devices of a plan, with one compiled program."""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardplan.checkpoint.session import Session
from shardplan.errors import ConfigError
from shardplan.eval.harness.requests import PackedRequests
from shardplan.eval.loop.inputs import InputsAhead
from shardplan.eval.loop.lanes import find_lanes
from shardplan.eval.loop.loop import Loop
from shardplan.eval.loop.shards import Shards
from shardplan.eval.texts.tokenizer import check_tokens
from shardplan.eval.windows import Rows
from shardplan.execution import specialize, step_program
from shardplan.model.inspect import inspect_model
from shardplan.model.logits.token_scores import TokenScores
from shardplan.monitoring.step_statistics import Count, LoopStatistics, step_deadline
from shardplan.plan.mapping import mesh_size
from shardplan.runtime.process_progress import shared_progress
from shardplan.runtime.processes.group import open_process_group


class RequestScorer:
    """Loads the weights of a session, and scores requests with them."""

    def __init__(self, session: Session):
        """Load the weights, and compile the program of the plan.

        Raises:
            ConfigError: the plan shards positions, or its workload does not compute scores.
            CheckpointError: the checkpoint does not hold the model, or is damaged.
        """
        plan, axes = session.plan, inspect_model(session.model)
        if mesh_size(plan.mesh, plan.compute_mapping.get(axes.position, ())) > 1:
            raise ConfigError(
                "the plan shards positions, and packed requests need whole rows on a device; plan again with --pin "
                f"{axes.position}="
            )
        self._session = session
        model = specialize(session.model, plan)
        module, _ = session.load(model.template)
        program = step_program(model, plan, session.mesh, is_packed=True)
        self._lanes = find_lanes(program)
        with open_process_group() as processes, processes.phase("compiling"):
            self._loop = Loop(module, program, plan.compiler_options, TokenScores._fields, self._lanes)

    @property
    def statistics(self) -> LoopStatistics:
        """Counts and durations of all requests that were scored."""
        return self._loop.statistics

    def score(
        self, packed: PackedRequests, on_scored: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each request's log-probability in nats, float64[request], and whether it is greedy, bool[request].

        A continuation is greedy if each of its tokens is the most probable one.

        Args:
            packed: requests, the same in all processes (see `check_equal`), in rows of the plan's length.
            on_scored: called with the indices of requests that this process has scored, and with both results for them.

        Raises:
            CheckpointError: the model has no embedding for a token.
        """
        check_tokens(max(int(each.max()) for each in packed.tokens), self._session.model, self._session.folder)
        log_probs, is_greedy = np.zeros(len(packed.start)), np.zeros(len(packed.start), bool)
        order = np.argsort(packed.start, kind="stable")
        # requests do not cross rows
        bounds = np.searchsorted(packed.start[order], np.arange(packed.rows + 1) * packed.position)
        shards = Shards(packed.rows, self._lanes.count, self._lanes.sequences, steps=1)

        def count(rows: int) -> Count:
            return Count(int(bounds[rows]), 0)

        with (
            open_process_group() as processes,
            shared_progress(len(packed.start), "scoring", "requests") as progress,
            processes.phase("scoring", step_deadline(self._session.plan.cost.step_seconds)) as advance,
            ThreadPoolExecutor(1) as threads,
        ):

            def make(first: int, last: int) -> Future[Rows]:
                return threads.submit(lambda: Rows(packed.fill(first, last - first), {}))

            inputs = InputsAhead(shards, range(shards.count), self._lanes.own, make)
            for step in self._loop.run(inputs, range(shards.count), count):
                progress.update(step.count.windows)
                advance(progress.done, f"step {self.statistics.steps}")
                for lane, (_, scores) in step.lanes.items():
                    first, last = (min(each, packed.rows) for each in shards.lane_range(step.shard, lane))
                    requests = order[bounds[first] : bounds[last]]
                    start, end = (each[requests] - first * packed.position for each in (packed.start, packed.end))
                    sums = sum_scores(scores["log_prob"], scores["rank"], start, end)
                    log_probs[requests], is_greedy[requests] = sums
                    if on_scored is not None:
                        on_scored(requests, *sums)
            if jax.process_count() > 1:  # each has the requests of its lanes, and zeros
                bits = multihost_utils.process_allgather(log_probs.view(np.uint32))  # JAX would round float64
                log_probs = np.ascontiguousarray(bits).view(np.float64).sum(axis=0)
                is_greedy = multihost_utils.process_allgather(is_greedy).any(axis=0)
        return log_probs, is_greedy


def sum_scores(
    log_prob: np.ndarray, rank: np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of the log-probabilities in each range of scores, and whether all ranks in it are 0.

    Every range is summed by itself, so that a score that is not finite affects only the ranges that contain it.

    >>> log_prob, rank = np.array([[-1.0, -2.0, -0.5]]), np.array([[0, 1, 0]])
    >>> sums, is_greedy = sum_scores(log_prob, rank, np.array([0, 2]), np.array([2, 3]))
    >>> sums.tolist(), is_greedy.tolist()
    ([-3.0, -0.5], [False, True])

    Args:
        log_prob, rank: [row, position].
        start, end: int64[range], the first index of the range, and one past its last, in all rows concatenated.
    """
    if len(start) == 0:
        return np.empty(0), np.empty(0, bool)
    edges = np.stack([start, end], 1).reshape(-1)
    # an index may be that after the last element
    log_prob = np.append(log_prob.astype(np.float64).reshape(-1), 0.0)
    misses = np.append((rank != 0).reshape(-1), False).astype(np.int64)
    return np.add.reduceat(log_prob, edges)[::2], np.add.reduceat(misses, edges)[::2] == 0


def check_equal(packed: PackedRequests) -> None:
    """Check that all processes have the same requests, because otherwise plans would differ, and steps would hang.

    Raises:
        ConfigError: requests differ; raised in all processes.
    """
    digest = hashlib.sha256()
    for array in (packed.start, packed.end, *packed.tokens):
        digest.update(np.ascontiguousarray(array).data)
    with open_process_group() as processes:
        processes.agree("requests", lambda: None, lambda _: {"requests": digest.hexdigest()}, _other_requests)


def _other_requests(part: str, process: int, value: str | None, expected: str | None) -> ConfigError:
    return ConfigError(
        f"process {process} and process 0 differ in their {part}; give all the same arguments, and remove the files of "
        "--use_cache if an earlier run was interrupted"
    )
