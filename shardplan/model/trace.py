"""Logical axes carried through a jaxpr: what a traced program does, with a name on every dimension that has one.

A jaxpr knows sizes only. Here every value has, for each dimension, the logical axes that it consists of, major to
minor: merging heads makes one dimension of two axes, and taking it apart gives them back. Names come in with the
arguments and go through the program primitive by primitive; where two operands meet, the one that has a name passes it
on. Nothing is known of any architecture. What cannot be named is reported, and counts as whole.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jax.extend import core as jex
from jax.interpreters import partial_eval

Factor = tuple[str | None, int]
"""A logical axis, or None where the name is not known, and its size."""
Dim = tuple[Factor, ...]
"""One dimension of an array: the axes that are merged into it, major to minor."""

MESH_AXES = ("replica", "data", "model")
"""Axes that the traced mesh has beside one for every logical axis: Levanter looks for them in places."""
SECOND = "'"
"""Ends the name of an axis that an array has twice, as scores have query and key positions."""
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


@dataclass(frozen=True)
class Array:
    """A value of the program."""

    dims: tuple[Dim, ...]
    itemsize: int
    """Bytes per element."""
    weight: str | None = None
    """Path of the parameter that it is, or is a cast, a scaled copy or a slice of."""

    @cached_property
    def factors(self) -> Dim:
        """The axes of all dimensions, in order."""
        return tuple(factor for dim in self.dims for factor in dim)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The names among `factors`."""
        return tuple(name for name, _ in self.factors if name is not None)

    @cached_property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(size for _, size in self.factors)


@dataclass(frozen=True)
class Operation:
    """Something that the program does. Values are numbers, which `Trace.arrays` describes."""

    kind: str
    """`contraction`, `lookup` (gather), `update` (scatter), `elementwise` (with all that fuses), `reshard` (in or out
    of a shard_map), `sum` (over devices), or `loop`."""
    operands: tuple[int, ...]
    results: tuple[int, ...]
    label: str
    """Named scopes of the traced program that it is in."""
    primitive: str = ""
    """JAX's name of it; empty for a loop or a reshard."""
    contracted: Dim = ()
    """Of a contraction: the axes that are summed over."""
    groups: int = 1
    """Of a contraction: matrices of the second operand, of which each row of the first meets one (ragged_dot)."""
    body: tuple["Operation", ...] = ()
    """Of a loop."""
    trips: int = 1
    """Of a loop."""
    slices: tuple[tuple[int, int], ...] = ()
    """Of a loop: pairs of a stacked value outside and its slice of one trip inside; read, or written where the stacked
    value is one of the results."""
    carried: tuple[tuple[int, int, int, int], ...] = ()
    """Of a loop: (before, in the body at its start, in the body at its end, after)."""


@dataclass(frozen=True)
class Trace:
    """A traced program."""

    arrays: tuple[Array, ...]
    operations: tuple[Operation, ...]
    arguments: tuple[int, ...]
    """The program's arguments."""
    results: tuple[int, ...]
    merged: dict[str, Dim]
    """Logical axis -> the axes that it is made of elsewhere in the program (heads of kv_head x q_heads_per_group)."""
    unnamed: Counter[str]
    """Primitives whose results could not be named -> how many of them."""

    def walk(self) -> Iterator[tuple[Operation, int]]:
        """Every operation that is no loop, in order, with the number of times it happens."""
        yield from _walk(self.operations, 1)


def _walk(operations: Sequence[Operation], times: int) -> Iterator[tuple[Operation, int]]:
    for operation in operations:
        if operation.kind == "loop":
            yield from _walk(operation.body, times * operation.trips)
        else:
            yield operation, times


