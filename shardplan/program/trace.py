"""Traces a jaxpr into operations on arrays whose dimensions have logical axes.

A jaxpr knows sizes only. Here every dimension of every value has the logical axes that it consists of, major to minor:
flattening heads makes one dimension of two axes, and splitting the dimension restores them. Names enter with the
arguments and propagate primitive by primitive; where two operands meet, the unnamed one takes the names of the other.
Nothing depends on an architecture. A value that cannot be named is reported, and counts as replicated.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core as jex
from jax.interpreters import partial_eval
from jax.lax import GatherScatterMode

from shardplan.program.marked.marked_conversions import CONVERSION
from shardplan.program.named_arrays import Dim, TracedArray, adopt_names, dims_of_spec, shape_of, size_of
from shardplan.program.naming.axis_naming import AxisNaming, itemsize_of
from shardplan.program.naming.primitives import (
    find_primitive,
    has_result_of_operands_shape,
    is_one,
    moved_axes,
    name_results,
)
from shardplan.program.operations import Operation, OperationKind
from shardplan.runtime.private_jax import scan_counts

EXCHANGES = (
    "slices, sorts and scans along batch or positions, of which the exchange along a sharded axis is not counted"
)
"""Note in plans of programs that move elements of activations along batch or positions."""


class ArrayClass(StrEnum):
    """The kinds of arguments of a program."""

    PARAMETER = "parameter"
    STATE = "state"
    """Arrays stored from one step to the next, such as an optimizer's moments, parameters excluded."""
    INPUT = "input"
    """Data that comes with every step, such as tokens."""


class Argument(NamedTuple):
    """An argument of the program to trace."""

    axes: tuple[str | None, ...]
    """Logical axis of each dimension; None for a dimension without one."""
    path: str | None = None
    """Path of the array in the model or the state; None for an input."""
    array_class: ArrayClass = ArrayClass.INPUT

    @classmethod
    def parameter(cls, axes: tuple[str | None, ...], path: str) -> "Argument":
        """Return the argument for a parameter."""
        return cls(axes, path, ArrayClass.PARAMETER)


@dataclass(frozen=True)
class Trace:
    """The operations of a traced program, and its values with their logical axes."""

    arrays: tuple[TracedArray, ...]
    """The values, which operations refer to by index."""
    operations: tuple[Operation, ...]
    arguments: tuple[int, ...]
    """Indices of the program's arguments among the values."""
    argument_classes: tuple[ArrayClass, ...]
    """Class of each argument."""
    results: tuple[int, ...]
    """Indices of the program's results among the values."""
    updates: tuple[int, ...]
    """Indices of the results that are written over arguments, such as updated parameters."""
    merged_axes: dict[str, Dim]
    """Logical axis -> axes into which other parts of the program split it (heads: kv_head x q_heads_per_group)."""
    unnamed: Counter[str]
    """Primitive -> number of its results that could not be named."""
    unpriced: Counter[str]
    """Primitive without counted FLOPs, bytes and collectives -> number of occurrences."""
    resized_axes: frozenset[str]
    """Logical axes along which slices are taken."""
    input_axes: tuple[str, ...]
    """The logical axes of the program's inputs, which are tokens: batch and positions."""
    approximations: Counter[str]
    """Text of `Primitive.approximation`, or `EXCHANGES` -> number of occurrences."""

    def arguments_of(self, array_class: ArrayClass) -> tuple[TracedArray, ...]:
        """Return the traced arrays of the arguments of one `ArrayClass`."""
        pairs = zip(self.arguments, self.argument_classes, strict=True)
        return tuple(self.arrays[index] for index, each in pairs if each is array_class)


def trace_jaxpr(jaxpr: jex.ClosedJaxpr, arguments: Sequence[Argument], is_update: bool = False) -> Trace:
    """Trace `jaxpr` into named operations.

    Args:
        arguments: the arguments of the jaxpr.
        is_update: whether the program writes its results over its arguments.
    """
    # Haliax and the tracing of gradients leave many results unused
    used, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True)
    input_axes: dict[str, None] = {}
    for argument in arguments:
        if argument.array_class is ArrayClass.INPUT:
            input_axes.update((name, None) for name in argument.axes if name is not None)
    tracer = _Tracer(frozenset(input_axes))
    inputs = []
    for variable, argument in zip(used.invars, arguments, strict=True):
        dims = tuple(((name, size),) for name, size in zip(argument.axes, variable.aval.shape, strict=True))
        weight = argument.path if argument.array_class is ArrayClass.PARAMETER else None
        inputs.append(tracer.add_value(TracedArray(dims, itemsize_of(variable), weight)))
    operations: list[Operation] = []
    results = tracer.run(used, inputs, operations, "")
    return Trace(
        tuple(tracer.arrays),
        tuple(operations),
        tuple(inputs),
        tuple(argument.array_class for argument in arguments),
        tuple(results),
        tuple(results) if is_update else (),
        tracer.naming.merged_axes,
        tracer.naming.unnamed,
        tracer.naming.unpriced,
        frozenset(tracer.naming.resized_axes),
        tuple(input_axes),
        tracer.approximations,
    )


