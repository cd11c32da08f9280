"""What primitives of JAX do to the names of dimensions: one rule each."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend import core as jex

from shardplan.config import MESH_AXES
from shardplan.program.named_arrays import (
    SECOND,
    Array,
    Dim,
    best,
    constrained,
    distinct,
    regroup,
    shape_of,
    size_of,
)

RESIZING = {"slice", "dynamic_slice", "concatenate", "pad", "split", "top_k", "all_gather", "all_to_all"}
"""Primitives that leave the dimensions whose size stays."""
NEW_NAMES = {
    "iota",
    "random_bits",
    "random_seed",
    "random_wrap",
    "random_unwrap",
    "axis_index",
    "empty",
    "create_token",
}
"""Primitives whose results have no operands to be named after."""


@dataclass
class Names:
    """What is known of names so far, and the rules, which are methods: equation and operands to a `Named`."""

    merged: dict[str, Dim] = field(default_factory=dict)
    """Logical axis -> the axes that it is made of elsewhere in the program."""
    unnamed: Counter[str] = field(default_factory=Counter)
    """Primitives whose results could not be named -> how many of them."""
    tables: dict[tuple[int, ...], tuple[Dim, ...]] = field(default_factory=dict)
    """Shape -> dimensions of what has been looked up in: the gradient of a lookup adds to zeros of that shape."""
    experts: list[Dim] = field(default_factory=list)
    """Dimensions that number the matrices of grouped products."""
    resized: set[str] = field(default_factory=set)
    """Logical axes of which parts are taken: where they are cut, parts that meet would have to be moved."""

    def apply(self, primitive: str, equation: Any, arrays: list[Array]) -> "Named":
        """The results of one equation."""
        return RULES.get(primitive, Names.elementwise)(self, equation, arrays)

    def elementwise(self, equation: Any, arrays: list[Array]) -> "Named":
        """Results have the dimensions of the operands of their shape; a name that any of them has."""
        name = equation.primitive.name
        results = []
        for v in equation.outvars:
            plain = _plain(v)
            alike = [a for a in arrays if len(a.dims) == len(plain)]
            if not alike and plain and arrays and name not in NEW_NAMES:
                self.unnamed[name] += 1
            dims = tuple(
                best([a.dims[i] for a in alike if size_of(a.dims[i]) == size_of(dim)] or [dim])
                for i, dim in enumerate(plain)
            )
            weights = {a.weight for a in arrays if a.elements > 1}
            weight = weights.pop() if len(weights) == 1 else None
            results.append(Array(dims, width(v), weight))
        return "elementwise", results, {}

    def resize(self, equation: Any, arrays: list[Array]) -> "Named":
        """Dimensions whose size stays keep their names."""
        results = []
        for v in equation.outvars:
            dims = _plain(v)
            for array in arrays:
                if len(array.dims) == len(dims):
                    dims = tuple(
                        best((mine, theirs)) if size_of(mine) == size_of(theirs) else mine
                        for mine, theirs in zip(dims, array.dims, strict=True)
                    )
                    self.resized |= {
                        name
                        for mine, theirs in zip(dims, array.dims, strict=True)
                        for name, _ in theirs
                        if name is not None and size_of(mine) != size_of(theirs)
                    }
            results.append(Array(dims, width(v)))
        return "elementwise", results, {}

    def broadcast(self, equation: Any, arrays: list[Array]) -> "Named":
        v = equation.outvars[0]
        dims = list(_plain(v))
        for dim, place in zip(arrays[0].dims, equation.params["broadcast_dimensions"], strict=True):
            if size_of(dim) == size_of(dims[place]):
                dims[place] = dim
        return "elementwise", [Array(tuple(dims), width(v), arrays[0].weight)], {}

    def transpose(self, equation: Any, arrays: list[Array]) -> "Named":
        array = arrays[0]
        return "elementwise", [replace(array, dims=tuple(array.dims[i] for i in equation.params["permutation"]))], {}

    def reshape(self, equation: Any, arrays: list[Array]) -> "Named":
        v = equation.outvars[0]
        dims = regroup(arrays[0].factors, v.aval.shape, self.merged)
        if dims is None:
            self.unnamed["reshape"] += 1
            dims = _plain(v)
        return "elementwise", [replace(arrays[0], dims=dims)], {}

    def reduce(self, equation: Any, arrays: list[Array]) -> "Named":
        gone = equation.params["axes"]
        results = [
            Array(tuple(dim for i, dim in enumerate(a.dims) if i not in gone), width(v))
            for a, v in zip(arrays, equation.outvars, strict=False)
        ]
        return "elementwise", results, {}

    def dot(self, equation: Any, arrays: list[Array]) -> "Named":
        (contract_l, contract_r), (batch_l, batch_r) = equation.params["dimension_numbers"]
        left, right = arrays
        contracted = [self.meet(left.dims[i], right.dims[j]) for i, j in zip(contract_l, contract_r, strict=True)]
        batched = [self.meet(left.dims[i], right.dims[j]) for i, j in zip(batch_l, batch_r, strict=True)]
        dims = [
            *batched,
            *(dim for i, dim in enumerate(left.dims) if i not in (*contract_l, *batch_l)),
            *(dim for i, dim in enumerate(right.dims) if i not in (*contract_r, *batch_r)),
        ]
        result = Array(distinct(dims), width(equation.outvars[0]))
        # a dot product of vectors is no product of matrices: compilers multiply and add up
        if not contracted or all(len(a.dims) == len(contract_l) + len(batch_l) for a in arrays):
            return "elementwise", [result], {}
        return "contraction", [result], {"contracted": _factors(contracted), "batched": _factors(batched)}

    def ragged_dot(self, equation: Any, arrays: list[Array]) -> "Named":
        """Rows of the first operand by groups, each with a matrix of the second; or its gradients."""
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
        left, right = arrays[:2]
        grouped = numbers.rhs_group_dimensions
        contracted = [self.meet(left.dims[i], right.dims[j]) for i, j in zip(contract_l, contract_r, strict=True)]
        kept_l = [dim for i, dim in enumerate(left.dims) if i not in (*contract_l, *batch_l)]
        kept_r = [dim for i, dim in enumerate(right.dims) if i not in (*contract_r, *batch_r, *grouped)]
        groups = int(arrays[2].elements)
        v = equation.outvars[0]
        dims = [*kept_l, *kept_r]
        if len(dims) < len(v.aval.shape):  # rows are contracted: the result has a matrix for every group
            dims = [next((d for d in self.experts if size_of(d) == groups), ((None, groups),)), *dims]
        else:
            self.experts += [right.dims[i] for i in grouped]
        return "contraction", [Array(distinct(dims), width(v))], {"contracted": _factors(contracted), "groups": groups}

    def gather(self, equation: Any, arrays: list[Array]) -> "Named":
        """A lookup: the dimensions of the indices, and those of the table that come whole."""
        table, indices = arrays
        numbers, v = equation.params["dimension_numbers"], equation.outvars[0]
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        whole = [
            dim if size_of(dim) == n else ((None, n),)
            for i, (dim, n) in enumerate(zip(table.dims, equation.params["slice_sizes"], strict=True))
            if i not in gone
        ]
        rows = list(indices.dims[:-1])
        if indices.elements == size_of(indices.dims[-1]):  # one place, as an index of an array is: a slice
            self.resized |= {name for i in gone for name, _ in table.dims[i] if name is not None}
        dims = [
            (whole if i in numbers.offset_dims else rows).pop(0) if (whole if i in numbers.offset_dims else rows) else d
            for i, d in enumerate(_plain(v))
        ]
        self.tables[shape_of(table)] = table.dims
        return "lookup", [Array(distinct(dims), width(v))], {}

    def scatter_add(self, equation: Any, arrays: list[Array]) -> "Named":
        v = equation.outvars[0]
        dims = self.tables.get(v.aval.shape, _plain(v))
        return "update", [Array(tuple(map(best, zip(arrays[0].dims, dims, strict=True))), width(v))], {}

    def constrain(self, equation: Any, arrays: list[Array]) -> "Named":
        """The program is traced on a mesh that has an axis for every logical axis: a sharding says the names."""
        return "elementwise", [constrained(arrays[0], equation.params["sharding"].spec)], {}

    def sum_devices(self, equation: Any, arrays: list[Array]) -> "Named":
        """In a shard_map: a sum over all devices, if over any; the mesh that is traced on has more axes than those."""
        kind = "sum" if any(axis in MESH_AXES for axis in equation.params.get("axes", ())) else "elementwise"
        return kind, [replace(a, itemsize=width(v)) for a, v in zip(arrays, equation.outvars, strict=True)], {}

    def meet(self, left: Dim, right: Dim) -> Dim:
        """One dimension of two operands; where its names differ, which axis consists of which others is remembered."""
        names = [name for name, _ in (*left, *right)]
        if left == right or any(name is None or name.endswith(SECOND) for name in names):
            return best((left, right))
        for whole, parts in ((right, left), (left, right)):
            if len(whole) == 1 and not any(name in self.merged for name, _ in parts):
                self.merged.setdefault(str(whole[0][0]), parts)
                return whole
        return left


Named = tuple[str, list[Array], dict[str, Any]]
"""Kind of the operation, its results, and what else there is to say of it."""

RULES: dict[str, Callable[[Names, Any, list[Array]], Named]] = {
    "broadcast_in_dim": Names.broadcast,
    "transpose": Names.transpose,
    "reshape": Names.reshape,
    "squeeze": Names.reshape,
    "expand_dims": Names.reshape,
    "dot_general": Names.dot,
    "ragged_dot_general": Names.ragged_dot,
    "gather": Names.gather,
    "scatter-add": Names.scatter_add,
    "psum": Names.sum_devices,
    "psum_invariant": Names.sum_devices,
    "sharding_constraint": Names.constrain,
    **dict.fromkeys(RESIZING, Names.resize),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"),
        Names.reduce,
    ),
}


def is_one(atom: Any) -> bool:
    return isinstance(atom, jex.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 1)


def width(atom: Any) -> int:
    return np.dtype(atom.aval.dtype).itemsize if hasattr(atom.aval, "dtype") else 0


def _factors(dims: Sequence[Dim]) -> Dim:
    return tuple(factor for dim in dims for factor in dim)


def _plain(atom: Any) -> tuple[Dim, ...]:
    """Dimensions without names."""
    return tuple(((None, size),) for size in atom.aval.shape)
