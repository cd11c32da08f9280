"""One rule per JAX primitive for the logical axes of its results. A primitive without one is reported as not priced."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend import core as jex

from shardplan.hardware import CollectiveKind
from shardplan.hardware.mesh_axes import MESH_AXES
from shardplan.program.named_arrays import (
    AxisCopy,
    Dim,
    TracedArray,
    adopt_names,
    dims_of_spec,
    mark_repeated_axes,
    most_named,
    reshape_factors,
    shape_of,
    size_of,
)
from shardplan.program.operations import OperationKind

RESIZING_PRIMITIVES = {"slice", "dynamic_slice", "concatenate", "pad", "split"}
"""Primitives that change the size of some dimensions and keep the names of all others."""
SOURCE_PRIMITIVES = {
    "iota", "random_bits", "random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_split",
    "axis_index", "empty", "empty2", "create_token", "platform_index", "rng_bit_generator", "threefry2x32",
}  # fmt: skip
"""Primitives whose results have no operand to take names from."""
ELEMENTWISE_PRIMITIVES = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type",
    "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge",
    "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic",
    "lt", "lt_to", "max", "min", "mul", "mulhi", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "polygamma",
    "population_count", "pow", "real", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh",
    "xor",
}  # fmt: skip
"""Primitives that compute each element of the result from the elements at the same place."""
VIEW_LIKE_PRIMITIVES = {
    "copy", "copy_p", "name", "optimization_barrier", "pvary", "reduce_precision", "reshard", "stop_gradient", "tie",
}  # fmt: skip
"""Primitives whose results are their operands, as far as the step's work is concerned."""
ORDERING_PRIMITIVES = {
    "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "rev", "scatter", "sort",
}  # fmt: skip
"""Primitives that read and write arrays of their operands' shape, which is all that is counted of them."""

DIMENSIONS_OF_ORDER = {
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), "axis"),
    "rev": "dimensions",
    "sort": "dimension",
}
"""Primitive that orders or accumulates elements -> its parameter that says along which dimensions."""
COLLECTIVE_PRIMITIVES = {
    "psum": CollectiveKind.ALL_REDUCE,
    "psum_invariant": CollectiveKind.ALL_REDUCE,
    "pmax": CollectiveKind.ALL_REDUCE,
    "pmin": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "all_gather_invariant": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "ppermute": CollectiveKind.COLLECTIVE_PERMUTE,
}
"""Collective of a shard_map -> the kind of collective that it is compiled to."""