def trace_jaxpr(jaxpr: jex.ClosedJaxpr, arguments: Sequence[tuple[tuple[str | None, ...], str | None]]) -> Trace:
    """The operations of `jaxpr`.

    Args:
        arguments: for each argument the names of its dimensions, and the path of the parameter that it is, if any.
    """
    # Haliax and the tracing of gradients leave much that nothing uses
    used, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True)
    namer = _Namer()
    inputs = [
        namer.new(
            Array(tuple(((name, size),) for name, size in zip(names, v.aval.shape, strict=True)), _width(v), path)
        )
        for v, (names, path) in zip(used.invars, arguments, strict=True)
    ]
    operations: list[Operation] = []
    results = namer.run(used, [*map(namer.constant, used.constvars)], inputs, operations, "")
    return Trace(tuple(namer.arrays), tuple(operations), tuple(inputs), tuple(results), namer.merged, namer.unnamed)


@dataclass
class _Namer:
    """Goes through a jaxpr, and gives a number to every value."""

    arrays: list[Array] = field(default_factory=list)
    merged: dict[str, Dim] = field(default_factory=dict)
    unnamed: Counter[str] = field(default_factory=Counter)
    tables: dict[tuple[int, ...], tuple[Dim, ...]] = field(default_factory=dict)
    """Shape -> dimensions of what has been looked up in: the gradient of a lookup adds to zeros of that shape."""

    def new(self, array: Array) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def constant(self, atom: Any) -> int:
        """A value that comes from nowhere: its dimensions have no names."""
        return self.new(Array(tuple(((None, size),) for size in atom.aval.shape), _width(atom)))

    def run(
        self, jaxpr: Any, constants: Sequence[int], inputs: Sequence[int], out: list[Operation], scope: str
    ) -> list[int]:
        """The operations of `jaxpr`, appended to `out`; returns its results."""
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

        def read(atom: Any) -> int:
            return self.constant(atom) if isinstance(atom, jex.Literal) else values[atom]

        for equation in jaxpr.eqns:
            label = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
            operands = [read(atom) for atom in equation.invars]
            results = self.equation(equation, operands, out, label)
            values |= zip(equation.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[int], out: list[Operation], label: str) -> list[int]:
        """What one equation does."""
        name = equation.primitive.name
        if name == "scan":
            return self.scan(equation, operands, out, label)
        inner = _inner(equation)
        if inner is not None:
            body, used = inner
            p = equation.params
            if name == "shard_map":
                operands = self.localize(operands, p["in_specs"], out, label)
            results = self.run(body, [], operands[len(operands) - used :], out, label)
            return self.localize(results, p["out_specs"], out, label) if name == "shard_map" else results
        arrays = [self.arrays[operand] for operand in operands]
        if name in ("mul", "div") and _is_one(equation.invars[-1]):
            name = "copy"
        rule = RULES.get(name, _Namer.elementwise)
        kind, named, extra = rule(self, equation, arrays)
        results = [self.new(array) for array in named]
        if rule is _Namer.elementwise and len(named) == 1:
            self.name_operands(operands, named[0])
        out.append(Operation(kind, tuple(operands), tuple(results), label, name, **extra))
        return results

    def localize(self, values: list[int], specs: Sequence[Any], out: list[Operation], label: str) -> list[int]:
        """Values where a shard_map begins or ends: what its specs do not name is whole on every device."""
        results = []
        for value, spec in zip(values, specs, strict=True):
            array = self.arrays[value]
            local = replace(array, dims=_names_of(spec, _shape(array)))
            if local == array:
                results.append(value)
                continue
            results.append(self.new(local))
            out.append(Operation("reshard", (value,), (results[-1],), label))
        return results

    def scan(self, equation: Any, operands: list[int], out: list[Operation], label: str) -> list[int]:
        """A loop; its body is gone through until the names of what it carries are known."""
        p = equation.params
        body, n_constants, n_carry = p["jaxpr"], p["num_consts"], p["num_carry"]
        constants, carry, stacks = np.split(np.array(operands, int), [n_constants, n_constants + n_carry])
        axis = next((self.arrays[s].dims[0] for s in stacks if self.arrays[s].dims[0][0][0]), ((None, p["length"]),))
        starts = [self.arrays[value] for value in carry]
        while True:
            inside: list[Operation] = []
            begin = [self.new(array) for array in starts]
            slices = [self.new(replace(self.arrays[s], dims=self.arrays[s].dims[1:])) for s in stacks]
            ends = self.run(
                body.jaxpr, [*map(self.constant, body.jaxpr.constvars)], [*constants, *begin, *slices], inside, label
            )
            named = [_named_after(start, self.arrays[end]) for start, end in zip(starts, ends, strict=False)]
            if named == starts:
                break
            starts = named
        after = [self.new(array) for array in starts]
        written = [
            self.new(replace(self.arrays[end], dims=(axis, *self.arrays[end].dims), weight=None))
            for end in ends[n_carry:]
        ]
        out.append(
            Operation(
                "loop",
                tuple(operands),
                (*after, *written),
                label,
                body=tuple(inside),
                trips=p["length"],
                slices=(*zip(map(int, stacks), slices, strict=True), *zip(written, ends[n_carry:], strict=True)),
                carried=tuple(zip(map(int, carry), begin, ends[:n_carry], after, strict=True)),
            )
        )
        return [*after, *written]

    def elementwise(self, equation: Any, arrays: list[Array]) -> "_Named":
        """Results have the dimensions of the operands of their shape; a name that any of them has."""
        name = equation.primitive.name
        results = []
        for v in equation.outvars:
            plain = _plain(v)
            alike = [a for a in arrays if len(a.dims) == len(plain)]
            if not alike and plain and arrays and name not in NEW_NAMES:
                self.unnamed[name] += 1
            dims = tuple(
                _best([a.dims[i] for a in alike if _size(a.dims[i]) == _size(dim)] or [dim])
                for i, dim in enumerate(plain)
            )
            weights = {a.weight for a in arrays if a.elements > 1}
            weight = weights.pop() if len(weights) == 1 else None
            results.append(Array(dims, _width(v), weight))
        return "elementwise", results, {}

    def name_operands(self, operands: Sequence[int], result: Array) -> None:
        """What was made without names, as masks and tables of angles are, is named after what it is used with."""
        for operand in operands:
            array = self.arrays[operand]
            if _shape(array) == _shape(result):
                self.arrays[operand] = replace(array, dims=tuple(map(_best, zip(array.dims, result.dims, strict=True))))

    def resize(self, equation: Any, arrays: list[Array]) -> "_Named":
        """Dimensions whose size stays keep their names."""
        results = []
        for v in equation.outvars:
            dims = _plain(v)
            for array in arrays:
                if len(array.dims) == len(dims):
                    dims = tuple(
                        _best((mine, theirs)) if _size(mine) == _size(theirs) else mine
                        for mine, theirs in zip(dims, array.dims, strict=True)
                    )
            results.append(Array(dims, _width(v)))
        return "elementwise", results, {}

    def broadcast(self, equation: Any, arrays: list[Array]) -> "_Named":
        v = equation.outvars[0]
        dims = list(_plain(v))
        for dim, place in zip(arrays[0].dims, equation.params["broadcast_dimensions"], strict=True):
            if _size(dim) == _size(dims[place]):
                dims[place] = dim
        return "elementwise", [Array(tuple(dims), _width(v), arrays[0].weight)], {}

    def transpose(self, equation: Any, arrays: list[Array]) -> "_Named":
        array = arrays[0]
        return "elementwise", [replace(array, dims=tuple(array.dims[i] for i in equation.params["permutation"]))], {}

    def reshape(self, equation: Any, arrays: list[Array]) -> "_Named":
        v = equation.outvars[0]
        dims = _regroup(arrays[0].factors, v.aval.shape, self.merged)
        if dims is None:
            self.unnamed["reshape"] += 1
            dims = _plain(v)
        return "elementwise", [replace(arrays[0], dims=dims)], {}

    def reduce(self, equation: Any, arrays: list[Array]) -> "_Named":
        gone = equation.params["axes"]
        results = [
            Array(tuple(dim for i, dim in enumerate(a.dims) if i not in gone), _width(v))
            for a, v in zip(arrays, equation.outvars, strict=False)
        ]
        return "elementwise", results, {}

    def dot(self, equation: Any, arrays: list[Array]) -> "_Named":
        (contract_l, contract_r), (batch_l, batch_r) = equation.params["dimension_numbers"]
        left, right = arrays
        contracted = [self.meet(left.dims[i], right.dims[j]) for i, j in zip(contract_l, contract_r, strict=True)]
        dims = [self.meet(left.dims[i], right.dims[j]) for i, j in zip(batch_l, batch_r, strict=True)]
        dims += [dim for i, dim in enumerate(left.dims) if i not in (*contract_l, *batch_l)]
        dims += [dim for i, dim in enumerate(right.dims) if i not in (*contract_r, *batch_r)]
        result = Array(_distinct(dims), _width(equation.outvars[0]))
        # without rows on both sides it is no product of matrices: compilers multiply and add up
        is_product = contracted and all(len(a.dims) > len(contract_l) + len(batch_l) for a in arrays)
        extra = {"contracted": tuple(f for dim in contracted for f in dim)} if is_product else {}
        return "contraction" if is_product else "elementwise", [result], extra

    def ragged_dot(self, equation: Any, arrays: list[Array]) -> "_Named":
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
            dims = [next((d for d in self.experts if _size(d) == groups), ((None, groups),)), *dims]
        else:
            self.experts += [right.dims[i] for i in grouped]
        extra = {"contracted": tuple(f for dim in contracted for f in dim), "groups": groups}
        return "contraction", [Array(_distinct(dims), _width(v))], extra

    experts: list[Dim] = field(default_factory=list)
    """Dimensions that number the matrices of grouped products."""

    def gather(self, equation: Any, arrays: list[Array]) -> "_Named":
        """A lookup: the dimensions of the indices, and those of the table that come whole."""
        table, indices = arrays
        numbers, v = equation.params["dimension_numbers"], equation.outvars[0]
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        whole = [
            dim if _size(dim) == n else ((None, n),)
            for i, (dim, n) in enumerate(zip(table.dims, equation.params["slice_sizes"], strict=True))
            if i not in gone
        ]
        rows = list(indices.dims[:-1])
        dims = [
            (whole if i in numbers.offset_dims else rows).pop(0) if (whole if i in numbers.offset_dims else rows) else d
            for i, d in enumerate(_plain(v))
        ]
        self.tables[_shape(table)] = table.dims
        return "lookup", [Array(_distinct(dims), _width(v))], {}

    def scatter_add(self, equation: Any, arrays: list[Array]) -> "_Named":
        v = equation.outvars[0]
        dims = self.tables.get(v.aval.shape, _plain(v))
        return "update", [Array(tuple(map(_best, zip(arrays[0].dims, dims, strict=True))), _width(v))], {}

    def constrain(self, equation: Any, arrays: list[Array]) -> "_Named":
        """The program is traced on a mesh that has an axis for every logical axis: a sharding says the names."""
        return "elementwise", [_constrained(arrays[0], equation.params["sharding"].spec)], {}

    def sum_devices(self, equation: Any, arrays: list[Array]) -> "_Named":
        """In a shard_map: a sum over all devices, if over any; the mesh that is traced on has more axes than those."""
        kind = "sum" if any(axis in MESH_AXES for axis in equation.params.get("axes", ())) else "elementwise"
        return kind, [replace(a, itemsize=_width(v)) for a, v in zip(arrays, equation.outvars, strict=True)], {}

    def meet(self, left: Dim, right: Dim) -> Dim:
        """One dimension of two operands; where its names differ, which axis consists of which others is remembered."""
        names = [name for name, _ in (*left, *right)]
        if left == right or any(name is None or name.endswith(SECOND) for name in names):
            return _best((left, right))
        for whole, parts in ((right, left), (left, right)):
            if len(whole) == 1 and not any(name in self.merged for name, _ in parts):
                self.merged.setdefault(str(whole[0][0]), parts)
                return whole
        return left


