"""The best candidates of a search, kept in order while it runs."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardplan.cost.sharding import ShardingAssignment
from shardplan.experts.method import ExpertStrategy
from shardplan.plan.mapping import MeshAxes
from shardplan.plan.workload.checkpointing import CheckpointPolicy
from shardplan.search.components.compute_sharding import KindMethods
from shardplan.search.space import Space
from shardplan.search.tolerances import LEFT_OUT, TIME_RESOLUTION


@dataclass(frozen=True)
class Candidate:
    """A mesh, its compute and parameter mappings, and its predicted cost."""

    space: Space = field(repr=False)
    mesh: dict[str, int]
    compute: dict[str, MeshAxes]
    """Compute mapping: logical axis -> mesh axes."""
    params: dict[str, MeshAxes]
    """Mapping of stored parameters: logical axis -> mesh axes."""
    methods: KindMethods | None
    """The method of each kind of attention; None for Levanter's own."""
    seconds: float
    """Seconds of a step."""
    peak_bytes: float
    """Peak bytes per device."""
    experts: ExpertStrategy | None = None
    """How routed experts are computed; None for a model without experts."""
    checkpointing: CheckpointPolicy | None = None
    """Policy for activations, if the space leaves it open; else None."""

    @property
    def complexity(self) -> tuple[int, int]:
        """How many mechanisms with costs that the estimate omits: (host copies, blocks of logits)."""
        chosen = 0 if self.checkpointing is None else self.checkpointing.copied
        return chosen or bool(self.space.copy_windows), self.space.logit_blocks

    @property
    def assignment(self) -> ShardingAssignment:
        """Return the sharding of every array under this candidate."""
        return self.space.assignment(self.mesh, self.compute, self.params, self.methods, experts=self.experts)


class Ranking:
    """The best candidates so far, at most one per group, ordered by time, and by memory among ties for fastest."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.candidates: list[Candidate] = []
        self._groups: list[list[Candidate]] = []

    @property
    def limit(self) -> float:
        """Seconds of a step above which further candidates are dropped."""
        full = len(self.candidates) == self.keep
        # a candidate that is slower by `LEFT_OUT` may still be the better one, if it is simpler
        return max(c.seconds for c in self.candidates) * (1 + LEFT_OUT) if full else math.inf

    @property
    def evaluated(self) -> list[Candidate]:
        """All candidates that were added, dropped ones included, the fastest first."""
        return sorted((c for each in self._groups for c in each), key=lambda c: (c.seconds, c.peak_bytes))

    def add(self, group: list[Candidate]) -> None:
        """Add a group of Pareto-optimal candidates (time against memory); at most one of them is kept."""
        self._groups.append(group)
        # from all groups anew: a smaller tie that replaces the best as they come lets the times drift (docs/log.md)
        everyone = list(itertools.chain.from_iterable(self._groups))
        tie_limit = _fastest(everyone).seconds * (1 + TIME_RESOLUTION)
        best = sorted(
            (_smallest(each, tie_limit) for each in self._groups),
            key=lambda c: _order(c, tie_limit),
        )
        self.candidates = []
        for candidate in best:
            if len(self.candidates) < self.keep and not any(
                _is_equivalent(candidate, kept) for kept in self.candidates
            ):
                self.candidates.append(candidate)


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate, or a simpler one that is slower by at most `LEFT_OUT`."""
    limit = min(c.seconds for c in candidates) * (1 + LEFT_OUT)
    near = (c for c in candidates if c.seconds <= limit)
    return min(near, key=lambda c: (*c.complexity, c.seconds))


def _order(candidate: Candidate, tie_limit: float) -> tuple[bool, int, int, float, float]:
    """Return a sort key for candidates: time, but ties are ordered by complexity, then memory."""
    if candidate.seconds > tie_limit:
        return (True, 0, 0, candidate.seconds, candidate.seconds)
    return (False, *candidate.complexity, candidate.peak_bytes, candidate.seconds)


def _smallest(group: list[Candidate], tie_limit: float) -> Candidate:
    """Return the simplest of the tied candidates, and among equally simple ones the one with the smallest peak memory.

    Candidates tie if they take at most `tie_limit` seconds. If none does, they tie with the fastest of the group.
    """
    fastest = min(candidate.seconds for candidate in group)
    limit = tie_limit if fastest <= tie_limit else fastest * (1 + TIME_RESOLUTION)
    return min((c for c in group if c.seconds <= limit), key=lambda c: (*c.complexity, c.peak_bytes, c.seconds))


def _is_equivalent(one: Candidate, other: Candidate) -> bool:
    """Return whether two candidates differ only in names, as when two mesh axes are always mapped together."""
    return math.isclose(one.seconds, other.seconds) and math.isclose(one.peak_bytes, other.peak_bytes)
