"""Fusion as a TPU compiler performs it: which values of a sequence of operations are written to memory.

The results of matmuls, lookups and scatters are written, and of elementwise results those that one of these reads. All
other values exist only inside a fused operation: an elementwise chain behind a matmul is fused into that matmul, unless
the chain first reduces over the whole result; of several matmuls that one chain reads, the last one fuses it.

What decides this about a value follows from the facts about its operands (`_Origin`) and about its consumers (`_Use`),
and from what is written before it: one pass forward over the operations, one backward and one forward again, with a
constant amount of work for each operand.
"""

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from shardplan.program.named_arrays import TracedArray, is_scores
from shardplan.program.naming.primitives import find_primitive
from shardplan.program.operations import Operation, OperationKind

FUSIBLE = (OperationKind.ELEMENTWISE, OperationKind.CONTRACTION)
"""Kinds of operations whose results may exist only inside a fused operation."""
MULTIPLE = -1
"""Stands for several values, in place of one value."""
NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Origin:
    """The matmuls that a value is computed from, with only elementwise operations in between."""

    last_matmul: int | None = None
    """Result of the last matmul from which the value is computed; the value itself if a matmul computes it."""
    summed_matmuls: int = 0
    """Number of matmuls (2 for any more) if their results are only added up; 0 if they are used otherwise."""
    last_summed: int | None = None
    """Result of the last matmul that is only added up."""


@dataclass(frozen=True)
class _Use:
    """How later operations use a value, directly or after elementwise operations."""

    final: int | None = None
    """The value in memory that elementwise operations compute from this one, or `MULTIPLE`; the value itself if other
    operations use it; None without any. Of values that one operation computes together, the first."""
    is_reduced: bool = False
    """Whether the elementwise operations reduce over the value, so that they need all of it first."""
    by_grouped: bool = False
    """Whether grouped matmuls use the value, or values computed from it."""
    by_others: bool = False
    """Whether other operations that are not elementwise use the value, or values computed from it."""


