"""Rules for lookups in tables, and for sums into the rows of a table."""

from typing import Any

from shardplan.program.named_arrays import TracedArray, mark_repeated_axes, most_named, size_of
from shardplan.program.naming.axis_naming import AxisNaming, RuleResult, itemsize_of, unnamed_dims
from shardplan.program.operations import OperationKind


def gather(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of a lookup's result: axes of the indices, and axes of the table that are not indexed."""
    table, indices = arrays
    numbers, v = equation.params["dimension_numbers"], equation.outvars[0]
    indexed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    columns = []
    for i, (dim, n) in enumerate(zip(table.dims, equation.params["slice_sizes"], strict=True)):
        if i not in indexed:
            columns.append(dim if size_of(dim) == n else ((None, n),))
    rows = list(indices.dims[:-1])
    if indices.elements == size_of(indices.dims[-1]):  # a single index, which takes a slice
        for i in indexed:
            naming.resized_axes.update(name for name, _ in table.dims[i] if isinstance(name, str))
    dims = []
    for i, dim in enumerate(unnamed_dims(v)):
        remaining = columns if i in numbers.offset_dims else rows
        dims.append(remaining.pop(0) if remaining else dim)
    return OperationKind.LOOKUP, [TracedArray(mark_repeated_axes(dims), itemsize_of(v))], {}


def scatter_add(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of a sum into rows of a table: columns like the summands, rows like the table."""
    numbers, table, updates = equation.params["dimension_numbers"], arrays[0], arrays[2]
    indexed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    columns = [i for i in range(len(table.dims)) if i not in indexed]
    dims = list(table.dims)
    for i, window in zip(columns, numbers.update_window_dims, strict=True):
        if size_of(dims[i]) == size_of(updates.dims[window]):
            dims[i] = most_named((dims[i], updates.dims[window]))
    return OperationKind.SCATTER_ADD, [TracedArray(tuple(dims), itemsize_of(equation.outvars[0]))], {}
