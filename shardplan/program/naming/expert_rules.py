"""Rules for blocks of routed experts, which `shardplan.program.marked.marked_experts` marks."""

from dataclasses import replace
from typing import Any

from shardplan.program.named_arrays import TracedArray
from shardplan.program.naming.axis_naming import AxisNaming, RuleResult, itemsize_of
from shardplan.program.operations import OperationKind


def experts(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of the result of a block of experts, which are the axes of its tokens."""
    del naming
    result = TracedArray(arrays[0].dims, itemsize_of(equation.outvars[0]))
    return OperationKind.EXPERTS, [result], {"experts": equation.params["kind"]}


def experts_gradient(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of the gradients of a block of experts, each like its operand."""
    del naming
    _, x, _, *others = arrays
    results = [
        replace(array, weight=None, itemsize=itemsize_of(v))
        for array, v in zip((x, *others), equation.outvars, strict=True)
    ]
    return OperationKind.EXPERTS, results, {"experts": equation.params["kind"]}
