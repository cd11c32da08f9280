"""Derives the step of any gradient checkpointing policy from one trace of the default policy.

Under the default policy a loop over layers keeps the carry of every iteration, and the loop of the gradients computes
all other activations of a layer again. An activation with a name is in both loops:

    forward loop:    name = checkpoint_name(computed)
    backward loop:   name = checkpoint_name(computed again)

A policy that keeps the name lets the forward loop write it into a stack, and the backward loop read its slice of this
stack in place of what it computed again. With the stack in the memory of the host, both copy it. What nothing needs any
more is left out. This is what `jax.checkpoint` makes of such a policy; tests compare the result with a trace of each.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from shardplan.model.gradient_checkpointing.activation_names import ActivationName
from shardplan.plan.workload.checkpointing import DEFAULT, CheckpointPolicy
from shardplan.program.marked.marked_sparse import SPARSE_ATTENTION
from shardplan.program.named_arrays import TracedArray
from shardplan.program.operations import REMATERIALIZED_SCOPE, Operation, OperationKind, all_operations
from shardplan.program.trace import Trace

SELECTED_BLOCKS = ActivationName.SELECTED_BLOCKS.value
CARRY = "__carry"
"""Ending of the name by which Haliax names the carry of a loop over layers."""


def with_policy(trace: Trace, policy: CheckpointPolicy) -> Trace:
    """Return the trace of a step under `policy`, given its trace under the default policy.

    Args:
        trace: trace of the default policy, made with `selects_again`.
        policy: a policy for which `is_rewritable` is true; names that the trace does not have are ignored.
    """
    always = always_kept(trace.operations)
    if policy == CheckpointPolicy() and not always:
        return trace
    kept = dict.fromkeys((*always, *policy.kept), False)
    on_host = {**kept, **dict.fromkeys(policy.offloaded, True)}
    rewriter = _Rewriter(list(trace.arrays), on_host, carries_on_host=policy.kind == "offload_carries")
    operations = _needed(rewriter.rewrite(trace.operations), {*trace.results})
    return replace(trace, arrays=tuple(rewriter.arrays), operations=operations)


def always_kept(operations: Iterable[Operation]) -> tuple[str, ...]:
    """Return the activations that every policy keeps: the selected blocks of Native Sparse Attention.

    The layers themselves keep them (`shardplan.model.gradient_checkpointing.kept_selection`).
    """
    is_sparse = any(operation.primitive == SPARSE_ATTENTION for operation in all_operations(operations))
    return (SELECTED_BLOCKS,) if is_sparse else ()


def is_rewritable(trace: Trace, policy: CheckpointPolicy) -> bool:
    """Return whether `with_policy` supports a policy: all recomputed activations must be in pairs of loops.

    Layers that are not stacked, but called one after the other, have no loops.
    """
    names, in_pairs = _count_names(trace.operations)
    return policy.kind in (DEFAULT, "offload_carries") and names == in_pairs


def _count_names(operations: Sequence[Operation]) -> tuple[int, int]:
    """Count the recomputed activations that have a name, and how many of these are in pairs of loops."""
    gradient_loops = {_gradient_loop(operations, i) for i in range(len(operations))}
    names = in_pairs = 0
    for i, operation in enumerate(operations):
        inside, inside_in_pairs = _count_names(operation.body)
        own = bool(operation.activation) and REMATERIALIZED_SCOPE in operation.label
        names += inside + own
        in_pairs += inside if i in gradient_loops else inside_in_pairs
    return names, in_pairs


class _Rewriter:
    """Rewrites pairs of loops, so that the second loop reads activations that the first one keeps."""

    def __init__(self, arrays: list[TracedArray], on_host: Mapping[str, bool], carries_on_host: bool) -> None:
        """Prepare to rewrite the loops of a trace.

        Args:
            arrays: the values of the trace; new ones are appended.
            on_host: name of a kept activation -> whether it is kept in host memory.
        """
        self.arrays, self.on_host, self.carries_on_host = arrays, on_host, carries_on_host

    def rewrite(self, operations: Sequence[Operation]) -> tuple[Operation, ...]:
        """Return the operations of a program, or of a loop's body, with all pairs of loops in it rewritten."""
        rewritten = list(operations)
        for i, operation in enumerate(operations):
            if operation.kind != OperationKind.LOOP:
                continue
            j = _gradient_loop(operations, i)
            if j is not None:
                rewritten[i], rewritten[j] = self._rewrite_pair(operation, operations[j])
            elif not _is_of_gradients(operation):
                rewritten[i] = replace(operation, body=self.rewrite(operation.body))
        return tuple(rewritten)

    def _rewrite_pair(self, forward: Operation, backward: Operation) -> tuple[Operation, Operation]:
        """Change a loop over layers and the loop of its gradients, so that the second reads kept activations."""
        forward = self._name_selections(forward, backward)
        shared = {stack for stack, _ in forward.slices} & {stack for stack, _ in backward.slices}
        carry_stack = next(stack for stack in shared if stack in forward.results)
        stacks = [self._make_stack(each, carry_stack) for each in forward.body if self._is_on_host(each) is not None]
        backward = self._read_stacks(backward, stacks, carry_stack)
        # JAX keeps nothing that no gradient needs, such as the output of an MLP that is only added
        read = {stack for stack, _ in backward.slices}
        kept = [stack if stack in read else None for stack in stacks]
        return self._write_stacks(forward, kept, carry_stack), backward

    def _name_selections(self, forward: Operation, backward: Operation) -> Operation:
        """Return the forward loop with its selected blocks named as in the loop of gradients.

        JAX leaves out the names in the forward loop, because nothing reads these blocks by themselves.
        """
        names = iter([operation for operation in backward.body if operation.activation == SELECTED_BLOCKS])
        body: list[Operation] = []
        for operation in forward.body:
            body.append(operation)
            if operation.primitive == SPARSE_ATTENTION:
                *_, blocks = operation.results
                named = self._add(self.arrays[blocks])
                body.append(replace(next(names), operands=(blocks,), results=(named,), label=operation.label))
        return replace(forward, body=tuple(body))

    def _make_stack(self, operation: Operation, carry_stack: int) -> int:
        """Return the stack for the activation that an operation names; a carry has one already."""
        on_host, carries = bool(self._is_on_host(operation)), self.arrays[carry_stack]
        if operation.activation.endswith(CARRY):
            self.arrays[carry_stack] = replace(carries, is_on_host=on_host)
            return carry_stack
        array = self.arrays[operation.results[0]]
        return self._add(replace(array, dims=(carries.dims[0], *array.dims), is_on_host=on_host))

    def _write_stacks(self, loop: Operation, stacks: Sequence[int | None], carry_stack: int) -> Operation:
        """Return the loop over layers, extended to write activations into stacks.

        Args:
            stacks: the stack of each activation, in the order of the loop; None for an activation that is not kept.
        """
        slices = [each for each in loop.slices if each[0] != carry_stack]
        results = [*loop.results]
        body: list[Operation] = []
        following = iter(stacks)
        for operation in loop.body:
            stack = None if self._is_on_host(operation) is None else next(following)
            if stack is None:
                body.append(operation)
                continue
            stored, operations = self._keep(operation, self.arrays[stack].is_on_host)
            body += operations
            slices.append((stack, stored))
            if stack != carry_stack:
                results.append(stack)
        return replace(loop, body=tuple(body), results=tuple(results), slices=tuple(slices))

    def _keep(self, operation: Operation, on_host: bool) -> tuple[int, list[Operation]]:
        """Return the value to write into an activation's stack, and the operations that name and compute it."""
        (named,) = operation.results
        if on_host:
            copy = self._add(replace(self.arrays[named], is_on_host=True))
            return copy, [operation, _host_copy(operation, named, copy)]
        if operation.activation == SELECTED_BLOCKS:
            return named, [operation]  # integers have one type
        # JAX keeps the compiler from computing it again in a wider type
        before = self._add(self.arrays[named])
        barrier = replace(operation, operands=(before,), results=(named,), primitive="reduce_precision", activation="")
        return named, [replace(operation, results=(before,)), barrier]

    def _read_stacks(self, loop: Operation, stacks: Sequence[int], carry_stack: int) -> Operation:
        """Return the loop of gradients, changed to read the needed activations from stacks.

        Args:
            stacks: the stack of each activation, in the order of the forward loop.
        """
        slices = [each for each in loop.slices if each[0] != carry_stack]
        body: list[Operation] = []
        following = iter(stacks)
        for operation in loop.body:
            if REMATERIALIZED_SCOPE not in operation.label or self._is_on_host(operation) is None:
                body.append(operation)
                continue
            stack = next(following)
            (named,) = operation.results
            if not self.arrays[stack].is_on_host:
                slices.append((stack, named))
                continue
            copy = self._add(replace(self.arrays[named], is_on_host=True))
            slices.append((stack, copy))
            body.append(_host_copy(operation, copy, named))
        written = {value for stack, value in slices if stack in loop.results}
        needed = _needed(body, written | {end for _, _, end, _ in loop.carried})
        used = _used(needed) | written
        slices = [(stack, value) for stack, value in slices if value in used]
        read = [stack for stack, _ in slices if stack not in loop.results]
        outside = {before for before, *_ in loop.carried} | used
        constants = [value for value in loop.operands if value in outside and value not in read]
        return replace(loop, body=needed, operands=(*constants, *read), slices=tuple(slices))

    def _is_on_host(self, operation: Operation) -> bool | None:
        """Return whether a kept activation is in host memory; None if the activation is not kept."""
        if operation.activation.endswith(CARRY):
            return self.carries_on_host
        return self.on_host.get(operation.activation)

    def _add(self, array: TracedArray) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1


