"""Computes routed experts as a plan says."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from shardplan.experts.block import compute_routed_mlp, replace_routed_mlp
from shardplan.hardware import parse_slice
from shardplan.plan.plan import Plan


@contextmanager
def planned_experts(plan: Plan) -> Iterator[None]:
    """Compute every block of routed experts by the method of a plan."""
    hardware = parse_slice(plan.hardware.slice)
    generation = None if hardware.is_cpu else hardware.generation
    with replace_routed_mlp(partial(compute_routed_mlp, method=plan.experts, generation=generation)):
        yield