class _Tracer:
    """Walks through a jaxpr, gives every value an index, and names its dimensions."""

    def __init__(self, input_axes: frozenset[str]) -> None:
        """Start with the logical axes of the program's inputs, which are tokens: batch and positions."""
        self.input_axes = input_axes
        self.arrays: list[TracedArray] = []
        self.naming = AxisNaming()
        self.views: dict[int, tuple[int, Sequence[int]]] = {}
        """Broadcast or transposed value -> its source, and for each dimension of the source its place in the view."""
        self.tables: list[tuple[int, tuple[Dim, ...]]] = []
        """Indices of each lookup, and the dimensions of its table."""
        self.summed = set[int]()
        """Results of collectives; every device has all of such a result, whatever it is added to."""
        self.approximations: Counter[str] = Counter()

    def add_value(self, array: TracedArray) -> int:
        """Add a value, and return its index."""
        self.arrays.append(replace(array, is_local=True) if self.naming.is_local else array)
        return len(self.arrays) - 1

    def add_unnamed(self, atom: Any) -> int:
        """Add a value whose dimensions have no names."""
        return self.add_value(TracedArray(tuple(((None, size),) for size in atom.aval.shape), itemsize_of(atom)))

    def run(self, jaxpr: Any, inputs: Sequence[int], out: list[Operation], scope: str) -> list[int]:
        """Append the operations of `jaxpr` to `out`, and return the indices of its results."""
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {constant: self.add_unnamed(constant) for constant in jaxpr.constvars}

        def read(atom: Any) -> int:
            return self.add_unnamed(atom) if isinstance(atom, jex.Literal) else values[atom]

        for equation in jaxpr.eqns:
            label = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
            operands = [read(atom) for atom in equation.invars]
            results = self.trace_equation(equation, operands, out, label)
            values |= zip(equation.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def trace_equation(self, equation: Any, operands: list[int], out: list[Operation], label: str) -> list[int]:
        """Append the operations of one equation to `out`, and return the indices of its results."""
        name = equation.primitive.name
        if name == "scan":
            return self.trace_scan(equation, operands, out, label)
        if name == CONVERSION:
            return [self.trace_conversion(equation, operands[0], out, label)]
        primitive = find_primitive(name)
        if primitive.approximation is not None and not _is_choice_of_platform(equation):
            self.approximations[primitive.approximation] += 1
        called = _called_jaxpr(equation)
        if called is not None:
            body, operand_count = called
            if name == "shard_map":
                return self.trace_shard_map(equation, body, operands, out, label)
            return self.run(body, operands[len(operands) - operand_count :], out, label)
        arrays = [self.arrays[operand] for operand in operands]
        if primitive.is_scaling and is_one(equation.invars[-1]):
            name = "copy"  # XLA removes the operation
        moved = () if self.naming.is_local else moved_axes(equation, arrays)
        if any(axis in self.input_axes and not self.input_axes.issuperset(each.logical_axes) for axis, each in moved):
            self.approximations[EXCHANGES] += 1
        kind, named, extra = name_results(self.naming, name, equation, arrays)
        if kind == OperationKind.LOOKUP:
            self.tables.append((operands[1], arrays[0].dims))
        elif kind == OperationKind.SCATTER_ADD:
            named = [self.name_rows(named[0], operands[1])]
        results = [self.add_value(array) for array in named]
        if has_result_of_operands_shape(name) and len(named) == 1:
            self.name_operands(operands, named[0])
        if primitive.result_dimensions is not None:
            self.views[results[0]] = operands[0], primitive.result_dimensions(equation.params)
        elif kind == OperationKind.COLLECTIVE:
            self.summed.update(results)
            for result in results:  # what devices have summed is no longer one device's own
                self.arrays[result] = replace(self.arrays[result], is_local=False)
        out.append(
            Operation(kind, tuple(operands), tuple(results), label, name, is_local=self.naming.is_local, **extra)
        )
        if equation.params.get("mode") == GatherScatterMode.FILL_OR_DROP and kind == OperationKind.LOOKUP:
            # a second pass over the rows puts the fill value in place of rows out of bounds
            filled = self.add_value(named[0])
            out.append(Operation(OperationKind.ELEMENTWISE, tuple(results), (filled,), label, "select_n"))
            return [filled]
        return results

    def trace_shard_map(
        self, equation: Any, body: Any, operands: list[int], out: list[Operation], label: str
    ) -> list[int]:
        """Append a shard_map: the changes of sharding at its start and end, and the operations of one device.

        The operations of one device are marked as local if they include matmuls. Grouped matmuls are not marked,
        because they have rules of their own for parameters and sums (`shardplan.cost.gspmd`).
        """
        p = equation.params
        inputs = self.reshard(operands, p["in_specs"], out, label)
        if not _has_primitive(body, "dot_general") or _has_primitive(body, "ragged_dot_general"):
            return self.reshard(self.run(body, inputs, out, label), p["out_specs"], out, label)
        inputs = [self.gather_parameter(value, out, label) for value in inputs]
        is_outer = not self.naming.is_local
        self.naming.is_local = True
        results = self.run(body, inputs, out, label)
        self.naming.is_local = not is_outer
        results = self.reshard(results, p["out_specs"], out, label)
        return [self.leave_device(value, out, label) for value in results] if is_outer else results

    def trace_conversion(self, equation: Any, codes: int, out: list[Operation], label: str) -> int:
        """Append the conversion of a kept weight, and return its result, which each device computes separately."""
        numbers = replace(self.arrays[codes], itemsize=itemsize_of(equation.outvars[0]), weight=None, is_local=True)
        result = self.add_value(numbers)
        out.append(Operation(OperationKind.CONVERSION, (codes,), (result,), label, CONVERSION))
        return result

    def gather_parameter(self, value: int, out: list[Operation], label: str) -> int:
        """Append the gather of a parameter at the start of a shard_map, and return each device's copy."""
        array = self.arrays[value]
        if array.weight is None:
            return value
        local = self.add_value(replace(array, weight=None, is_local=True))
        out.append(Operation(OperationKind.RESHARD, (value,), (local,), label))
        return local

    def leave_device(self, value: int, out: list[Operation], label: str) -> int:
        """Append a view through which a device's result becomes a value of the program outside of the shard_map."""
        if not self.arrays[value].is_local:
            return value
        result = self.add_value(replace(self.arrays[value], is_local=False))
        out.append(Operation(OperationKind.ELEMENTWISE, (value,), (result,), label, "copy"))
        return result

    def reshard(self, values: list[int], specs: Sequence[Any], out: list[Operation], label: str) -> list[int]:
        """Reshard values to the specs of a shard_map; dimensions without a mesh axis in the spec become replicated.

        A dimension with several mesh axes belongs to a value that JAX keeps for the gradients, which stays as it is.
        """
        results = []
        for value, spec in zip(values, specs, strict=True):
            array = self.arrays[value]
            if any(isinstance(entry, tuple) for entry in spec):
                results.append(value)
                continue
            local = replace(array, dims=dims_of_spec(spec, shape_of(array)))
            if local == array:
                results.append(value)
                continue
            results.append(self.add_value(local))
            out.append(Operation(OperationKind.RESHARD, (value,), (results[-1],), label))
        return results

    def trace_scan(self, equation: Any, operands: list[int], out: list[Operation], label: str) -> list[int]:
        """Append a loop; its body is traced repeatedly, until the names of the carry do not change any more."""
        p = equation.params
        body = p["jaxpr"]
        n_constants, n_carry = scan_counts(p)
        constants, carry, stacks = np.split(np.array(operands, int), [n_constants, n_constants + n_carry])
        axis = next(
            (self.arrays[s].dims[0] for s in stacks if self.arrays[s].dims[0][0][0] is not None), ((None, p["length"]),)
        )
        starts = [self.arrays[value] for value in carry]
        counted = Counter(self.naming.unnamed), Counter(self.naming.unpriced), Counter(self.approximations)
        n_tables = len(self.tables)
        while True:
            # what a trace of the body reports counts once, however often the body is traced
            self.naming.unnamed, self.naming.unpriced, self.approximations = map(Counter, counted)
            del self.tables[n_tables:]
            inside: list[Operation] = []
            begin = [self.add_value(array) for array in starts]
            slices = [self.add_value(replace(self.arrays[s], dims=self.arrays[s].dims[1:])) for s in stacks]
            ends = self.run(body.jaxpr, [*constants, *begin, *slices], inside, label)
            named = [adopt_names(start, self.arrays[end].dims) for start, end in zip(starts, ends, strict=False)]
            if named == starts:
                break
            starts = named
        after = [self.add_value(array) for array in starts]
        written = [
            self.add_value(replace(self.arrays[end], dims=(axis, *self.arrays[end].dims))) for end in ends[n_carry:]
        ]
        out.append(
            Operation(
                OperationKind.LOOP,
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

    def name_rows(self, sums: TracedArray, indices: int) -> TracedArray:
        """Name the rows of a lookup's gradient by its table, because the zeros that it is added to have no names.

        The lookup is found by its array of indices. If the indices were recomputed, the table is found by its shape and
        columns, if only one table fits.
        """
        fitting = [each for each in self.tables if _may_be_equal(each[1], sums.dims)]
        tables = {dims for lookup, dims in fitting if lookup == indices} or {dims for _, dims in fitting}
        if len(tables) > 1:
            self.naming.unnamed["scatter-add"] += 1
        return adopt_names(sums, tables.pop()) if len(tables) == 1 else sums

    def name_operands(self, operands: Sequence[int], result: TracedArray) -> None:
        """Name operands that have the result's shape, because masks and tables of angles are made without names."""
        for operand in operands:
            if shape_of(self.arrays[operand]) == shape_of(result):
                self.name(operand, result.dims)

    def name(self, value: int, dims: Sequence[Dim]) -> None:
        """Name the unnamed dimensions of a value, and of the values that it is a view of.

        Unnamed dimensions of a collective's result stay unnamed, because every device has the result in full.
        """
        if value in self.summed:
            return
        self.arrays[value] = adopt_names(self.arrays[value], dims)
        if value in self.views:
            source, places = self.views[value]
            pairs = zip(self.arrays[source].dims, places, strict=True)
            self.name(source, [dims[place] if size_of(dims[place]) == size_of(dim) else dim for dim, place in pairs])


def _may_be_equal(one: Sequence[Dim], other: Sequence[Dim]) -> bool:
    """Return whether dimensions have equal sizes, and equal axes where both axes are known."""
    return len(one) == len(other) and all(
        size_of(a) == size_of(b) and (a == b or any(name is None for name, _ in (*a, *b)))
        for a, b in zip(one, other, strict=True)
    )


def _called_jaxpr(equation: Any) -> tuple[Any, int] | None:
    """Return the jaxpr that an equation calls once, and how many of its last operands it passes; None for no call.

    A jaxpr among the parameters is called if it takes the operands as they are; the jaxpr of a `reduce` takes scalars.
    """
    p = equation.params
    # where data decide, one trip and one branch count: `Primitive.approximation` says so
    if equation.primitive.name == "while":
        return p["body_jaxpr"].jaxpr, len(p["body_jaxpr"].jaxpr.invars)
    if equation.primitive.name == "cond":
        branch = _branch_of_tpu(p["branches_platforms"]) if _is_choice_of_platform(equation) else -1
        return p["branches"][branch].jaxpr, len(equation.invars) - 1
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in p and equation.primitive.name != "pallas_call":
            body = getattr(p[key], "jaxpr", p[key])
            if equation.primitive.name == "shard_map" or _shapes(body.invars) == _shapes(equation.invars):
                return body, len(equation.invars)
    return None


def _is_choice_of_platform(equation: Any) -> bool:
    """Return whether an equation chooses between branches for different kinds of devices."""
    return equation.params.get("branches_platforms") is not None


def _branch_of_tpu(platforms: Sequence[Sequence[str] | None]) -> int:
    """Return the index of the branch that TPUs run: the one for TPUs, or else the default."""
    named = [i for i, names in enumerate(platforms) if names is not None and "tpu" in names]
    return named[0] if named else [names is None for names in platforms].index(True)


def _has_primitive(jaxpr: Any, name: str) -> bool:
    """Return whether a jaxpr, or one that it calls, has an equation of the primitive `name`."""
    return any(
        equation.primitive.name == name
        or any(_has_primitive(called, name) for called in jex.jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )


def _shapes(atoms: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """Return the shapes of atoms; None for an atom that is not an array, such as a reference."""
    return [getattr(atom.aval, "shape", None) for atom in atoms]
