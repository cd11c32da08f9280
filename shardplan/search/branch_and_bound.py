"""Branch and bound over mesh subproblems: the fastest plans that fit, proven optimal under the cost model.

Subproblems are solved in the order of lower bounds of their times, until these exceed the times of the plans found.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from shardplan.hardware.mesh_axes import TENSOR_AXES
from shardplan.plan.mapping import mesh_size
from shardplan.search.ranking import Candidate, Ranking
from shardplan.search.reasons import Rejection, SearchStatistics
from shardplan.search.space import Space
from shardplan.search.subproblem.mesh_subproblem import enumerate_subproblems


def search_meshes(
    space: Space, meshes: Sequence[dict[str, int]], ranking: Ranking, statistics: SearchStatistics
) -> bool:
    """Add the fastest candidates that fit to `ranking`.

    `ranking` keeps at most one candidate for each mesh and mapping of batch, positions and residual.

    Returns:
        False if every mapping would be too slow for the ranking even with unlimited memory.
    """
    if space.min_matmul_seconds / space.hardware.devices > ranking.limit:
        return False
    subproblems = list(enumerate_subproblems(space, meshes, statistics))
    fitting = [subproblem for subproblem in subproblems if subproblem.min_bytes <= space.available_bytes]
    statistics.rejected[Rejection.MEMORY] += len(subproblems) - len(fitting)
    # The first subproblem of every degree of tensor parallelism comes first: the fastest of them rules out most others.
    # Of the rest the tighter bound is computed only when the quick one is the lowest of all.
    by_bound = sorted(range(len(fitting)), key=lambda i: (fitting[i].quick_lower_bound, i))
    first = {mesh_size(fitting[i].mesh, TENSOR_AXES): i for i in reversed(by_bound)}
    for i in first.values():
        fitting[i].rank(ranking)
    queue = [(fitting[i].quick_lower_bound, i, False) for i in by_bound if i not in first.values()]
    heapify(queue)
    while queue and queue[0][0] <= ranking.limit:
        _, i, is_tight = heappop(queue)
        if is_tight:
            fitting[i].rank(ranking)
        elif fitting[i].is_slower(ranking.limit):
            statistics.rejected[Rejection.SLOWER] += 1
        else:
            heappush(queue, (fitting[i].lower_bound, i, True))
    statistics.rejected[Rejection.SLOWER] += len(queue)
    return not subproblems or not all(each.is_slower(ranking.limit) for each in subproblems)


def find_smallest(
    space: Space, meshes: Sequence[dict[str, int]], limit_bytes: float, statistics: SearchStatistics
) -> Candidate | None:
    """Return the candidate with the smallest peak memory, even if it does not fit; None if none is below the limit."""
    best: Candidate | None = None
    # the one that may be smallest comes first, so that its size excludes most others: no time excludes any here
    for subproblem in sorted(enumerate_subproblems(space, meshes, statistics), key=lambda each: each.min_bytes):
        limit = best.peak_bytes if best is not None else limit_bytes
        if subproblem.min_bytes >= limit:  # and so is that of all that follow
            break
        best = subproblem.find_smallest(limit) or best
    return best
