"""The planner. `Plan` says what was found; `shardplan.search.make_plan.make_plan` finds it (and imports JAX)."""

from shardplan.plan.plan import Plan

__all__ = ["Plan"]
