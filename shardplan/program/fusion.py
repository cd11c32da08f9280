"""What a compiler for TPUs writes to memory of a sequence of operations, and what it does on the way.

The results of products, lookups and updates are written, and of elementwise work what one of these reads. Everything
else is done on the way: an elementwise chain behind a product happens in that product, unless it first needs a sum over
the whole result; and of several products that one chain takes, the last one has it.
"""

from collections import defaultdict
from collections.abc import Sequence, Set
from functools import cache, lru_cache

from shardplan.program.named_arrays import SECOND, Array
from shardplan.program.trace import Operation

VIEWS = {
    "reshape", "transpose", "squeeze", "expand_dims", "sharding_constraint", "name", "copy", "copy_p", "stop_gradient",
    "optimization_barrier", "broadcast_in_dim", "slice", "reduce_precision",
}  # fmt: skip
"""Primitives whose results are their operands seen in another way, or made again where they are used."""
SUMS = {"add", "add_any"}
CASTS = {"convert_element_type"}


class Fusion:
    """The values of one sequence of operations (a loop's body, or the program): which are written, and what of."""

    def __init__(
        self, operations: Sequence[Operation], arrays: Sequence[Array], wanted: Set[int], writes_wanted: bool
    ) -> None:
        """
        Args:
            wanted: values that are used after the sequence.
            writes_wanted: whether these must be written, rather than made where they are used.
        """
        self.operations, self.arrays = operations, arrays
        self._root: dict[int, int] = {}
        """View -> what it is a view of."""
        self._maker: dict[int, int] = {}
        self._users: defaultdict[int, list[int]] = defaultdict(list)
        """Value -> the operations that use it or a view of it."""
        for i, operation in enumerate(operations):
            for result in operation.results:
                self._maker[result] = i
            if self._is_view(operation):
                self._root[operation.results[0]] = self.root(operation.operands[0])
            else:
                for operand in set(map(self.root, operation.operands)):
                    self._users[operand].append(i)
        self._must = {self.root(value) for value in wanted} if writes_wanted else set[int]()
        # the program is a graph in which paths meet again: without caches they would be walked over and over
        self._made_of, self._is_reduced = cache(self._made_of), cache(self._is_reduced)  # type: ignore[method-assign]
        self._products_in = cache(self._products_in)  # type: ignore[method-assign]
        self.stays_cut = cache(self.stays_cut)  # type: ignore[method-assign]
        self._users_of, self._is_of_groups = cache(self._users_of), cache(self._is_of_groups)  # type: ignore[method-assign]
        self.written = {value for value in self._maker if self._is_written(value)}
        self.sources = cache(self._sources)
        self.kept = set[int]().union(*(self.sources(self.root(value)) for value in wanted))
        """What is in memory at the end, for the sake of `wanted`."""

    def root(self, value: int) -> int:
        """What `value` is a view of; itself where it is none."""
        return self._root.get(value, value)

    def runs(self, operation: Operation) -> bool:
        """Whether the operation takes place where it stands, rather than in one that uses its result."""
        if operation.kind == "contraction" and is_scores(self.arrays[operation.results[0]]):
            return True  # in a kernel, which writes no scores
        if operation.kind in ("elementwise", "contraction"):
            return any(result in self.written for result in operation.results)
        return True

    def reads(self, operation: Operation) -> set[int]:
        """What memory holds of what an operation needs."""
        return set[int]().union(*(self.sources(self.root(operand)) for operand in operation.operands))

    def products_in(self, operation: Operation) -> list[Operation]:
        """The products that happen in an elementwise operation."""
        if operation.kind != "elementwise":
            return []
        inside = set[int]().union(*(self._products_in(self.root(operand)) for operand in operation.operands))
        fused = sorted(value for value in inside - self.written if not is_scores(self.arrays[value]))
        return [self.operations[self._maker[value]] for value in fused]

    def stays_cut(self, value: int) -> bool:
        """Whether products by groups alone make `value` and use it, or what elementwise work makes of theirs."""
        users = self._users_of(value) if self._is_of_groups(value) else ()
        return bool(users) and all(self.operations[i].groups > 1 for i in users)

    def is_summand(self, value: int) -> bool:
        """Whether `value` is the result of a product by groups that is only added to others."""
        users = [self.operations[i] for i in self._users[value]]
        is_grouped = value in self._maker and self.operations[self._maker[value]].groups > 1
        return is_grouped and len(users) == 1 and len(self._parts(users[0].results[0])) > 1

    def is_summed_here(self, value: int) -> bool:
        """Whether partial sums of the product `value` are added up over devices at once.

        False where it is only added to other products, partial sums too, and is not the last of them.
        """
        parts = self._parts(self._total(value))
        return len(parts) < 2 or max(parts, key=lambda part: self._maker[part]) == value

    def _users_of(self, value: int) -> frozenset[int]:
        """The operations that are no elementwise work and use `value`, or what elementwise work makes of it."""
        elementwise = {i for i in self._users[value] if self.operations[i].kind == "elementwise"}
        made = [result for i in elementwise for result in self.operations[i].results]
        return frozenset(self._users[value]).difference(elementwise).union(*map(self._users_of, made))

    def _is_of_groups(self, value: int) -> bool:
        """Whether elementwise work alone makes `value` of the results of products by groups."""
        maker = self._maker.get(value)
        if maker is None or self.operations[maker].kind != "elementwise":
            return maker is not None and self.operations[maker].groups > 1
        operands = [operand for operand in map(self.root, self.operations[maker].operands) if self.arrays[operand].dims]
        return bool(operands) and all(map(self._is_of_groups, operands))

    def _sources(self, value: int) -> frozenset[int]:
        """What memory holds of what `value` is made of: itself, or what the work on the way to it reads."""
        maker = self._maker.get(value)
        if maker is None or value in self.written:
            return frozenset({value})
        if self.operations[maker].kind not in ("elementwise", "contraction"):
            return frozenset({value})
        return frozenset().union(*(self.sources(self.root(operand)) for operand in self.operations[maker].operands))

    def _is_view(self, operation: Operation) -> bool:
        if operation.kind != "elementwise" or len(operation.results) != 1 or not operation.operands:
            return False
        operand, result = self.arrays[operation.operands[0]], self.arrays[operation.results[0]]
        if operation.primitive in VIEWS:
            return True
        # a scaled copy of a weight is made where the weight is used
        return result.weight is not None and result.weight == operand.weight and result.itemsize == operand.itemsize

    def _is_written(self, value: int) -> bool:
        array, operation = self.arrays[value], self.operations[self._maker[value]]
        if value in self._root or is_scores(array) or not array.dims:
            return False
        if operation.kind == "elementwise":
            return self._is_needed(value) or self._is_shared(value)
        if operation.kind == "contraction" and operation.groups == 1 and value not in self._must:
            return not self._is_fused(value)
        return True  # grouped products are kernels of their own

    def _is_needed(self, value: int) -> bool:
        """Whether something must find an elementwise result in memory."""
        return value in self._must or any(self.operations[i].kind != "elementwise" for i in self._users[value])

    def _is_shared(self, value: int) -> bool:
        """Whether writing an elementwise result costs less memory than keeping what several users would need for it."""
        size = self.arrays[value].elements
        large = [source for source in self._elementwise_inputs(value) if self.arrays[source].elements >= size]
        return len(self._made_of(value)) > 1 and len(large) > 1

    def _elementwise_inputs(self, value: int) -> set[int]:
        """What the elementwise work behind `value` starts from."""
        maker = self._maker.get(value)
        if maker is None or self.operations[maker].kind != "elementwise":
            return {value}
        operands = self.operations[maker].operands
        return set[int]().union(*(self._elementwise_inputs(self.root(operand)) for operand in operands))

    def _is_fused(self, value: int) -> bool:
        """Whether the product `value` goes at once into the one thing that is made of it."""
        made = self._made_of(value)
        if len(made) != 1 or value in made or self._is_reduced(value):
            return False
        return max(self._products_in(next(iter(made))), key=lambda source: self._maker[source]) == value

    def _is_reduced(self, value: int) -> bool:
        """Whether elementwise work needs a sum or a maximum over all of `value`."""
        operations = [self.operations[i] for i in self._users[value] if self.operations[i].kind == "elementwise"]
        return any(
            operation.primitive.startswith("reduce_") or any(map(self._is_reduced, operation.results))
            for operation in operations
        )

    def _made_of(self, value: int) -> frozenset[int]:
        """The values needed in memory that elementwise work alone makes of `value`; itself where it is one."""
        found: set[int] = set()
        for i in self._users[value]:
            if self.operations[i].kind != "elementwise":
                return frozenset({value})
            for result in self.operations[i].results:
                found |= {result} if self._is_needed(result) else set()
                found |= self._made_of(result)
        return frozenset(found)

    def _products_in(self, value: int) -> frozenset[int]:
        """The products that elementwise work makes `value` of."""
        maker = self._maker.get(value)
        if maker is None:
            return frozenset()
        operation = self.operations[maker]
        if operation.kind != "elementwise":
            return frozenset({value}) if operation.kind == "contraction" else frozenset()
        return frozenset().union(*(self._products_in(self.root(operand)) for operand in operation.operands))

    def _total(self, value: int) -> int:
        """The sum that `value` and other products are added up to."""
        users = self._users[value]
        if len(users) != 1:
            return value
        operation = self.operations[users[0]]
        if operation.primitive in CASTS:
            return self._total(operation.results[0])
        others = [operand for operand in map(self.root, operation.operands) if operand != value]
        if operation.primitive in SUMS and others and all(self._parts(other) for other in others):
            return self._total(operation.results[0])
        return value

    def _parts(self, value: int) -> set[int]:
        """The products whose sum `value` is; empty where there is something else in it."""
        maker = self._maker.get(value)
        if maker is None:
            return set()
        operation = self.operations[maker]
        if operation.kind == "contraction":
            return {value}
        if operation.primitive not in SUMS | CASTS:
            return set()
        parts = [self._parts(self.root(operand)) for operand in operation.operands]
        return set[int]().union(*parts) if all(parts) else set()


@lru_cache(maxsize=4096)
def is_scores(array: Array) -> bool:
    """Whether it has both query and key positions: attention kernels never write it."""
    names = set(array.axes)
    return any(name + SECOND in names for name in names)