def _host_copy(operation: Operation, source: int, result: int) -> Operation:
    """Return a copy between memories, to replace an operation that names an activation."""
    return replace(
        operation,
        kind=OperationKind.HOST_COPY,
        operands=(source,),
        results=(result,),
        primitive="device_put",
        activation="",
    )


def _gradient_loop(operations: Sequence[Operation], i: int) -> int | None:
    """Return the index of the loop that computes gradients for loop `i`: it reads stacks that loop `i` writes."""
    written = {stack for stack, _ in operations[i].slices if stack in operations[i].results}
    for j in range(i + 1, len(operations)):
        is_read = any(stack in written for stack, _ in operations[j].slices)
        if is_read and _is_of_gradients(operations[j]):
            return j
    return None


def _is_of_gradients(loop: Operation) -> bool:
    """Return whether a loop recomputes activations of layers."""
    return any(REMATERIALIZED_SCOPE in operation.label for operation in loop.body)


def _needed(operations: Iterable[Operation], needed: Set[int]) -> tuple[Operation, ...]:
    """Return the operations that are needed to compute the values `needed`."""
    wanted, kept = set(needed), list[Operation]()
    for operation in reversed([*operations]):
        if wanted.intersection(operation.results):
            kept.append(operation)
            wanted.update(operation.operands)
    return tuple(reversed(kept))


def _used(operations: Iterable[Operation]) -> set[int]:
    """Return all values that some operations read."""
    return {operand for operation in operations for operand in operation.operands}