@dataclass
class AxisNaming:
    """The rules, as methods from an equation and its operands to a `RuleResult`, and what they learn about axes."""

    merged_axes: dict[str, Dim] = field(default_factory=dict)
    """Logical axis -> the axes that it is split into elsewhere in the program."""
    unnamed: Counter[str] = field(default_factory=Counter)
    """Primitive -> number of its results that no rule could name."""
    expert_dims: list[Dim] = field(default_factory=list)
    """Dimensions that number the matrices of grouped matmuls."""
    unpriced: Counter[str] = field(default_factory=Counter)
    """Primitive without a rule -> how often it occurs."""
    resized_axes: set[str] = field(default_factory=set)
    """Logical axes of which slices are taken: if they were sharded, their elements would have to move."""
    is_local: bool = False
    """Whether each device computes by itself, in a `shard_map`: it takes slices of its own part of an array."""

    def apply(self, primitive: str, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """The results of one equation; of a primitive without a rule as if it were elementwise."""
        if primitive not in RULES:
            self.unpriced[primitive] += 1
        return RULES.get(primitive, AxisNaming.elementwise)(self, equation, arrays)

    def elementwise(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """Give results the best names of the operands of equal rank, dimension by dimension where sizes agree."""
        primitive = equation.primitive.name
        results = []
        for v in equation.outvars:
            unnamed = _unnamed_dims(v)
            alike = [a for a in arrays if len(a.dims) == len(unnamed)]
            if not alike and unnamed and arrays and primitive not in SOURCE_PRIMITIVES:
                self.unnamed[primitive] += 1
            dims = tuple(
                most_named([a.dims[i] for a in alike if size_of(a.dims[i]) == size_of(dim)] or [dim])
                for i, dim in enumerate(unnamed)
            )
            weights = {a.weight for a in arrays if a.elements > 1}
            weight = weights.pop() if len(weights) == 1 else None
            results.append(TracedArray(dims, itemsize_of(v), weight))
        return OperationKind.ELEMENTWISE, results, {}

    def resize(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """Keep the names of the dimensions whose size does not change; in a shard_map those of all dimensions."""
        results = []
        for v in equation.outvars:
            dims = _unnamed_dims(v)
            for array in arrays:
                if len(array.dims) == len(dims):
                    dims = tuple(
                        most_named((new, old)) if size_of(new) == size_of(old) else self._resized(new, old)
                        for new, old in zip(dims, array.dims, strict=True)
                    )
                    if self.is_local:
                        continue
                    self.resized_axes |= {
                        name
                        for new, old in zip(dims, array.dims, strict=True)
                        for name, _ in old
                        if isinstance(name, str) and size_of(new) != size_of(old)
                    }
            results.append(TracedArray(dims, itemsize_of(v)))
        return OperationKind.ELEMENTWISE, results, {}

    def _resized(self, new: Dim, old: Dim) -> Dim:
        """A dimension `new` that is a slice of `old`, or `old` with padding: it keeps a name in a shard_map alone."""
        return ((old[0][0], size_of(new)),) if self.is_local and len(old) == 1 else new

    def update_slice(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """Write a slice into an array, whose unnamed dimensions get the names of the slice's in a shard_map."""
        kind, results, extra = self.elementwise(equation, arrays)
        if self.is_local:
            update = replace(arrays[1], dims=tuple(map(self._resized, results[0].dims, arrays[1].dims)))
            results = [adopt_names(results[0], update.dims)]
        return kind, results, extra

    def broadcast(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        v = equation.outvars[0]
        dims = list(_unnamed_dims(v))
        for dim, i in zip(arrays[0].dims, equation.params["broadcast_dimensions"], strict=True):
            if size_of(dim) == size_of(dims[i]):
                dims[i] = dim
        return OperationKind.ELEMENTWISE, [TracedArray(tuple(dims), itemsize_of(v), arrays[0].weight)], {}

    def transpose(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        array = arrays[0]
        dims = tuple(array.dims[i] for i in equation.params["permutation"])
        return OperationKind.ELEMENTWISE, [replace(array, dims=dims)], {}

    def reshape(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        v = equation.outvars[0]
        dims = reshape_factors(arrays[0].factors, v.aval.shape, self.merged_axes)
        if dims is None:
            self.unnamed["reshape"] += 1
            dims = _unnamed_dims(v)
        return OperationKind.ELEMENTWISE, [replace(arrays[0], dims=dims)], {}

    def reduce(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        reduced = equation.params["axes"]
        results = [
            TracedArray(tuple(dim for i, dim in enumerate(a.dims) if i not in reduced), itemsize_of(v))
            for a, v in zip(arrays, equation.outvars, strict=False)
        ]
        return OperationKind.ELEMENTWISE, results, {}

    def top_k(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """The largest elements along a dimension: every device can find those of its own part, of which few are left.

        The few that devices exchange afterwards are not counted.
        """
        dims = arrays[0].dims[:-1]
        results = [TracedArray((*dims, ((None, v.aval.shape[-1]),)), itemsize_of(v)) for v in equation.outvars]
        return OperationKind.ELEMENTWISE, results, {}

    def dot(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """A matmul; elementwise if nothing is contracted, or if both operands are vectors, batch dimensions aside."""
        (contract_l, contract_r), (batch_l, batch_r) = equation.params["dimension_numbers"]
        left, right = arrays
        contracted = [self.unify(left.dims[i], right.dims[j]) for i, j in zip(contract_l, contract_r, strict=True)]
        batched = [self.unify(left.dims[i], right.dims[j]) for i, j in zip(batch_l, batch_r, strict=True)]
        dims = [
            *batched,
            *(dim for i, dim in enumerate(left.dims) if i not in (*contract_l, *batch_l)),
            *(dim for i, dim in enumerate(right.dims) if i not in (*contract_r, *batch_r)),
        ]
        result = TracedArray(mark_repeated_axes(dims), itemsize_of(equation.outvars[0]))
        # compilers turn a dot product of vectors into a multiplication and a sum
        if not contracted or all(len(a.dims) == len(contract_l) + len(batch_l) for a in arrays):
            return OperationKind.ELEMENTWISE, [result], {}
        axes = {"contracted": _factors(contracted), "batched": _factors(batched)}
        return OperationKind.CONTRACTION, [result], axes

    def convolve(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """A convolution: a matmul of every window of the first operand; elementwise where each channel is by itself.

        It sums over the channels of the second operand and its window. Groups of channels, or of rows in the gradient,
        are independent matmuls. If a mesh axis shards positions along which the window moves, the exchange of
        neighbours is not counted; other axes along which it moves are not sharded.
        """
        p, v = equation.params, equation.outvars[0]
        numbers, (left, right) = p["dimension_numbers"], arrays
        (batch, channel, *space), (out, summed, *window), (out_batch, out_channel, *out_space) = (
            numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec,
        )  # fmt: skip
        groups = p["feature_group_count"] * p["batch_group_count"]
        dims = list(_unnamed_dims(v))
        sources = {out_batch: left.dims[batch], out_channel: right.dims[out]}
        sources |= {o: left.dims[i] for i, o in zip(space, out_space, strict=True)}
        for place, dim in sources.items():
            dims[place] = dim if size_of(dim) == size_of(dims[place]) else dims[place]
        self.resized_axes |= {
            name
            for i, j in zip(space, window, strict=True)
            for name, _ in left.dims[i]
            if isinstance(name, str) and size_of(right.dims[j]) not in (1, size_of(left.dims[i]))
        }
        result = TracedArray(mark_repeated_axes(dims), itemsize_of(v))
        if 1 < groups == size_of(right.dims[out]):
            return OperationKind.ELEMENTWISE, [result], {}
        channels = self.unify(left.dims[channel], right.dims[summed]) if groups == 1 else right.dims[summed]
        contracted = [channels, *(right.dims[j] for j in window)]
        batched = () if groups == 1 else ((None, groups),)
        return OperationKind.CONTRACTION, [result], {"contracted": _factors(contracted), "batched": batched}

    def ragged_dot(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """A grouped matmul, which multiplies each group of rows by its own matrix; or the gradient of one."""
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
        left, right = arrays[:2]
        grouped = numbers.rhs_group_dimensions
        contracted = [self.unify(left.dims[i], right.dims[j]) for i, j in zip(contract_l, contract_r, strict=True)]
        kept_l = [dim for i, dim in enumerate(left.dims) if i not in (*contract_l, *batch_l)]
        kept_r = [dim for i, dim in enumerate(right.dims) if i not in (*contract_r, *batch_r, *grouped)]
        groups = int(arrays[2].elements)
        v = equation.outvars[0]
        dims = [*kept_l, *kept_r]
        if len(dims) < len(v.aval.shape):  # the rows are contracted, so that the result has a matrix for every group
            dims = [next((d for d in self.expert_dims if size_of(d) == groups), ((None, groups),)), *dims]
        else:
            self.expert_dims += [right.dims[i] for i in grouped]
        result = TracedArray(mark_repeated_axes(dims), itemsize_of(v))
        return OperationKind.CONTRACTION, [result], {"contracted": _factors(contracted), "groups": groups}

    def gather(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """A lookup: the result has the dimensions of the indices, and those of the table that are not indexed."""
        table, indices = arrays
        numbers, v = equation.params["dimension_numbers"], equation.outvars[0]
        indexed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        columns = [
            dim if size_of(dim) == n else ((None, n),)
            for i, (dim, n) in enumerate(zip(table.dims, equation.params["slice_sizes"], strict=True))
            if i not in indexed
        ]
        rows = list(indices.dims[:-1])
        if indices.elements == size_of(indices.dims[-1]):  # a single index, which takes a slice
            self.resized_axes |= {name for i in indexed for name, _ in table.dims[i] if isinstance(name, str)}
        dims = []
        for i, dim in enumerate(_unnamed_dims(v)):
            source = columns if i in numbers.offset_dims else rows
            dims.append(source.pop(0) if source else dim)
        return OperationKind.LOOKUP, [TracedArray(mark_repeated_axes(dims), itemsize_of(v))], {}

    def scatter_add(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """A sum into rows of a table; its columns have the names of what is added, its rows those of the table."""
        numbers, table, updates = equation.params["dimension_numbers"], arrays[0], arrays[2]
        indexed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        columns = [i for i in range(len(table.dims)) if i not in indexed]
        dims = list(table.dims)
        for i, window in zip(columns, numbers.update_window_dims, strict=True):
            if size_of(dims[i]) == size_of(updates.dims[window]):
                dims[i] = most_named((dims[i], updates.dims[window]))
        return OperationKind.SCATTER_ADD, [TracedArray(tuple(dims), itemsize_of(equation.outvars[0]))], {}

    def constrain(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """Take names from a sharding: the program is traced on a mesh with one axis for every logical axis."""
        array = arrays[0]
        dims = dims_of_spec(equation.params["sharding"].spec, shape_of(array))
        return OperationKind.ELEMENTWISE, [adopt_names(array, dims)], {}

    def collective(self, equation: Any, arrays: list[TracedArray]) -> "RuleResult":
        """A collective of a shard_map over the mesh axes that it names; none of devices if it names others alone."""
        if all(shape_of(a) == v.aval.shape for a, v in zip(arrays, equation.outvars, strict=True)):
            results = [replace(a, itemsize=itemsize_of(v)) for a, v in zip(arrays, equation.outvars, strict=True)]
        else:
            _, results, _ = self.elementwise(equation, arrays)
        named = equation.params.get("axes", equation.params.get("axis_name", ()))
        mesh_axes = tuple(axis for axis in MESH_AXES if axis in ((named,) if isinstance(named, str) else named))
        if not mesh_axes:
            return OperationKind.ELEMENTWISE, results, {}
        kind = COLLECTIVE_PRIMITIVES[equation.primitive.name]
        return OperationKind.COLLECTIVE, results, {"collective": kind, "mesh_axes": mesh_axes}

    def unify(self, left: Dim, right: Dim) -> Dim:
        """One dimension for two operands; where their axes differ, remember which axis is split into which others."""
        names = [name for name, _ in (*left, *right)]
        if left == right or any(name is None or isinstance(name, AxisCopy) for name in names):
            return most_named((left, right))
        for merged, parts in ((right, left), (left, right)):
            if len(merged) == 1 and not any(name in self.merged_axes for name, _ in parts):
                self.merged_axes.setdefault(str(merged[0][0]), parts)
                return merged
        return left


RuleResult = tuple[OperationKind, list[TracedArray], dict[str, Any]]
"""Kind of the operation, its results, and further fields of `Operation`."""

RULES: dict[str, Callable[[AxisNaming, Any, list[TracedArray]], RuleResult]] = {
    "broadcast_in_dim": AxisNaming.broadcast,
    "transpose": AxisNaming.transpose,
    "reshape": AxisNaming.reshape,
    "squeeze": AxisNaming.reshape,
    "expand_dims": AxisNaming.reshape,
    "top_k": AxisNaming.top_k,
    "dot_general": AxisNaming.dot,
    "ragged_dot_general": AxisNaming.ragged_dot,
    "gather": AxisNaming.gather,
    "scatter-add": AxisNaming.scatter_add,
    "conv_general_dilated": AxisNaming.convolve,
    **dict.fromkeys(COLLECTIVE_PRIMITIVES, AxisNaming.collective),
    "sharding_constraint": AxisNaming.constrain,
    **dict.fromkeys(RESIZING_PRIMITIVES, AxisNaming.resize),
    **dict.fromkeys(
        SOURCE_PRIMITIVES | ELEMENTWISE_PRIMITIVES | VIEW_LIKE_PRIMITIVES | ORDERING_PRIMITIVES, AxisNaming.elementwise
    ),
    "dynamic_update_slice": AxisNaming.update_slice,
    "pallas_call": AxisNaming.elementwise,  # its approximation is reported
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"),
        AxisNaming.reduce,
    ),
}


def moved_axes(equation: Any, arrays: list[TracedArray]) -> Iterator[tuple[str, TracedArray]]:
    """Yield the logical axes along which an equation moves elements, each with the operand that has it.

    Devices that have shards of such an axis exchange elements. A single element, as the last position, does not count.
    """
    name = equation.primitive.name
    for array in arrays:
        dims: Iterable[int] = ()
        if name in DIMENSIONS_OF_ORDER:
            along = equation.params[DIMENSIONS_OF_ORDER[name]]
            dims = (along,) if isinstance(along, int) else along
        elif name in RESIZING_PRIMITIVES and len(array.dims) == len(equation.outvars[0].aval.shape):
            sizes = zip(shape_of(array), equation.outvars[0].aval.shape, strict=True)
            dims = [i for i, (old, new) in enumerate(sizes) if old != new and 1 not in (old, new)]
        for i in dims:
            yield from ((name, array) for name, _ in array.dims[i] if isinstance(name, str))


def is_one(atom: Any) -> bool:
    """Whether an operand of an equation is the scalar constant 1."""
    return isinstance(atom, jex.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 1)


def itemsize_of(atom: Any) -> int:
    """Bytes per element of an operand or result of an equation."""
    return np.dtype(atom.aval.dtype).itemsize if hasattr(atom.aval, "dtype") else 0


def _factors(dims: Sequence[Dim]) -> Dim:
    return tuple(factor for dim in dims for factor in dim)


def _unnamed_dims(atom: Any) -> tuple[Dim, ...]:
    return tuple(((None, size),) for size in atom.aval.shape)
