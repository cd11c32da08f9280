"""Routed experts computed as a plan says."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from shardplan.experts.block import compute_routed_mlp, replace_routed_mlp
from shardplan.plan.plan import Plan


@contextmanager
def planned_experts(plan: Plan) -> Iterator[None]:
    """Let every block of routed experts run by the method of a plan."""
    with replace_routed_mlp(partial(compute_routed_mlp, method=plan.experts)):
        yield
