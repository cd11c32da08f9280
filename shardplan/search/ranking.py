"""What a search keeps: the best candidates so far."""

import math
from dataclasses import dataclass, field

from shardplan.cost.sharding import ShardingAssignment
from shardplan.plan.mapping import MeshAxes
from shardplan.search.space import Space

TIME_RESOLUTION = 1e-2
"""Plans whose times differ by less than this part are equal to the cost model; the one with more free memory wins."""


@dataclass(frozen=True)
class Candidate:
    """One mesh with both mappings."""

    space: Space = field(repr=False)
    mesh: dict[str, int]
    compute: dict[str, MeshAxes]
    params: dict[str, MeshAxes]
    seconds: float
    peak_bytes: float

    @property
    def layout(self) -> ShardingAssignment:
        """What it makes of arrays."""
        return self.space.layout(self.mesh, self.compute, self.params)


class Ranking:
    """The best candidates so far, one of every group; of what is as fast as the fastest of all the smallest first."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.candidates: list[Candidate] = []
        self._groups: list[list[Candidate]] = []

    @property
    def limit(self) -> float:
        """Seconds that another candidate must not exceed to be kept."""
        full = len(self.candidates) == self.keep
        return max(c.seconds for c in self.candidates) * (1 + TIME_RESOLUTION) if full else math.inf

    def add(self, group: list[Candidate]) -> None:
        """Take in candidates of which one can be kept: those that none is both faster and smaller than."""
        self._groups.append(group)
        equal = min(c.seconds for each in self._groups for c in each) * (1 + TIME_RESOLUTION)
        best = sorted(
            (_smallest(each, equal) for each in self._groups),
            key=lambda c: (c.seconds > equal, c.seconds if c.seconds > equal else c.peak_bytes, c.seconds),
        )
        self.candidates = []
        for candidate in best:
            if len(self.candidates) < self.keep and not any(_is_same(candidate, kept) for kept in self.candidates):
                self.candidates.append(candidate)


def _smallest(group: list[Candidate], equal: float) -> Candidate:
    """The smallest of those that take no more than `equal` seconds, or else of those as fast as the group's fastest."""
    fastest = min(candidate.seconds for candidate in group)
    limit = equal if fastest <= equal else fastest * (1 + TIME_RESOLUTION)
    return min((c for c in group if c.seconds <= limit), key=lambda c: (c.peak_bytes, c.seconds))


def _is_same(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates only differ in names, as where two mesh axes always stand together."""
    return math.isclose(one.seconds, other.seconds) and math.isclose(one.peak_bytes, other.peak_bytes)
