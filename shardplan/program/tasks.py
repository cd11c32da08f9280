"""What a traced step asks of the devices, whatever the mapping: tasks, and what is in memory at every point."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shardplan.positions.pattern import CAUSAL, Pattern
from shardplan.program.fusion import Fusion, is_scores
from shardplan.program.named_arrays import SECOND, Array, Dim
from shardplan.program.trace import Operation, Trace

GRADIENT, AGAIN = "transpose(", "rematted_computation"
"""What JAX has in the scopes of operations: of the backward pass, and of those that `jax.checkpoint` does again."""


@dataclass(frozen=True)
class Task:
    """One operation on the devices, as often as a step does it."""

    kind: str
    """`contraction`, `attention` (a product with both query and key positions), `lookup`, `update`, `reshard`, `sum`
    (over all devices), or `elementwise`: everything that is fused into one pass over memory."""
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    contracted: Dim
    batched: Dim
    groups: int
    times: int
    fresh: tuple[str, ...]
    """Parameters that nothing before it in its loop has used: what is gathered once serves the whole body."""
    completes: bool
    """Of a contraction: whether partial sums of its result are added up over devices here, rather than after others
    are added to it."""
    stays_cut: bool
    """Of a product by groups: whether only others use its result, which take it as it comes."""
    is_backward: bool
    """Whether it is of the backward pass, and not of the forward pass that is done again there."""
    cause: str

    @cached_property
    def extents(self) -> tuple[tuple[float, Dim], ...]:
        """Of a product of matrices: how many there are, and the sizes of their inner dimension, rows and columns.

        Each with the axes that it is made of.
        """
        (left, right, *_), result = self.operands, self.results[0]
        free = set(result.axes) - {name for name, _ in (*self.batched, *self.contracted)}
        inner, count = math.prod(size for _, size in self.contracted), math.prod(size for _, size in self.batched)
        rows = left.elements / (inner * count)
        columns = result.elements / (rows * count)
        if self.groups > 1 and any(name is None for name, _ in self.contracted):
            # every group takes all rows, with those of others as zeros
            count, columns = self.groups, columns / self.groups
        of_rows, of_columns = (
            tuple(factor for factor in array.factors if factor[0] in free) for array in (left, right)
        )
        return (count, self.batched), (inner, self.contracted), (rows, of_rows), (columns, of_columns)


@dataclass(frozen=True)
class LiveBuffer:
    """Something in memory at a point of the program."""

    role: str
    """`parameter` or `state` (of the optimizer): at rest, at every point.
    `kept`: between operations.
    `gathered`: a parameter, between its first and last use in a loop's body; where it rests in more parts.
    `early`: such a parameter before its first use: at most one loop lies between.
    `whole`: the result of a product that is being made; a gradient is whole before each device keeps its part.
    `wide`: the result of a product by groups that is being made, in float32.
    `summand`: such a result, until it and another are added up; in float32 too.
    `lingering`: rows that experts are chosen for, after their last use and until the gradients of experts are made.
    `sliced`: of such rows what products by groups take, where that is a part of them.
    `looked_up`: tokens that such rows are looked up in, as long.
    `found`: what is being looked up.
    `copied`: a stack of parameters in another layout, in the loop over them and from the loop before on.
    `keys`: of attention, or values, while scores are made or used, and what there is besides where positions are cut.
    `keys_gradient`: such a gradient while it is made, likewise.
    `scores`: of attention, while they are made; a kernel never has them in memory, nor has anything else all of them.
    """
    array: Array
    tables: tuple[Array, ...] = ()
    """Of `found`: what it is looked up in. Of `keys`: the output, where scores are used."""
    stays_cut: bool = False
    """Whether it is rows between products by groups, cut as these leave them."""


ProgramPoint = tuple[LiveBuffer, ...]
"""A point of the program: what is in memory there, and does not rest."""


@dataclass(frozen=True)
class Step:
    """A traced step, prepared for planning."""

    tasks: tuple[Task, ...]
    points: tuple[ProgramPoint, ...]
    merged: dict[str, Dim]
    """Logical axis -> the axes that it is made of elsewhere."""
    unnamed: dict[str, int]
    """Primitives whose results could not be named -> how many."""
    resized: frozenset[str] = frozenset()
    """Logical axes of which slices are taken."""
    simplified: dict[str, int] = field(default_factory=dict)
    """What stands for something that only running tells -> how often."""
    parameters: tuple[Array, ...] = ()
    """As they rest."""
    state: tuple[Array, ...] = ()
    """Of the optimizer."""
    activation_axes: tuple[str, ...] = ()
    """The logical axes that number tokens: batch and position."""
    vocab: str = ""
    """The logical axis of logits."""
    pattern: Pattern = CAUSAL
    """What queries may attend to."""

    @cached_property
    def products(self) -> tuple[tuple[Task, Array], ...]:
        """Products with a parameter, and the parameter."""
        return tuple(
            (task, array)
            for task in self.tasks
            if task.kind == "contraction"
            for array in task.operands
            if array.weight is not None
        )

    @cached_property
    def multiplied(self) -> frozenset[str]:
        """Logical axes of what products take."""
        products = (task for task in self.tasks if task.kind == "contraction")
        return frozenset(name for task in products for array in task.operands for name in array.axes)

    @cached_property
    def routed(self) -> frozenset[str]:
        """Logical axes that a token chooses parameters by: experts."""
        return frozenset(
            name for task, array in self.products if task.groups > 1 for name, size in array.factors
            if name and size == task.groups and name not in task.results[0].axes
        )  # fmt: skip

    @cached_property
    def attention(self) -> tuple["Attention", ...]:
        """The kinds of attention that there are."""
        found = []
        for task in self.tasks:
            if task.kind != "attention" or not is_scores(task.results[0]):
                continue
            scores = task.results[0]
            positions = {name for name in scores.axes if name.endswith(SECOND) or name + SECOND in scores.axes}
            counted = [f for f in scores.factors if f[0] and f[0] not in positions and f[0] not in self.activation_axes]
            heads = tuple(str(name) for name, _ in counted)
            several = [factor for factor in counted if factor[1] > 1]
            sizes = [name for name, _ in task.contracted if name]
            if heads and sizes:
                wholes = [name for name, parts in self.merged.items() if [*parts] == several]
                found.append(Attention(heads, (*wholes, heads[0])[0], sizes[0]))
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Attention:
    """Names of the axes of one kind of attention."""

    heads: tuple[str, ...]
    """Logical axes that number the query heads where scores are made, major to minor; keys have the first."""
    merged: str
    """Logical axis that numbers them where the result is projected: `heads` flattened into one."""
    head_size: str


def sums_queries(contracted: Dim, result: Array) -> bool:
    """Whether a product of attention makes gradients of keys or values: for every position, of all queries."""
    return any(name in result.axes for name, _ in contracted)


def prepare(trace: Trace) -> Step:
    """The tasks and points of `trace`."""
    tasks: list[Task] = []
    # what becomes of the results, as the update of parameters by gradients, is fused with what made them
    fusion = Fusion(trace.operations, trace.arrays, set(trace.results), writes_wanted=False)
    points = _Sequence(fusion, tasks, 1, frozenset(trace.arguments)).run(set(), ())
    return Step(
        tuple(tasks),
        tuple(dict.fromkeys(points)),
        trace.merged,
        dict(trace.unnamed),
        trace.resized,
        dict(trace.simplified),
    )


class _Late(NamedTuple):
    """What stays in memory after its last use."""

    values: Mapping[str, Set[int]]
    """By the role of `LiveBuffer` that it has then."""
    end: int
    """The operation until which it stays."""


class _Sequence:
    """Operations that happen one after the other: the program, or the body of a loop."""

    def __init__(self, fusion: Fusion, tasks: list[Task], times: int, stored: Set[int]) -> None:
        self.fusion, self.arrays, self.tasks, self.times = fusion, fusion.arrays, tasks, times
        self.stored = stored
        """Values that are parameters as they rest."""
        self.used: set[str] = set()
        """Parameters that a product so far has used."""

    def run(self, carried: Set[int], outside: ProgramPoint) -> list[ProgramPoint]:
        """Adds the tasks; returns the points.

        Args:
            carried: values that have their place in memory from the start, until they are last used.
            outside: what enclosing sequences have in memory throughout.
        """
        fusion = self.fusion
        last, weights = self._last_uses(), self._weight_uses()
        late = self._needs_of_gradients()
        alive = set(carried)
        used_up: set[int] = set()
        points: list[ProgramPoint] = []
        for i, operation in enumerate(fusion.operations):
            if not fusion.runs(operation):
                continue
            is_loop = operation.kind == "loop"
            stacks = {result for result in operation.results if is_loop and not is_scores(self.arrays[result])}
            alive |= stacks | {result for result in operation.results if result in fusion.written}
            still = [item for role, values in late.values.items() for item in self._items(role, used_up & values)]
            here = (*outside, *still, *self._gathered(i, weights))
            if is_loop:
                points += self._loop(operation, alive, here)
            else:
                points.append((*here, *self._kept(alive), *self._made(operation), *self._copied_after(i)))
                self.tasks += map(self._task, (*fusion.products_in(operation), operation))
            needed = {value for value in alive if last.get(value, -1) > i or value in fusion.kept}
            used_up = used_up | alive - needed if i < late.end else set()
            alive = needed
        return points

    def _last_uses(self) -> dict[int, int]:
        return {
            source: i
            for i, operation in enumerate(self.fusion.operations)
            if self.fusion.runs(operation)
            for source in self.fusion.reads(operation)
        }

    def _needs_of_gradients(self) -> "_Late":
        """What is in memory until the gradients of experts are made.

        Some compilers make these last, and free none of the rows before; a sum over devices takes the place of what it
        adds up. The others look rows up again, except where products take slices of them.
        """
        operations = self.fusion.operations
        grouped = [operation for operation in operations if operation.groups > 1]
        rows = {self.arrays[operation.operands[0]].elements for operation in grouped}
        if all(self.arrays[operation.results[0]].elements in rows for operation in grouped):
            return _Late({}, -1)
        made = {result for operation in grouped for result in operation.results}
        end = max(i for i, operation in enumerate(operations) if made & set(map(self.fusion.root, operation.operands)))
        summed = {self.fusion.root(o.operands[0]) for o in operations if o.kind == "sum"}
        found = {value for value in self.fusion.written if self.arrays[value].elements in rows}
        taken = {self.fusion.root(operand) for operation in grouped for operand in operation.operands}
        tokens = {self.fusion.root(o.operands[0]) for o in operations if o.kind == "lookup" and o.results[0] in found}
        lingering = found - summed
        return _Late({"lingering": lingering, "sliced": lingering & taken, "looked_up": tokens - found}, end)

    def _weight_uses(self) -> dict[Array, tuple[int, int]]:
        """Parameter -> the first and the last operation that multiplies with it."""
        uses: dict[Array, tuple[int, int]] = {}
        for i, operation in enumerate(self.fusion.operations):
            if not self.fusion.runs(operation):
                continue
            for product in (operation, *self.fusion.products_in(operation)):
                for operand in product.operands if product.kind == "contraction" and product.groups == 1 else ():
                    array = self.arrays[operand]
                    if array.weight is not None:
                        uses[array] = (uses.get(array, (i, i))[0], i)
        return uses

    def _gathered(self, i: int, weights: dict[Array, tuple[int, int]]) -> ProgramPoint:
        """Parameters that are gathered, or may be, while operation `i` is done."""
        used = [weight for weight, (first, last) in weights.items() if first <= i <= last]
        early = [weight for weight, (first, _) in weights.items() if self._may_start(i, first)]
        return (
            *(LiveBuffer("gathered", weight) for weight in used),
            *(LiveBuffer("early", weight) for weight in early),
        )

    def _may_start(self, i: int, first: int) -> bool:
        """Whether a transfer for operation `first` may be under way while operation `i` is done: over one loop."""
        between = [operation for operation in self.fusion.operations[i:first] if operation.kind == "loop"]
        return i < first and len(between) <= 1

    def _loop(self, loop: Operation, alive: Set[int], outside: ProgramPoint) -> list[ProgramPoint]:
        written = {value for stack, value in loop.slices if stack in loop.results}
        ends = written | {end for _, _, end, _ in loop.carried}
        starts = {start for _, start, _, _ in loop.carried if self.arrays[start].dims}
        # what is carried has one place, before the loop, in it and after
        elsewhere = {self.fusion.root(value) for before, _, _, after in loop.carried for value in (before, after)}
        fusion = Fusion(loop.body, self.arrays, ends, writes_wanted=True)
        body = _Sequence(fusion, self.tasks, self.times * loop.trips, frozenset())
        return body.run(starts, (*outside, *self._kept(alive - elsewhere), *self._copied(loop)))

    def _copied_after(self, i: int) -> ProgramPoint:
        """What is copied, or may be, for the next loop after operation `i`."""
        return next(
            (self._copied(operation) for operation in self.fusion.operations[i:] if operation.kind == "loop"), ()
        )

    def _copied(self, loop: Operation) -> ProgramPoint:
        """Parameters that the loop takes slices of as they are stored, and sums over along one dimension."""
        products = [operation for operation in loop.body if operation.kind == "contraction"]
        summed = {
            self.arrays[operand].weight
            for product in products if len(product.contracted) == 1 for operand in product.operands
        }  # fmt: skip
        taken = [stack for stack, _ in loop.slices if self.fusion.root(stack) in self.stored]
        return tuple(LiveBuffer("copied", self.arrays[v]) for v in taken if self.arrays[v].weight in summed - {None})

    def _kept(self, values: Set[int]) -> ProgramPoint:
        summands = {value for value in values if self.fusion.is_summand(value)}
        return (*self._items("kept", values - summands), *self._items("summand", summands))

    def _items(self, role: str, values: Set[int]) -> ProgramPoint:
        return tuple(
            LiveBuffer(role, self.arrays[value], stays_cut=self.fusion.stays_cut(value)) for value in sorted(values)
        )

    def _made(self, operation: Operation) -> ProgramPoint:
        """What there is only while `operation` is done."""
        fusion = self.fusion
        operands, results = self._arrays(operation.operands), self._arrays(operation.results)
        if operation.kind == "lookup":
            return (LiveBuffer("found", results[0], (operands[0],)),)
        if operation.kind != "contraction":
            return ()
        if operation.groups > 1:
            return self._items("wide", {value for value in operation.results if not fusion.is_summand(value)})
        scores = [array for array in (*operands, *results) if is_scores(array)][:1]
        made = {"whole": results, "scores": scores}
        if not scores:
            attended: tuple[LiveBuffer, ...] = ()
        elif sums_queries(operation.contracted, results[0]):
            attended = (LiveBuffer("keys_gradient", results[0]),)
        else:
            keys = [array for array in operands if not is_scores(array)][-1]
            attended = (LiveBuffer("keys", keys, () if is_scores(results[0]) else results),)
        return (*(LiveBuffer(role, array) for role, arrays in made.items() for array in arrays), *attended)

    def _task(self, operation: Operation) -> Task:
        fusion, kind = self.fusion, operation.kind
        if kind == "elementwise":
            inside = {fusion.root(operand) for product in fusion.products_in(operation) for operand in product.operands}
            reads = sorted(value for value in fusion.reads(operation) - inside if self.arrays[value].axes)
            writes = [result for result in operation.results if result in fusion.written]
            operands, results = self._arrays(reads), self._arrays(writes)
        else:
            operands, results = self._arrays(operation.operands), self._arrays(operation.results)
        is_product = kind == "contraction"
        if is_product and any(map(is_scores, (*operands, *results))):
            kind = "attention"
        weights = [array.weight for array in operands if array.weight is not None]
        fresh = tuple(weight for weight in weights if weight not in self.used)
        self.used |= set(weights) if is_product else set()
        completes = not is_product or fusion.is_summed_here(operation.results[0])
        return Task(
            kind=kind,
            operands=operands,
            results=results,
            contracted=operation.contracted,
            batched=operation.batched,
            groups=operation.groups,
            times=self.times,
            fresh=fresh,
            completes=completes,
            stays_cut=operation.groups > 1 and fusion.stays_cut(operation.results[0]),
            is_backward=GRADIENT in operation.label and AGAIN not in operation.label,
            cause=weights[0] if weights else operation.label,
        )

    def _arrays(self, values: Sequence[int]) -> tuple[Array, ...]:
        return tuple(self.arrays[value] for value in values)
