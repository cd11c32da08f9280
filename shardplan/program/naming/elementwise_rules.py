"""Rules for primitives that compute elements from elements, or change the shape of an array."""

from dataclasses import replace
from typing import Any

from shardplan.program.named_arrays import (
    Dim,
    TracedArray,
    adopt_names,
    most_named,
    reshape_factors,
    size_of,
)
from shardplan.program.naming.axis_naming import AxisNaming, RuleResult, itemsize_of, unnamed_dims
from shardplan.program.operations import OperationKind


def elementwise(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of results like the axes of operands of equal rank; without such operands, results are unnamed."""
    for v in equation.outvars:
        rank = len(v.aval.shape)
        if rank and arrays and not any(len(array.dims) == rank for array in arrays):
            naming.unnamed[equation.primitive.name] += 1
    return source(naming, equation, arrays)


def source(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name each dimension of a result like the same dimension of an operand with equal rank and equal size there.

    If operands differ, the one with the most names counts. Primitives that make arrays, such as `iota`, have this rule,
    because their results need no names.
    """
    results = []
    for v in equation.outvars:
        unnamed = unnamed_dims(v)
        alike = [array for array in arrays if len(array.dims) == len(unnamed)]
        dims = []
        for i, dim in enumerate(unnamed):
            fitting = [array.dims[i] for array in alike if size_of(array.dims[i]) == size_of(dim)]
            dims.append(most_named(fitting or [dim]))
        # with a scalar, such as a scale, a parameter stays this parameter; with an array it is a value of its own
        weights = {array.weight for array in arrays if array.elements > 1}
        weight = weights.pop() if len(weights) == 1 else None
        results.append(TracedArray(tuple(dims), itemsize_of(v), weight))
    return OperationKind.ELEMENTWISE, results, {}


def resize(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Keep the axis names of dimensions whose size does not change; in a shard_map, keep all names."""
    results = []
    for v in equation.outvars:
        dims = unnamed_dims(v)
        for array in arrays:
            if len(array.dims) != len(dims):
                continue
            pairs = list(zip(dims, array.dims, strict=True))
            dims = tuple(
                most_named((new, old)) if size_of(new) == size_of(old) else _resized_dim(naming, new, old)
                for new, old in pairs
            )
            if naming.is_local:
                continue
            for new, old in pairs:
                if size_of(new) != size_of(old):
                    naming.resized_axes.update(name for name, _ in old if isinstance(name, str))
        results.append(TracedArray(dims, itemsize_of(v)))
    return OperationKind.ELEMENTWISE, results, {}


def update_slice(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of an array into which a slice is written; in a shard_map, the slice's names fill gaps."""
    kind, results, extra = elementwise(naming, equation, arrays)
    if naming.is_local:
        pairs = zip(results[0].dims, arrays[1].dims, strict=True)
        update = replace(arrays[1], dims=tuple(_resized_dim(naming, new, old) for new, old in pairs))
        results = [adopt_names(results[0], update.dims)]
    return kind, results, extra


def broadcast(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of a broadcast array; its new dimensions get no names."""
    v = equation.outvars[0]
    dims = list(unnamed_dims(v))
    for dim, i in zip(arrays[0].dims, equation.params["broadcast_dimensions"], strict=True):
        if size_of(dim) == size_of(dims[i]):
            dims[i] = dim
    return OperationKind.ELEMENTWISE, [TracedArray(tuple(dims), itemsize_of(v), arrays[0].weight)], {}


def transpose(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Reorder the dimensions of an array with their names."""
    array = arrays[0]
    dims = tuple(array.dims[i] for i in equation.params["permutation"])
    return OperationKind.ELEMENTWISE, [replace(array, dims=dims)], {}


def reshape(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Divide the logical axes of an array among the dimensions of its new shape."""
    v = equation.outvars[0]
    dims = reshape_factors(arrays[0].factors, v.aval.shape, naming.merged_axes)
    if dims is None:
        naming.unnamed["reshape"] += 1
        dims = unnamed_dims(v)
    return OperationKind.ELEMENTWISE, [replace(arrays[0], dims=dims)], {}


def reduce(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of a reduction's results: the operand's axes without the reduced ones."""
    reduced = equation.params["axes"]
    results = []
    for array, v in zip(arrays, equation.outvars, strict=False):
        dims = tuple(dim for i, dim in enumerate(array.dims) if i not in reduced)
        results.append(TracedArray(dims, itemsize_of(v)))
    return OperationKind.ELEMENTWISE, results, {}


def top_k(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of the k largest elements; the dimension along which they are selected loses its name."""
    axis = equation.params["axis"]
    results = []
    for v in equation.outvars:
        dims = list(arrays[0].dims)
        dims[axis] = ((None, v.aval.shape[axis]),)
        results.append(TracedArray(tuple(dims), itemsize_of(v)))
    return OperationKind.SELECTION, results, {"contracted": arrays[0].dims[axis]}


def _resized_dim(naming: AxisNaming, new: Dim, old: Dim) -> Dim:
    """Return `new`, the dimension of a slice or padding of `old`; inside a shard_map, with the name of `old`."""
    return ((old[0][0], size_of(new)),) if naming.is_local and len(old) == 1 else new