_Named = tuple[str, list[Array], dict[str, Any]]
"""Kind of the operation, its results, and what else there is to say of it."""

RULES: dict[str, Callable[[_Namer, Any, list[Array]], _Named]] = {
    "broadcast_in_dim": _Namer.broadcast,
    "transpose": _Namer.transpose,
    "reshape": _Namer.reshape,
    "squeeze": _Namer.reshape,
    "expand_dims": _Namer.reshape,
    "dot_general": _Namer.dot,
    "ragged_dot_general": _Namer.ragged_dot,
    "gather": _Namer.gather,
    "scatter-add": _Namer.scatter_add,
    "psum": _Namer.sum_devices,
    "psum_invariant": _Namer.sum_devices,
    "sharding_constraint": _Namer.constrain,
    **dict.fromkeys(RESIZING, _Namer.resize),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"),
        _Namer.reduce,
    ),
}


def _inner(equation: Any) -> tuple[Any, int] | None:
    """The jaxpr that an equation calls once, and the number of its operands that are the jaxpr's."""
    p = equation.params
    if equation.primitive.name == "while":
        return p["body_jaxpr"].jaxpr, len(p["body_jaxpr"].jaxpr.invars)
    if equation.primitive.name == "cond":
        return p["branches"][-1].jaxpr, len(equation.invars) - 1
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in p and equation.primitive.name != "pallas_call":
            body = getattr(p[key], "jaxpr", p[key])
            return body, len(equation.invars)
    return None


