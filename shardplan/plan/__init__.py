"""The Plan and its parts: mappings, pins, workload, mesh axes. Imports no JAX; search/ makes plans."""

from shardplan.plan.plan import Plan

__all__ = ["Plan"]
