"""The rule for copies between the memories of a device and of its host."""

from dataclasses import replace
from typing import Any

import jax

from shardplan.program.named_arrays import TracedArray
from shardplan.program.naming.axis_naming import AxisNaming, RuleResult
from shardplan.program.operations import OperationKind


def copy_between_memories(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Copy arrays to the memory that the equation requests; if all are there already, the copy is a view."""
    results = []
    for array, variable in zip(arrays, equation.outvars, strict=True):
        results.append(replace(array, is_on_host=variable.aval.memory_space == jax.memory.Space.Host))
    kind = OperationKind.ELEMENTWISE if results == arrays else OperationKind.HOST_COPY
    return kind, results, {}