def _names_of(spec: Any, shape: Sequence[int]) -> tuple[Dim, ...]:
    """Dimensions as a PartitionSpec over a mesh of logical axes names them."""
    named = [*spec, *(None,) * (len(shape) - len(spec))]
    return tuple(((entry if isinstance(entry, str) else None, size),) for entry, size in zip(named, shape, strict=True))


def _constrained(array: Array, spec: Any) -> Array:
    return replace(array, dims=tuple(map(_best, zip(array.dims, _names_of(spec, _shape(array)), strict=True))))


def _is_one(atom: Any) -> bool:
    return isinstance(atom, jex.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 1)


def _width(atom: Any) -> int:
    return np.dtype(atom.aval.dtype).itemsize if hasattr(atom.aval, "dtype") else 0


def _shape(array: Array) -> tuple[int, ...]:
    return tuple(_size(dim) for dim in array.dims)


def _size(dim: Dim) -> int:
    return math.prod(size for _, size in dim)


def _plain(atom: Any) -> tuple[Dim, ...]:
    """Dimensions without names."""
    return tuple(((None, size),) for size in atom.aval.shape)


def _best(dims: Sequence[Dim]) -> Dim:
    """The dimension with most names; of equals the first."""
    return max(dims, key=lambda dim: sum(name is not None for name, _ in dim) / len(dim) if dim else 0)


