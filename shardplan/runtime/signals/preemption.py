"""Tells whether a process of the run will be preempted, according to JAX."""

import itertools

from shardplan.runtime.private_jax import reached_preemption_sync_point

_sync_points = itertools.count()


def is_preempted() -> bool:
    """Return whether JAX has received SIGTERM, which announces a preemption, in any process.

    All processes must call this the same number of times, and get the same answer. If a command handles SIGTERM itself,
    JAX does not receive the signal.
    """
    return reached_preemption_sync_point(next(_sync_points))
