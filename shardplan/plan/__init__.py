"""The Plan and what it is made of: mappings, pins, workload, mesh axes. Imports no JAX; search/ makes plans."""

from shardplan.plan.plan import Plan

__all__ = ["Plan"]
