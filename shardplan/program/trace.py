"""Logical axes carried through a jaxpr: what a traced program does, with a name on every dimension that has one.

A jaxpr knows sizes only. Here every value has, for each dimension, the logical axes that it consists of, major to
minor: merging heads makes one dimension of two axes, and taking it apart gives them back. Names come in with the
arguments and go through the program primitive by primitive; where two operands meet, the one that has a name passes it
on. Nothing is known of any architecture. What cannot be named is reported, and counts as whole.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend import core as jex
from jax.interpreters import partial_eval

from shardplan.program.named_arrays import Array, Dim, best, named_after, names_of, shape_of, size_of
from shardplan.program.primitives import RULES, Names, is_one, width

SIMPLIFIED = {
    "while": "loops whose length depends on data, of which one trip is counted",
    "cond": "choices between branches, of which the last is counted",
    "pallas_call": "kernels, of which only what goes in and comes out is counted",
}
"""Primitives of which the jaxpr does not say what they will do -> what is taken for it."""


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
    batched: Dim = ()
    """Of a contraction: the axes that number products, of which each is done by itself."""
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
    resized: frozenset[str]
    """Logical axes of which slices are taken."""
    simplified: Counter[str]
    """What stands for something that only running tells (see `SIMPLIFIED`) -> how often."""


def trace_jaxpr(jaxpr: jex.ClosedJaxpr, arguments: Sequence[tuple[tuple[str | None, ...], str | None]]) -> Trace:
    """The operations of `jaxpr`.

    Args:
        arguments: for each argument the names of its dimensions, and the path of the parameter that it is, if any.
    """
    # Haliax and the tracing of gradients leave much that nothing uses
    used, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True)
    tracer = _Tracer()
    inputs = [
        tracer.new(
            Array(tuple(((name, size),) for name, size in zip(names, v.aval.shape, strict=True)), width(v), path)
        )
        for v, (names, path) in zip(used.invars, arguments, strict=True)
    ]
    operations: list[Operation] = []
    results = tracer.run(used, [*map(tracer.constant, used.constvars)], inputs, operations, "")
    return Trace(
        tuple(tracer.arrays),
        tuple(operations),
        tuple(inputs),
        tuple(results),
        tracer.names.merged,
        tracer.names.unnamed,
        frozenset(tracer.names.resized),
        tracer.simplified,
    )


class _Tracer:
    """Goes through a jaxpr, and gives a number to every value."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.names = Names()
        self.views: dict[int, tuple[int, Sequence[int]]] = {}
        """What is broadcast or transposed -> of which value, and where its dimensions are."""
        self.simplified: Counter[str] = Counter()

    def new(self, array: Array) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def constant(self, atom: Any) -> int:
        """A value that comes from nowhere: its dimensions have no names."""
        return self.new(Array(tuple(((None, size),) for size in atom.aval.shape), width(atom)))

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
        if name in SIMPLIFIED:
            self.simplified[SIMPLIFIED[name]] += 1
        inner = _inner(equation)
        if inner is not None:
            body, used = inner
            p = equation.params
            if name == "shard_map":
                operands = self.localize(operands, p["in_specs"], out, label)
            results = self.run(body, [], operands[len(operands) - used :], out, label)
            return self.localize(results, p["out_specs"], out, label) if name == "shard_map" else results
        arrays = [self.arrays[operand] for operand in operands]
        if name in ("mul", "div") and is_one(equation.invars[-1]):
            name = "copy"
        kind, named, extra = self.names.apply(name, equation, arrays)
        results = [self.new(array) for array in named]
        if name not in RULES and len(named) == 1:
            self.name_operands(operands, named[0])
        if name == "broadcast_in_dim":
            self.views[results[0]] = operands[0], equation.params["broadcast_dimensions"]
        elif name == "transpose":
            self.views[results[0]] = operands[0], np.argsort(equation.params["permutation"]).tolist()
        out.append(Operation(kind, tuple(operands), tuple(results), label, name, **extra))
        return results

    def localize(self, values: list[int], specs: Sequence[Any], out: list[Operation], label: str) -> list[int]:
        """Values where a shard_map begins or ends: what its specs do not name is whole on every device."""
        results = []
        for value, spec in zip(values, specs, strict=True):
            array = self.arrays[value]
            local = replace(array, dims=names_of(spec, shape_of(array)))
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
            named = [named_after(start, self.arrays[end]) for start, end in zip(starts, ends, strict=False)]
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

    def name_operands(self, operands: Sequence[int], result: Array) -> None:
        """What was made without names, as masks and tables of angles are, is named after what it is used with."""
        for operand in operands:
            if shape_of(self.arrays[operand]) == shape_of(result):
                self.name(operand, result.dims)

    def name(self, value: int, dims: Sequence[Dim]) -> None:
        """Names for a value, and what it is a view of, where they have none."""
        array = self.arrays[value]
        self.arrays[value] = replace(array, dims=tuple(map(best, zip(array.dims, dims, strict=True))))
        if value in self.views:
            source, places = self.views[value]
            pairs = zip(self.arrays[source].dims, places, strict=True)
            self.name(source, [dims[place] if size_of(dims[place]) == size_of(dim) else dim for dim, place in pairs])


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
