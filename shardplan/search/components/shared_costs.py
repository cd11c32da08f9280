"""Shares the costs of computations between meshes on which they are equal.

Many meshes divide the same devices differently between axes that a computation does not see: its arrays have as many
shards, and its collectives as many devices. `MeshCosts` computes such costs once for a space.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from shardplan.cost.gspmd import DeviceCost


class LowerBounds(NamedTuple):
    """Lower bounds on the cost of a group's tasks under a compute mapping, for any mapping of stored parameters."""

    costs: list[DeviceCost]
    """Cost of each task, [task]."""
    seconds: np.ndarray
    """Seconds of each task on one mesh, chosen from the meshes with equal costs, [task]."""
    transferring: list[int]
    """Indices of the tasks with collectives, whose `seconds` hold only for the mesh they were computed on."""


class SharedCosts:
    """Cached costs of a search space that do not depend on the mapping of stored parameters.

    `MeshCosts` fills the cache. Keys are ids of groups, then the choices and the part of the mesh that the costs depend
    on.
    """

    def __init__(self) -> None:
        self.lower_bounds: defaultdict[int, dict[object, LowerBounds]] = defaultdict(dict)
        self.sizes: defaultdict[int, dict[object, np.ndarray]] = defaultdict(dict)
