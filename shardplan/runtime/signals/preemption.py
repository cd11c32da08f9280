"""Whether a process of the run is to be preempted, as JAX knows it."""

import itertools

from shardplan.runtime.private_jax import reached_preemption_sync_point

_sync_points = itertools.count()


def is_preempted() -> bool:
    """Return whether JAX has received SIGTERM in any process, which announces its preemption.

    All processes must call this equally often, and get the same answer. Where a command handles SIGTERM by itself, JAX
    does not receive it.
    """
    return reached_preemption_sync_point(next(_sync_points))
