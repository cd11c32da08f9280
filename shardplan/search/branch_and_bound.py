"""Branch and bound over meshes and mappings: the fastest plan that fits, under the cost model, proven.

Frames, a mesh with the mapping of batch and positions each, are looked into in the order of the least time that they
can take, until that is more than what has been found.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from shardplan.search.mesh_subproblem import Tally, frames
from shardplan.search.ranking import Candidate, Ranking
from shardplan.search.space import Space


def search(space: Space, meshes: Sequence[dict[str, int]], ranking: Ranking, tally: Tally) -> bool:
    """Add the fastest candidates that fit to `ranking`, by mesh and what batch, positions and residual axis have.

    Returns:
        False where every mapping is too slow for the ranking, however much memory there were.
    """
    every = list(frames(space, meshes, tally))
    small = [frame for frame in every if frame.least_bytes <= space.available]
    tally.rejected["memory"] += len(every) - len(small)
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
    tally.rejected["slower"] += len(waiting)
    return not every or any(max(frame.floor, frame.bound) <= ranking.limit for frame in every)


def nearest_miss(space: Space, meshes: Sequence[dict[str, int]], most: float, tally: Tally) -> Candidate | None:
    """The candidate that needs least memory, whether or not it fits; None where pins leave none below `most` bytes."""
    best: Candidate | None = None
    for frame in sorted(frames(space, meshes, tally), key=lambda frame: frame.least_bytes):
        limit = best.peak_bytes if best is not None else most
        if frame.least_bytes >= limit:
            break
        best = frame.smaller(limit) or best
    return best