def _named_after(start: Array, end: Array) -> Array:
    return replace(start, dims=tuple(map(_best, zip(start.dims, end.dims, strict=True))))


def _distinct(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """`dims`, where the second of the same name is marked."""
    seen: set[str] = set()
    result = []
    for dim in dims:
        factors = []
        for name, size in dim:
            while name is not None and name in seen:
                name += SECOND
            if name is not None:
                seen.add(name)
            factors.append((name, size))
        result.append(tuple(factors))
    return tuple(result)


def _regroup(factors: Sequence[Factor], shape: Sequence[int], merged: dict[str, Dim]) -> tuple[Dim, ...] | None:
    """`factors` as dimensions of `shape`; None where they do not come out even."""
    left = [(name, size) for name, size in factors if size > 1]
    result: list[Dim] = []
    for size in shape:
        taken: list[Factor] = []
        missing = size
        while missing > 1:
            if not left:
                return None
            name, n = left.pop(0)
            if name in merged and len(merged[name]) == 1:
                name = merged[name][0][0]
            if missing % n == 0:
                taken.append((name, n))
                missing //= n
            elif name in merged:
                left[:0] = merged[name]
            elif n % missing == 0:
                # the major part of an axis is what a mesh axis cuts first
                taken.append((name, missing))
                left.insert(0, (None, n // missing))
                missing = 1
            else:
                return None
        result.append(tuple(taken) or ((None, 1),))
    return tuple(result) if not left else None
