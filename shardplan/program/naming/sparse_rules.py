"""Rules for calls of Native Sparse Attention, which `shardplan.program.marked.marked_sparse` marks."""

from dataclasses import replace
from typing import Any

from shardplan.program.marked.marked_sparse import VALUES
from shardplan.program.named_arrays import TracedArray, shape_of
from shardplan.program.naming.axis_naming import AxisNaming, RuleResult, itemsize_of, unnamed_dims
from shardplan.program.operations import OperationKind


def sparse_attention(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name a call's results: the sum has the queries' axes and the values' channels, the blocks have the keys' axes."""
    del naming
    (mixed, blocks), queries, values = equation.outvars, arrays[0], arrays[VALUES]
    results = [
        TracedArray((*queries.dims[:-1], values.dims[-1]), itemsize_of(mixed)),
        TracedArray((*values.dims[:-1], *unnamed_dims(blocks)[-1:]), itemsize_of(blocks)),
    ]
    return OperationKind.SPARSE_ATTENTION, results, {"sparse": equation.params["kind"]}


def sparse_gradient(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of a call's gradients, each like its operand."""
    del naming
    results = [
        replace(array, weight=None, itemsize=itemsize_of(v))
        for array, v in zip(arrays[1:-1], equation.outvars, strict=True)
    ]
    assert [shape_of(each) for each in results] == [v.aval.shape for v in equation.outvars]
    return OperationKind.SPARSE_ATTENTION, results, {"sparse": equation.params["kind"]}
