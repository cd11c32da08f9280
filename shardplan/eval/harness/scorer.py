"""Scores packed requests on the devices of a plan, with one compiled program."""

import hashlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray
from jax.experimental import multihost_utils

from shardplan.checkpoint.session import Session
from shardplan.errors import ConfigError
from shardplan.eval.harness.requests import PackedRequests
from shardplan.eval.texts.tokenizer import check_tokens
from shardplan.model.inspect import inspect_model
from shardplan.model.token_scores import TokenScores
from shardplan.plan.mapping import mesh_size
from shardplan.runtime.process_group import open_process_group
from shardplan.runtime.process_progress import shared_progress
from shardplan.step import score_program, specialize

STEPS_AHEAD = 2
"""Steps that are given to the devices before the results of an earlier one are fetched."""


@dataclass
class ScorerStatistics:
    """Counts and durations of a scorer."""

    programs: int = 0
    """Forward programs that were compiled."""
    compile_seconds: float = 0.0
    steps: int = 0
    score_seconds: float = 0.0


class RequestScorer:
    """Scores requests with the weights of a session, which it loads."""

    def __init__(self, session: Session):
        """Load the weights, and compile the program of the plan.

        Raises:
            ConfigError: the plan shards positions, or is not for scores.
            CheckpointError: the checkpoint does not hold the model, or is damaged.
        """
        plan, axes = session.plan, inspect_model(session.model)
        if mesh_size(plan.mesh, plan.compute_mapping.get(axes.position, ())) > 1:
            raise ConfigError(
                "the plan shards positions, and packed requests need whole rows on a device; plan again with --pin "
                f"{axes.position}="
            )
        self._session, self._shape = session, (plan.workload.batch, plan.workload.position)
        self.statistics = ScorerStatistics()
        model = specialize(session.model, plan)
        self._module, _ = session.load(model.template)
        program = score_program(model, plan, session.mesh, is_packed=True)
        self._like: NamedArray = program.arguments[1]
        started = time.perf_counter()
        self._step = program.compile(plan.compiler_options)
        self.statistics.compile_seconds, self.statistics.programs = time.perf_counter() - started, 1

    def score(
        self, packed: PackedRequests, on_scored: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability in nats, float64[request], and whether it is greedy, bool[request].

        A continuation is greedy if each of its tokens is the most probable one.

        Args:
            packed: the same in all processes (see `check_equal`), in rows as long as those of the plan.
            on_scored: takes the numbers of the requests whose scores a step completed, and both of these.

        Raises:
            CheckpointError: the model has no embedding for a token.
        """
        batch, position = self._shape
        check_tokens(max(int(each.max()) for each in packed.tokens), self._session.model, self._session.folder)
        started = time.perf_counter()
        total = len(packed.start)
        log_probs, is_greedy = np.empty(total), np.empty(total, bool)
        order = np.argsort(packed.start, kind="stable")
        steps = -(-packed.rows // batch)
        # requests do not cross rows
        bounds = np.searchsorted(packed.start[order], np.arange(steps + 1) * batch * position)
        waiting: deque[tuple[int, TokenScores]] = deque()

        def fetch() -> None:
            step, scores = waiting.popleft()
            requests, first = order[bounds[step] : bounds[step + 1]], step * batch * position
            log_probs[requests], is_greedy[requests] = sum_scores(
                self._to_host(scores.log_prob),
                self._to_host(scores.rank),
                packed.start[requests] - first,
                packed.end[requests] - first,
            )
            if on_scored is not None:
                on_scored(requests, log_probs[requests], is_greedy[requests])
            progress.update(len(requests))

        with open_process_group(), shared_progress(total, "scoring", "requests") as progress:
            for step in range(steps):
                tokens, starts = packed.fill(step * batch, batch)
                scores = self._step(self._module, self._place(tokens), self._place(starts))
                for array in (scores.log_prob.array, scores.rank.array):
                    array.copy_to_host_async()
                waiting.append((step, scores))
                if len(waiting) > STEPS_AHEAD:
                    fetch()
            while waiting:
                fetch()
        self.statistics.steps += steps
        self.statistics.score_seconds += time.perf_counter() - started
        return log_probs, is_greedy

    def _place(self, values: np.ndarray) -> NamedArray:
        """Put int32[row, position] values on the devices; each process fills its own."""
        array = jax.make_array_from_callback(self._shape, self._like.array.sharding, lambda index: values[index])
        return hax.named(array, self._like.axes)

    def _to_host(self, scores: NamedArray) -> np.ndarray:
        """Return the scores of all rows of a step, [row, position], in every process."""
        array = scores.array
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.asarray(array)


def sum_scores(
    log_prob: np.ndarray, rank: np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of the log-probabilities of each range of scores, and whether all of its ranks are 0.

    Ranges are summed one by one, so that a score that is not finite changes the sums of its own ranges only.

    Args:
        log_prob, rank: [row, position].
        start, end: int64[range]: the range's first index in the rows one after the other, and that after its last.
    """
    if len(start) == 0:
        return np.empty(0), np.empty(0, bool)
    edges = np.stack([start, end], 1).reshape(-1)
    # an index may be that after the last element
    log_prob = np.append(log_prob.astype(np.float64).reshape(-1), 0.0)
    misses = np.append((rank != 0).reshape(-1), False).astype(np.int64)
    return np.add.reduceat(log_prob, edges)[::2], np.add.reduceat(misses, edges)[::2] == 0


def check_equal(packed: PackedRequests) -> None:
    """Check that all processes have the same requests: plans would differ, and steps would hang or mix them.

    Raises:
        ConfigError: they have not, in all processes.
    """
    digest = hashlib.sha256()
    for array in (packed.start, packed.end, *packed.tokens):
        digest.update(np.ascontiguousarray(array).data)
    with open_process_group() as processes:
        digests = processes.gather("requests", digest.hexdigest())

        def compare() -> None:
            different = next((process for process, each in digests.items() if each != digests[0]), None)
            if different is not None:
                raise ConfigError(
                    f"process {different} has other requests than process 0; give all the same arguments, and remove "
                    "the files of --use_cache if an earlier run was interrupted"
                )

        processes.broadcast("requests are equal", compare)  # so that all processes end with this message
