"""Tells whether a process of the run will be preempted, according to JAX."""

import itertools

from shardplan.runtime.private_jax import reached_preemption_sync_point

_sync_points = itertools.count()


def is_preempted() -> bool:
    """Return whether JAX has received SIGTERM, which announces a preemption, in any process.

    All processes must call this equally often, and get the same answer. Where a command handles SIGTERM by itself, JAX
    does not receive it.
    """
    return reached_preemption_sync_point(next(_sync_points))
