"""A parameter of a Plan: its axes, its sharding, and its bytes."""

from dataclasses import dataclass

from shardplan.plan.displayed import Displayed

Spec = list[list[str] | None]
"""Mesh axes of each dimension of an array; None for a dimension that is not sharded."""


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is sharded."""

    path: str
    """Path in the model, such as transformer.layers.stacked.mlp.up_proj.weight."""
    axes: dict[str, int]
    """Logical axis of each dimension -> size."""
    dtype: str
    """`workload.param_dtype`, or float32 if the model keeps the parameter so, as for the router of experts."""
    spec: Spec
    """Mesh axes of each dimension; None for a dimension that is not sharded."""
    bytes_per_device: int


@dataclass(frozen=True)
class Tiles(Displayed):
    """The tiles of a parameter on the devices of a slice."""

    parameter: ParameterPlan
    slice: str
    mesh: dict[str, int]
    """Mesh axis -> size, major to minor."""
