"""Rules for calls of Native Sparse Attention and of `attend_to_blocks`, which are marked as one operation each.

`shardplan.program.marked.marked_sparse` and `shardplan.program.marked.marked_blocks` mark them.
"""

from dataclasses import replace
from typing import Any

from shardplan.program.marked.marked_sparse import VALUES
from shardplan.program.named_arrays import TracedArray, shape_of
from shardplan.program.naming.axis_naming import AxisNaming, RuleResult, itemsize_of, unnamed_dims
from shardplan.program.operations import OperationKind


def sparse_attention(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name a call's results: the sum has axes of queries and channels of values; the blocks have axes of keys."""
    del naming
    (mixed, outputs, blocks), queries, values = equation.outvars, arrays[0], arrays[VALUES]
    *_, branches, _ = unnamed_dims(outputs)
    results = [
        TracedArray((*queries.dims[:-1], values.dims[-1]), itemsize_of(mixed)),
        TracedArray((*queries.dims[:-1], branches, values.dims[-1]), itemsize_of(outputs)),
        TracedArray((*values.dims[:-1], *unnamed_dims(blocks)[-1:]), itemsize_of(blocks)),
    ]
    return OperationKind.SPARSE_ATTENTION, results, {"sparse": equation.params["kind"]}


def sparse_gradient(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of a call's gradients, each like its operand."""
    del naming
    _, *operands, _, _ = arrays
    results = _gradients(equation, operands)
    return OperationKind.SPARSE_ATTENTION, results, {"sparse": equation.params["kind"]}


def block_attention(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the output of attention to given blocks: it has the queries' axes and the values' channels."""
    del naming
    queries, _, values, _ = arrays
    result = TracedArray((*queries.dims[:-1], values.dims[-1]), itemsize_of(equation.outvars[0]))
    return OperationKind.BLOCK_ATTENTION, [result], {"blocks": equation.params["kind"]}


def block_gradient(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the gradients of queries, keys and values, each of which has the axes of its operand."""
    del naming
    _, *operands, _, _ = arrays
    return OperationKind.BLOCK_ATTENTION, _gradients(equation, operands), {"blocks": equation.params["kind"]}


def _gradients(equation: Any, operands: list[TracedArray]) -> list[TracedArray]:
    """Return the results of a gradient, one for each of `operands`."""
    results = [
        replace(array, weight=None, itemsize=itemsize_of(v))
        for array, v in zip(operands, equation.outvars, strict=True)
    ]
    assert [shape_of(each) for each in results] == [v.aval.shape for v in equation.outvars]
    return results
