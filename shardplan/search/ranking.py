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
    """A mesh with both mappings, and its predicted cost."""

    space: Space = field(repr=False)
    mesh: dict[str, int]
    compute: dict[str, MeshAxes]
    """Logical axis -> mesh axes of the compute sharding."""
    params: dict[str, MeshAxes]
    """Logical axis -> mesh axes of the stored parameters."""
    methods: KindMethods | None
    """The method of each kind of attention; None for Levanter's own."""
    seconds: float
    """Time of a step."""
    peak_bytes: float
    """Peak memory of a device."""
    experts: ExpertStrategy | None = None
    """How routed experts are computed; None for a model without."""
    checkpointing: CheckpointPolicy | None = None
    """What becomes of activations, where the space leaves it open; None where it is given."""

    @property
    def complexity(self) -> tuple[int, int]:
        """The number of mechanisms with costs that the estimate does not include: host copies, blocks of logits."""
        chosen = 0 if self.checkpointing is None else self.checkpointing.copied
        return chosen or bool(self.space.copy_windows), self.space.logit_blocks

    @property
    def assignment(self) -> ShardingAssignment:
        """The sharding of every array under this candidate."""
        return self.space.assignment(self.mesh, self.compute, self.params, self.methods, experts=self.experts)


class Ranking:
    """The best candidates so far, at most one of each group; candidates that tie for fastest are ordered by memory."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.candidates: list[Candidate] = []
        self._groups: list[list[Candidate]] = []

    @property
    def limit(self) -> float:
        """Step time in seconds above which further candidates are dropped."""
        full = len(self.candidates) == self.keep
        # a candidate that is slower by `LEFT_OUT` may still be the better one, if it is simpler
        return max(c.seconds for c in self.candidates) * (1 + LEFT_OUT) if full else math.inf

    @property
    def evaluated(self) -> list[Candidate]:
        """All candidates that were added, also those that were dropped; the fastest first."""
        return sorted((c for each in self._groups for c in each), key=lambda c: (c.seconds, c.peak_bytes))

    def add(self, group: list[Candidate]) -> None:
        """Add a group of Pareto-optimal candidates (time against memory), and keep at most one."""
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
    """Return the fastest candidate; a simpler one may be slower by `LEFT_OUT`."""
    limit = min(c.seconds for c in candidates) * (1 + LEFT_OUT)
    near = (c for c in candidates if c.seconds <= limit)
    return min(near, key=lambda c: (*c.complexity, c.seconds))


def _order(candidate: Candidate, tie_limit: float) -> tuple[bool, int, int, float, float]:
    """Return a sort key of candidates: by time, and among ties by complexity and memory."""
    if candidate.seconds > tie_limit:
        return (True, 0, 0, candidate.seconds, candidate.seconds)
    return (False, *candidate.complexity, candidate.peak_bytes, candidate.seconds)


def _smallest(group: list[Candidate], tie_limit: float) -> Candidate:
    """Return the simplest and then smallest of the candidates that tie.

    That is, take at most `tie_limit` seconds or, if none does, tie with the fastest of the group.
    """
    fastest = min(candidate.seconds for candidate in group)
    limit = tie_limit if fastest <= tie_limit else fastest * (1 + TIME_RESOLUTION)
    return min((c for c in group if c.seconds <= limit), key=lambda c: (*c.complexity, c.peak_bytes, c.seconds))


def _is_equivalent(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates differ only in names, as when two mesh axes are always mapped together."""
    return math.isclose(one.seconds, other.seconds) and math.isclose(one.peak_bytes, other.peak_bytes)