class Fusion:
    """The values that a sequence of operations writes to memory, and the values in memory they are computed from."""

    def __init__(
        self, operations: Sequence[Operation], arrays: Sequence[TracedArray], outputs: Set[int], writes_outputs: bool
    ) -> None:
        """Analyse the sequence `operations`, whose values have the types in `arrays`.

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
        self._origins: dict[int, _Origin] = {}
        for i, operation in enumerate(operations):
            for result in operation.results:
                self._producer[result] = i
            if self._is_view(operation):
                self._base[operation.results[0]] = self.base_of(operation.operands[0])
            else:
                for operand in set(map(self.base_of, operation.operands)):
                    self._consumers[operand].append(i)
            self._origins |= {result: self._find_origin(operation, result) for result in operation.results}
        self._must_write = {self.base_of(value) for value in outputs} if writes_outputs else set[int]()
        self._uses: dict[int, _Use] = {}
        self._sums: dict[int, int] = {}
        """Result of a matmul, or a partial sum of such results -> the complete sum that it is a term of."""
        for operation in reversed(operations):
            for result in operation.results:
                self._uses[result] = self._find_use(result)
                self._sums[result] = self._find_sum(result)
        self._largest_inputs: dict[int, tuple[tuple[int, int], ...]] = {}
        """Value -> (elements, value) of the two largest values in memory from which it is computed."""
        self.written = set[int]()
        for operation in operations:
            for result in operation.results:
                self._largest_inputs[result] = self._find_largest_inputs(operation)
                if self._is_written(result):
                    self.written.add(result)
                if result in self.written or operation.kind != OperationKind.ELEMENTWISE:
                    # what is computed from it needs nothing that is before it
                    self._largest_inputs[result] = ((arrays[result].elements, result),)
        self._sources: dict[int, frozenset[int]] = {}
        self._parts: dict[int, frozenset[int]] = {}
        """Value -> the values or slices in memory from which it is computed."""
        self._fused: dict[int, frozenset[int]] = {}
        """Value -> the matmuls that are fused with the elementwise operations that compute it."""
        for operation in operations:
            for result in operation.results:
                self._sources[result], self._fused[result] = self._find_sources(operation, result)
                self._parts[result] = self._find_parts(operation, result)
        self.held_for_outputs = set[int]().union(*(self.sources(self.base_of(value)) for value in outputs))
        """Values that stay in memory until the end of the sequence, because outputs are computed from them."""

    def base_of(self, value: int) -> int:
        """Return the value that `value` is a view of; `value` itself if it is not a view."""
        return self._base.get(value, value)

    def sources(self, value: int) -> frozenset[int]:
        """Return the values in memory from which `value` is computed; `value` itself if it is in memory."""
        return self._sources.get(value, frozenset({value}))

    def is_executed(self, operation: Operation) -> bool:
        """Return whether an operation runs by itself, rather than fused into a later one."""
        if operation.kind == OperationKind.CONTRACTION and is_scores(self.arrays[operation.results[0]]):
            return True  # in a kernel, which writes no scores
        if operation.kind in FUSIBLE:
            return any(result in self.written for result in operation.results)
        return True

    def reads(self, operation: Operation) -> set[int]:
        """Return the values in memory that an operation reads, directly or through operations fused into it."""
        return set[int]().union(*(self.sources(self.base_of(operand)) for operand in operation.operands))

    def moved(self, operation: Operation) -> tuple[set[int], list[int]]:
        """Return the values that an elementwise operation reads and writes, including everything fused into it.

        If the operation slices a value, or writes a slice into one, only the slice counts.
        """
        operands = [self.base_of(operand) for operand in operation.operands]
        primitive = find_primitive(operation.primitive)
        if primitive.is_update and operands[0] in self.sources(operands[0]):
            return set(self._parts_of(operands[1])), [operation.operands[1]]
        writes = [result for result in operation.results if result in self.written]
        if primitive.is_slice and operands[0] in self.sources(operands[0]):
            return {*operation.results}.union(*map(self._parts_of, operands[1:])), writes
        return set[int]().union(*map(self._parts_of, operands)), writes

    def factors_of(self, value: int) -> tuple[int, ...]:
        """Return the two factors if `value` is an elementwise product; otherwise only `value`."""
        base = self.base_of(value)
        if base not in self._producer:
            return (value,)
        operation = self.operations[self._producer[base]]
        is_product = operation.kind == OperationKind.ELEMENTWISE and find_primitive(operation.primitive).is_product
        return operation.operands if is_product else (value,)

    def fused_matmuls(self, operation: Operation) -> list[Operation]:
        """Return the matmuls that an elementwise operation is fused with."""
        if operation.kind != OperationKind.ELEMENTWISE:
            return []
        fused = NOTHING.union(*(self._fused.get(self.base_of(operand), NOTHING) for operand in operation.operands))
        return [self.operations[self._producer[value]] for value in sorted(fused)]

    def is_read_by_grouped_matmuls(self, value: int) -> bool:
        """Return whether only grouped matmuls consume `value`, directly or through elementwise operations."""
        use = self._uses.get(value)
        return use is not None and use.by_grouped and not use.by_others

    def is_grouped_summand(self, value: int) -> bool:
        """Return whether `value` is a grouped matmul's result and is only added to other matmuls' results."""
        consumers = [self.operations[i] for i in self._consumers[value]]
        is_grouped = value in self._producer and self.operations[self._producer[value]].groups > 1
        return is_grouped and len(consumers) == 1 and self._origins[consumers[0].results[0]].summed_matmuls > 1

    def resharded(self, operation: Operation) -> tuple[tuple[TracedArray, ...], tuple[TracedArray, ...]]:
        """Return the arrays that a change of sharding reads and writes.

        The compiler reshards the factors of a product, which are smaller, and multiplies afterwards.
        """
        operands = tuple(self.arrays[value] for value in self.factors_of(operation.operands[0]))
        result = self.arrays[operation.results[0]]
        if len(operands) == 1:
            return operands, (result,)
        return operands, tuple(_replicate_like(result, factor) for factor in operands)

    def reduces_partial_sums(self, value: int) -> bool:
        """Return whether the partial sums in a matmul's result `value` are added up over devices at once.

        False where `value` is only added to results of other matmuls and is not the last of them: the sum of them all
        is reduced once.
        """
        summed = self._origins[self._sums[value]]
        return summed.summed_matmuls < 2 or summed.last_summed == value

    def _origin(self, value: int) -> _Origin:
        """Return the matmuls from which a value, or the value that it is a view of, is computed; empty without any."""
        value = self.base_of(value)
        return self._origins.get(value) or _Origin()

    def _find_origin(self, operation: Operation, result: int) -> _Origin:
        """Return the matmuls that a result is computed from, given the matmuls that the operands are computed from."""
        if operation.kind == OperationKind.CONTRACTION:
            return _Origin(result, 1, result)
        if operation.kind != OperationKind.ELEMENTWISE:
            return _Origin()
        origins = [self._origin(operand) for operand in operation.operands]
        matmuls = [origin.last_matmul for origin in origins if origin.last_matmul is not None]
        are_summed = all(each.summed_matmuls for each in origins)
        primitive = find_primitive(operation.primitive)
        is_sum = (primitive.is_sum or primitive.is_cast) and are_summed
        summed = {each.last_summed for each in origins if is_sum and each.last_summed is not None}
        several = any(each.summed_matmuls > 1 for each in origins)
        return _Origin(
            max(matmuls, key=self._producer.__getitem__, default=None),
            0 if not summed else 2 if several or len(summed) > 1 else 1,
            max(summed, key=self._producer.__getitem__, default=None),
        )

    def _find_largest_inputs(self, operation: Operation) -> tuple[tuple[int, int], ...]:
        """Find the two largest values in memory that the operands of an operation are computed from."""
        inputs = set[tuple[int, int]]()
        for operand in map(self.base_of, operation.operands):
            inputs.update(self._largest_inputs.get(operand, ((self.arrays[operand].elements, operand),)))
        return tuple(sorted(inputs, reverse=True)[:2])

    def _find_use(self, value: int) -> _Use:
        """Return how later operations use a value, given how they use the values computed from it."""
        consumers = [self.operations[i] for i in self._consumers[value]]
        elementwise = [each for each in consumers if each.kind == OperationKind.ELEMENTWISE]
        others = [each for each in consumers if each.kind != OperationKind.ELEMENTWISE]
        later = {result: self._uses[result] for each in elementwise for result in each.results}
        needed = {use.final for use in later.values() if use.final is not None}
        needed |= {result for result in later if self._is_needed_in_memory(result)}
        final = {each if each == MULTIPLE else self.operations[self._producer[each]].results[0] for each in needed}
        return _Use(
            value if others else None if not final else final.pop() if len(final) == 1 else MULTIPLE,
            any(find_primitive(each.primitive).is_reduction for each in elementwise)
            or any(use.is_reduced for use in later.values()),
            any(each.groups > 1 for each in others) or any(use.by_grouped for use in later.values()),
            any(each.groups == 1 for each in others) or any(use.by_others for use in later.values()),
        )

    def _find_sum(self, value: int) -> int:
        """Return the sum of matmul results that `value` is a term of; `value` itself if there is none."""
        consumers = self._consumers[value]
        if len(consumers) != 1:
            return value
        operation = self.operations[consumers[0]]
        others = [operand for operand in map(self.base_of, operation.operands) if operand != value]
        are_summed = bool(others) and all(self._origin(operand).summed_matmuls for operand in others)
        primitive = find_primitive(operation.primitive)
        is_sum = primitive.is_sum and are_summed
        return self._sums[operation.results[0]] if is_sum or primitive.is_cast else value

    def _find_sources(self, operation: Operation, value: int) -> tuple[frozenset[int], frozenset[int]]:
        """Find the values in memory from which a result is computed, and the matmuls that are fused for it."""
        if value in self.written or operation.kind not in FUSIBLE:
            return frozenset({value}), NOTHING
        operands = [self.base_of(operand) for operand in operation.operands]
        sources = NOTHING.union(*map(self.sources, operands))
        if operation.kind == OperationKind.CONTRACTION:
            return sources, NOTHING if is_scores(self.arrays[value]) else frozenset({value})
        return sources, NOTHING.union(*(self._fused.get(operand, NOTHING) for operand in operands))

    def _parts_of(self, value: int) -> frozenset[int]:
        """Return the values, or slices of them, from which `value` is computed; `value` itself if it is in memory."""
        return self._parts.get(value, frozenset({value}))

    def _find_parts(self, operation: Operation, value: int) -> frozenset[int]:
        """Find the values, or slices of them, from which a result is computed."""
        is_slice = operation.kind == OperationKind.ELEMENTWISE and find_primitive(operation.primitive).is_slice
        if value in self.written or operation.kind not in FUSIBLE or is_slice:
            return frozenset({value})
        return NOTHING.union(*(self._parts_of(self.base_of(operand)) for operand in operation.operands))

    def _is_view(self, operation: Operation) -> bool:
        """Return whether an elementwise result is never in memory: a view of its operand, or cheap to recompute.

        Cheap to recompute are casts to a wider type, which would take more memory, and scaled copies of a weight.
        """
        if operation.kind != OperationKind.ELEMENTWISE or len(operation.results) != 1 or not operation.operands:
            return False
        operand, result = self.arrays[operation.operands[0]], self.arrays[operation.results[0]]
        primitive = find_primitive(operation.primitive)
        if primitive.is_view:
            return True
        if primitive.is_cast and result.weight is None:
            return operand.itemsize < result.itemsize
        # a scaled copy of a weight is computed where the weight is used
        return result.weight is not None and result.weight == operand.weight and result.itemsize == operand.itemsize

    def _is_written(self, value: int) -> bool:
        """Return whether a value is written to memory, rather than computed within the operations that use it."""
        array, operation = self.arrays[value], self.operations[self._producer[value]]
        if value in self._base or is_scores(array) or not array.dims:
            return False
        if operation.kind == OperationKind.ELEMENTWISE:
            return self._is_needed_in_memory(value) or self._saves_memory_if_written(value)
        if operation.kind == OperationKind.CONTRACTION and operation.groups == 1 and value not in self._must_write:
            return not self._is_fused(value)
        return True  # grouped matmuls are separate kernels

    def _is_needed_in_memory(self, value: int) -> bool:
        """Return whether an elementwise result is an output, or an operand of an operation that is not elementwise."""
        return value in self._must_write or any(
            self.operations[i].kind != OperationKind.ELEMENTWISE for i in self._consumers[value]
        )

    def _saves_memory_if_written(self, value: int) -> bool:
        """Return whether an elementwise result is smaller than the inputs from which its users would recompute it."""
        size = self.arrays[value].elements
        large = [source for elements, source in self._largest_inputs[value] if elements >= size]
        return self._uses[value].final == MULTIPLE and len(large) > 1

    def _is_fused(self, value: int) -> bool:
        """Return whether only one elementwise chain uses a matmul's result, so that the matmul is fused into it."""
        use = self._uses[value]
        if use.final in (None, MULTIPLE, value) or use.is_reduced:
            return False
        return self._origin(use.final).last_matmul == value


def _replicate_like(product: TracedArray, factor: TracedArray) -> TracedArray:
    """Return `factor` without the names of axes that `product` lacks because it is replicated along them."""
    kept = set(product.axes)
    return replace(factor, dims=tuple(tuple((n if n in kept else None, s) for n, s in dim) for dim in factor.dims))
