"""Rules for blocks of routed experts, which `shardplan.program.marked.marked_experts` marks."""

from dataclasses import replace
from typing import Any

from shardplan.program.named_arrays import TracedArray
from shardplan.program.naming.axis_naming import AxisNaming, RuleResult, itemsize_of
from shardplan.program.operations import OperationKind


def experts(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """A block of experts; its result has the axes of its tokens."""
    del naming
    result = TracedArray(arrays[0].dims, itemsize_of(equation.outvars[0]))
    return OperationKind.EXPERTS, [result], {"experts": equation.params["kind"]}


def experts_gradient(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """The gradient of a block of experts; each result has the axes of the operand that it is the gradient of."""
    del naming
    _, x, _, *others = arrays
    results = [
        replace(array, weight=None, itemsize=itemsize_of(v))
        for array, v in zip((x, *others), equation.outvars, strict=True)
    ]
    return OperationKind.EXPERTS, results, {"experts": equation.params["kind"]}
