"""Predicts which gathered parameters a compiler moves out of a loop, because they are equal in every iteration."""

from collections.abc import Sequence, Set

from shardplan.program.named_arrays import TracedArray
from shardplan.program.naming.primitives import find_primitive
from shardplan.program.operations import Operation, OperationKind


def invariant_copies(loop: Operation, arrays: Sequence[TracedArray]) -> Set[int]:
    """Return the gathered parameters of a loop's `shard_map`s, and copies made from them, such as padded ones.

    They are equal in every iteration, so that the compiler makes them before the loop. An example is the output head in
    a loop over microbatches.
    """
    varying = {value for _, value in loop.slices} | {start for _, start, _, _ in loop.carried}
    copies = set[int]()
    for operation in loop.body:
        operands, results = set(operation.operands), operation.results
        if operands & varying:
            varying.update(results)
        elif operation.kind == OperationKind.RESHARD:
            copies.update(result for result in results if arrays[result].is_local)
        elif operands & copies and find_primitive(operation.primitive).is_rewrite:
            copies.update(results)
    return copies
