"""Fusion as a compiler for TPUs does it: which values of a sequence of operations are written to memory.

The results of matmuls, lookups and scatters are written, and of elementwise results those that one of these reads. All
other values exist only inside a fused operation: an elementwise chain behind a matmul is fused into that matmul, unless
the chain first reduces over the whole result; of several matmuls that one chain reads, the last one fuses it.
"""

from collections import defaultdict
from collections.abc import Sequence, Set
from functools import cache

from shardplan.program.named_arrays import TracedArray, is_scores
from shardplan.program.operations import Operation, OperationKind

VIEW_PRIMITIVES = {
    "reshape", "transpose", "squeeze", "expand_dims", "sharding_constraint", "name", "copy", "copy_p", "stop_gradient",
    "optimization_barrier", "broadcast_in_dim", "slice", "reduce_precision",
}  # fmt: skip
"""Primitives whose results are views of their operands, or are recomputed where they are used."""
SUM_PRIMITIVES = {"add", "add_any"}
CAST_PRIMITIVES = {"convert_element_type"}
FUSIBLE = (OperationKind.ELEMENTWISE, OperationKind.CONTRACTION)
"""Kinds of operations whose results may exist only inside a fused operation."""


class Fusion:
    """Which values of one sequence of operations (a loop's body, or the program) are written, and from which others."""

    def __init__(
        self, operations: Sequence[Operation], arrays: Sequence[TracedArray], outputs: Set[int], writes_outputs: bool
    ) -> None:
        """
        Args:
            outputs: values that are used after the sequence.
            writes_outputs: whether the sequence writes its outputs; else they are computed where they are used.
        """
        self.operations, self.arrays = operations, arrays
        self._base: dict[int, int] = {}
        """View -> the value that it is a view of."""
        self._producer: dict[int, int] = {}
        """Value -> the operation that computes it."""
        self._consumers: defaultdict[int, list[int]] = defaultdict(list)
        """Value -> the operations that use it or a view of it."""
        for i, operation in enumerate(operations):
            for result in operation.results:
                self._producer[result] = i
            if self._is_view(operation):
                self._base[operation.results[0]] = self.base_of(operation.operands[0])
            else:
                for operand in set(map(self.base_of, operation.operands)):
                    self._consumers[operand].append(i)
        self._must_write = {self.base_of(value) for value in outputs} if writes_outputs else set[int]()
        # paths through the program meet again: without caches, walks over them would take exponential time
        self._final_values = cache(self._final_values)  # type: ignore[method-assign]
        self._is_reduced = cache(self._is_reduced)  # type: ignore[method-assign]
        self._matmuls_behind = cache(self._matmuls_behind)  # type: ignore[method-assign]
        self.is_between_grouped_matmuls = cache(self.is_between_grouped_matmuls)  # type: ignore[method-assign]
        self._final_consumers = cache(self._final_consumers)  # type: ignore[method-assign]
        self._comes_from_grouped_matmuls = cache(self._comes_from_grouped_matmuls)  # type: ignore[method-assign]
        self.written = {value for value in self._producer if self._is_written(value)}
        self.sources = cache(self._sources)
        self.held_for_outputs = set[int]().union(*(self.sources(self.base_of(value)) for value in outputs))
        """Values that stay in memory until the end of the sequence, because outputs are computed from them."""

    def base_of(self, value: int) -> int:
        """The value that `value` is a view of; `value` itself where it is none."""
        return self._base.get(value, value)

    def is_executed(self, operation: Operation) -> bool:
        """Whether the operation runs at its place in the sequence, rather than fused into a later one."""
        if operation.kind == OperationKind.CONTRACTION and is_scores(self.arrays[operation.results[0]]):
            return True  # in a kernel, which writes no scores
        if operation.kind in FUSIBLE:
            return any(result in self.written for result in operation.results)
        return True

    def reads(self, operation: Operation) -> set[int]:
        """The values in memory that an operation reads, directly or through what is fused into it."""
        return set[int]().union(*(self.sources(self.base_of(operand)) for operand in operation.operands))

    def fused_matmuls(self, operation: Operation) -> list[Operation]:
        """The matmuls that an elementwise operation is fused with."""
        if operation.kind != OperationKind.ELEMENTWISE:
            return []
        behind = set[int]().union(*(self._matmuls_behind(self.base_of(operand)) for operand in operation.operands))
        fused = sorted(value for value in behind - self.written if not is_scores(self.arrays[value]))
        return [self.operations[self._producer[value]] for value in fused]

    def is_between_grouped_matmuls(self, value: int) -> bool:
        """Whether only grouped matmuls produce and consume `value`, directly or through elementwise operations."""
        consumers = self._final_consumers(value) if self._comes_from_grouped_matmuls(value) else ()
        return bool(consumers) and all(self.operations[i].groups > 1 for i in consumers)

    def is_grouped_summand(self, value: int) -> bool:
        """Whether `value` is the result of a grouped matmul and is only added to other results of matmuls."""
        consumers = [self.operations[i] for i in self._consumers[value]]
        is_grouped = value in self._producer and self.operations[self._producer[value]].groups > 1
        return is_grouped and len(consumers) == 1 and len(self._summed_matmuls(consumers[0].results[0])) > 1

    def reduces_partial_sums(self, value: int) -> bool:
        """Whether partial sums in the result `value` of a matmul are added up over devices at once.

        False where `value` is only added to results of other matmuls and is not the last of them: the sum of them all
        is reduced once.
        """
        summed = self._summed_matmuls(self._sum_with_other_matmuls(value))
        return len(summed) < 2 or max(summed, key=lambda each: self._producer[each]) == value

    def _final_consumers(self, value: int) -> frozenset[int]:
        """The operations, other than elementwise ones, that use `value` directly or through elementwise operations."""
        elementwise = {i for i in self._consumers[value] if self.operations[i].kind == OperationKind.ELEMENTWISE}
        results = [result for i in elementwise for result in self.operations[i].results]
        others = frozenset(self._consumers[value]).difference(elementwise)
        return others.union(*map(self._final_consumers, results))

    def _comes_from_grouped_matmuls(self, value: int) -> bool:
        """Whether `value` is computed from results of grouped matmuls by elementwise operations alone, or by none."""
        producer = self._producer.get(value)
        if producer is None or self.operations[producer].kind != OperationKind.ELEMENTWISE:
            return producer is not None and self.operations[producer].groups > 1
        operands = map(self.base_of, self.operations[producer].operands)
        arrays = [operand for operand in operands if self.arrays[operand].dims]
        return bool(arrays) and all(map(self._comes_from_grouped_matmuls, arrays))

    def _sources(self, value: int) -> frozenset[int]:
        """The values in memory from which `value` is computed: itself, or what the operations fused into it read."""
        producer = self._producer.get(value)
        if producer is None or value in self.written or self.operations[producer].kind not in FUSIBLE:
            return frozenset({value})
        return frozenset().union(*(self.sources(self.base_of(each)) for each in self.operations[producer].operands))

    def _is_view(self, operation: Operation) -> bool:
        """Whether an elementwise result exists only as its operand: a view of it, or a scaled copy of a weight."""
        if operation.kind != OperationKind.ELEMENTWISE or len(operation.results) != 1 or not operation.operands:
            return False
        operand, result = self.arrays[operation.operands[0]], self.arrays[operation.results[0]]
        if operation.primitive in VIEW_PRIMITIVES:
            return True
        # a scaled copy of a weight is computed where the weight is used
        return result.weight is not None and result.weight == operand.weight and result.itemsize == operand.itemsize

    def _is_written(self, value: int) -> bool:
        """Whether a value is written to memory, rather than computed within the operations that use it."""
        array, operation = self.arrays[value], self.operations[self._producer[value]]
        if value in self._base or is_scores(array) or not array.dims:
            return False
        if operation.kind == OperationKind.ELEMENTWISE:
            return self._is_needed_in_memory(value) or self._saves_memory_if_written(value)
        if operation.kind == OperationKind.CONTRACTION and operation.groups == 1 and value not in self._must_write:
            return not self._is_fused(value)
        return True  # grouped matmuls are separate kernels

    def _is_needed_in_memory(self, value: int) -> bool:
        """Whether an elementwise result is an output, or an operand of an operation of another kind."""
        return value in self._must_write or any(
            self.operations[i].kind != OperationKind.ELEMENTWISE for i in self._consumers[value]
        )

    def _saves_memory_if_written(self, value: int) -> bool:
        """Whether an elementwise result takes less memory than the inputs from which consumers would recompute it."""
        size = self.arrays[value].elements
        large = [source for source in self._elementwise_inputs(value) if self.arrays[source].elements >= size]
        return len(self._final_values(value)) > 1 and len(large) > 1

    def _elementwise_inputs(self, value: int) -> set[int]:
        """The inputs of the chain of elementwise operations that computes `value`."""
        producer = self._producer.get(value)
        if producer is None or self.operations[producer].kind != OperationKind.ELEMENTWISE:
            return {value}
        operands = self.operations[producer].operands
        return set[int]().union(*(self._elementwise_inputs(self.base_of(operand)) for operand in operands))

    def _is_fused(self, value: int) -> bool:
        """Whether the result of a matmul is used only by one elementwise chain, which the matmul fuses."""
        final = self._final_values(value)
        if len(final) != 1 or value in final or self._is_reduced(value):
            return False
        return max(self._matmuls_behind(next(iter(final))), key=lambda each: self._producer[each]) == value

    def _is_reduced(self, value: int) -> bool:
        """Whether elementwise operations reduce over `value`, so that they need all of it first."""
        consumers = map(self.operations.__getitem__, self._consumers[value])
        return any(
            operation.primitive.startswith("reduce_") or any(map(self._is_reduced, operation.results))
            for operation in consumers
            if operation.kind == OperationKind.ELEMENTWISE
        )

    def _final_values(self, value: int) -> frozenset[int]:
        """The values needed in memory that elementwise operations alone compute from `value`; or `value` itself."""
        final: set[int] = set()
        for i in self._consumers[value]:
            if self.operations[i].kind != OperationKind.ELEMENTWISE:
                return frozenset({value})
            for result in self.operations[i].results:
                final |= {result} if self._is_needed_in_memory(result) else set()
                final |= self._final_values(result)
        return frozenset(final)

    def _matmuls_behind(self, value: int) -> frozenset[int]:
        """The results of matmuls from which elementwise operations compute `value`."""
        producer = self._producer.get(value)
        if producer is None:
            return frozenset()
        operation = self.operations[producer]
        if operation.kind != OperationKind.ELEMENTWISE:
            return frozenset({value}) if operation.kind == OperationKind.CONTRACTION else frozenset()
        return frozenset().union(*(self._matmuls_behind(self.base_of(operand)) for operand in operation.operands))

    def _sum_with_other_matmuls(self, value: int) -> int:
        """The sum of `value` and the results of other matmuls; `value` itself where it is used in another way."""
        consumers = self._consumers[value]
        if len(consumers) != 1:
            return value
        operation = self.operations[consumers[0]]
        if operation.primitive in CAST_PRIMITIVES:
            return self._sum_with_other_matmuls(operation.results[0])
        others = [operand for operand in map(self.base_of, operation.operands) if operand != value]
        if operation.primitive in SUM_PRIMITIVES and others and all(map(self._summed_matmuls, others)):
            return self._sum_with_other_matmuls(operation.results[0])
        return value

    def _summed_matmuls(self, value: int) -> set[int]:
        """The results of matmuls whose sum is `value`; empty where `value` has any other summand."""
        producer = self._producer.get(value)
        if producer is None:
            return set()
        operation = self.operations[producer]
        if operation.kind == OperationKind.CONTRACTION:
            return {value}
        if operation.primitive not in SUM_PRIMITIVES | CAST_PRIMITIVES:
            return set()
        summands = [self._summed_matmuls(self.base_of(operand)) for operand in operation.operands]
        return set[int]().union(*summands) if all(summands) else set()
