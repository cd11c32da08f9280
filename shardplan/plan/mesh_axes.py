"""The mesh axes of a plan, and what each is for: one table that the search space derives from.

| mesh axis | batch and positions | other logical axes, compute sharding | stored parameters | crosses slices |
|---|---|---|---|---|
| replica | yes | behind `model` | if batch or positions use it | yes |
| data | yes | no | if batch or positions use it | yes |
| model | no | yes | as in computations | no |

Parameters that are sharded over a mesh axis which batch and positions leave unused are not gathered: the compiler
slices activations instead, and devices repeat work. Such plans are left out. So are plans in which a mesh axis of
several devices shards no computation, unless nothing else fits.
"""

from shardplan.plan.mapping import MeshAxes

MESH_AXES = ("replica", "data", "model")
"""Axes of a plan's mesh, major to minor."""
LEVANTER_BATCH: MeshAxes = ("replica", "data")
"""What Levanter's trainer shards the batch over, whatever its YAML says."""
BATCH_CHOICES: tuple[MeshAxes, ...] = (LEVANTER_BATCH, ("data",), ("replica",), ())
"""What the batch can be sharded over."""
POSITION_CHOICES: tuple[MeshAxes, ...] = ((), ("replica",), ("data",), ("replica", "data"), ("data", "replica"))
"""What positions can be sharded over."""
TENSOR_CHOICES: tuple[MeshAxes, ...] = ((), ("model",), ("model", "replica"))
"""What every other logical axis can be sharded over in computations."""
STORAGE_CHOICES: tuple[MeshAxes, ...] = ((), ("data",), ("replica",), ("replica", "data"))
"""What stored parameters can be sharded over, in addition to their compute sharding, as far as the batch or positions
are sharded over the same mesh axes."""
