"""Branch and bound over meshes and mappings: the fastest plan that fits, under the cost model, proven.

Frames, a mesh with the mapping of batch and positions each, are looked into in the order of the least time that they
can take, until that is more than what has been found.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from shardplan.search.mesh_subproblem import SearchStatistics, subproblems
from shardplan.search.ranking import Candidate, Ranking
from shardplan.search.space import Space


def search(space: Space, meshes: Sequence[dict[str, int]], ranking: Ranking, statistics: SearchStatistics) -> bool:
    """Add the fastest candidates that fit to `ranking`, by mesh and what batch, positions and residual axis have.

    Returns:
        False where every mapping is too slow for the ranking, however much memory there were.
    """
    every = list(subproblems(space, meshes, statistics))
    small = [subproblem for subproblem in every if subproblem.least_bytes <= space.available]
    statistics.rejected["memory"] += len(every) - len(small)
    # one for every size of `model` first, for the fastest of these rules most others out; then by the least time that
    # each can take, which is looked into more closely before anything else is
    by_floor = sorted(range(len(small)), key=lambda i: (small[i].floor, i))
    leads = {small[i].mesh["model"]: i for i in reversed(by_floor)}
    for i in leads.values():
        small[i].rank(ranking)
    waiting = [(small[i].floor, i, False) for i in by_floor if i not in leads.values()]
    heapify(waiting)
    while waiting and waiting[0][0] <= ranking.limit:
        _, i, is_bound = heappop(waiting)
        if is_bound:
            small[i].rank(ranking)
        else:
            heappush(waiting, (small[i].bound, i, True))
    statistics.rejected["slower"] += len(waiting)
    return not every or any(max(subproblem.floor, subproblem.bound) <= ranking.limit for subproblem in every)


def nearest_miss(
    space: Space, meshes: Sequence[dict[str, int]], most: float, statistics: SearchStatistics
) -> Candidate | None:
    """The candidate that needs least memory, whether or not it fits; None where pins leave none below `most` bytes."""
    best: Candidate | None = None
    for subproblem in sorted(subproblems(space, meshes, statistics), key=lambda subproblem: subproblem.least_bytes):
        limit = best.peak_bytes if best is not None else most
        if subproblem.least_bytes >= limit:
            break
        best = subproblem.smaller(limit) or best
    return best
