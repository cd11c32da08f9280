"""Judges whether a run is as fast as its plan predicts, and explains where its time goes if not. Pure."""

from shardplan.config.sections import GateConfig
from shardplan.monitoring.goodput import Attempt
from shardplan.plan.plan import Plan

WARM_UP_STEPS = 10
"""Number of steps before a run is judged."""
TPU_FACTOR = 0.3
"""Least measured / planned rate on TPUs; plans for CPUs predict an order, not times."""


def least_ratio(config: GateConfig, is_cpu: bool) -> float | None:
    """Return the lowest accepted ratio of a run's rate to its plan's; None if the rate is not checked."""
    if config.factor is not None:
        return config.factor or None
    return None if is_cpu else TPU_FACTOR


def describe_slowness(step_seconds: float, plan: Plan, least: float, attempt: Attempt) -> str | None:
    """Explain why a run is too slow; None if it is fast enough.

    Args:
        step_seconds: mean time of a step.
        least: lowest accepted ratio of the run's rate to the plan's rate.
        attempt: the time of the run so far.
    """
    ratio = plan.cost.step_seconds / step_seconds
    if ratio >= least:
        return None
    tokens = plan.workload.batch * plan.workload.position
    return (
        f"{tokens / step_seconds:,.0f} tokens/s is {ratio:.2g} of the {tokens / plan.cost.step_seconds:,.0f} that the "
        f"plan predicts, below gate.factor {least:g}; in {attempt.steps:.1f} s of steps the host waited "
        f"{attempt.blocked:.1f} s for the devices, and these {attempt.waiting:.1f} s for inputs; its own work took "
        f"{attempt.host:.1f} s, and stalls {attempt.stalled:.1f} s; compiling took {attempt.compiling:.1f} s before"
    )
