"""Rules for matmuls, grouped matmuls and convolutions: which logical axes they sum over."""

from typing import Any

from shardplan.program.named_arrays import TracedArray, mark_repeated_axes, size_of
from shardplan.program.naming.axis_naming import AxisNaming, RuleResult, itemsize_of, join_factors, unnamed_dims
from shardplan.program.operations import OperationKind


def dot(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of a matmul's result; dot products of vectors, and matmuls without contraction, are elementwise."""
    (contract_l, contract_r), (batch_l, batch_r) = equation.params["dimension_numbers"]
    left, right = arrays
    contracted = [naming.unify(left.dims[i], right.dims[j]) for i, j in zip(contract_l, contract_r, strict=True)]
    batched = [naming.unify(left.dims[i], right.dims[j]) for i, j in zip(batch_l, batch_r, strict=True)]
    kept_l = [dim for i, dim in enumerate(left.dims) if i not in (*contract_l, *batch_l)]
    kept_r = [dim for i, dim in enumerate(right.dims) if i not in (*contract_r, *batch_r)]
    dims = [*batched, *kept_l, *kept_r]
    result = TracedArray(mark_repeated_axes(dims), itemsize_of(equation.outvars[0]))
    # compilers turn a dot product of vectors into a multiplication and a sum
    if not contracted or all(len(array.dims) == len(contract_l) + len(batch_l) for array in arrays):
        return OperationKind.ELEMENTWISE, [result], {}
    axes = {"contracted": join_factors(contracted), "batched": join_factors(batched)}
    return OperationKind.CONTRACTION, [result], axes


def ragged_dot(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of a grouped matmul (each group of rows times its own matrix), or of one of its gradients."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    left, right = arrays[:2]
    grouped = numbers.rhs_group_dimensions
    contracted = [naming.unify(left.dims[i], right.dims[j]) for i, j in zip(contract_l, contract_r, strict=True)]
    kept_l = [dim for i, dim in enumerate(left.dims) if i not in (*contract_l, *batch_l)]
    kept_r = [dim for i, dim in enumerate(right.dims) if i not in (*contract_r, *batch_r, *grouped)]
    groups = int(arrays[2].elements)
    v = equation.outvars[0]
    dims = [*kept_l, *kept_r]
    if len(dims) < len(v.aval.shape):  # the rows are contracted, so that the result has a matrix for every group
        experts = next((dim for dim in naming.expert_dims if size_of(dim) == groups), ((None, groups),))
        dims = [experts, *dims]
    else:
        naming.expert_dims += [right.dims[i] for i in grouped]
    result = TracedArray(mark_repeated_axes(dims), itemsize_of(v))
    return OperationKind.CONTRACTION, [result], {"contracted": join_factors(contracted), "groups": groups}


def convolve(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of a convolution's result; it counts as a matmul, or as elementwise if channels are separate.

    The convolution sums over the window and the channels of the second operand. Groups of channels (or of rows, in the
    gradient) are independent matmuls. If a mesh axis shards positions along which the window moves, the halo exchange
    is not counted; other axes along which the window moves are never sharded.
    """
    p, v = equation.params, equation.outvars[0]
    numbers, (left, right) = p["dimension_numbers"], arrays
    batch, channel, *space = numbers.lhs_spec
    out, summed, *window = numbers.rhs_spec
    out_batch, out_channel, *out_space = numbers.out_spec
    groups = p["feature_group_count"] * p["batch_group_count"]
    dims = list(unnamed_dims(v))
    sources = {out_batch: left.dims[batch], out_channel: right.dims[out]}
    sources |= {o: left.dims[i] for i, o in zip(space, out_space, strict=True)}
    for index, dim in sources.items():
        dims[index] = dim if size_of(dim) == size_of(dims[index]) else dims[index]
    for i, j in zip(space, window, strict=True):
        if size_of(right.dims[j]) not in (1, size_of(left.dims[i])):
            naming.resized_axes.update(name for name, _ in left.dims[i] if isinstance(name, str))
    result = TracedArray(mark_repeated_axes(dims), itemsize_of(v))
    if 1 < groups == size_of(right.dims[out]):
        return OperationKind.ELEMENTWISE, [result], {}
    channels = naming.unify(left.dims[channel], right.dims[summed]) if groups == 1 else right.dims[summed]
    contracted = [channels, *(right.dims[j] for j in window)]
    batched = () if groups == 1 else ((None, groups),)
    return OperationKind.CONTRACTION, [result], {"contracted": join_factors(contracted), "batched": batched}
