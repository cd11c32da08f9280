"""Makes the task of an operation: what it reads and writes, fused operations included, and which weights it uses."""

from shardplan.program.fusion.fusion import Fusion
from shardplan.program.marked.attention_kind import UNMARKED, AttentionKind
from shardplan.program.marked.marked_attention import kind_of_label, without_mark
from shardplan.program.named_arrays import is_scores
from shardplan.program.naming.primitives import find_primitive
from shardplan.program.operations import Operation, OperationKind
from shardplan.program.tasks import Task, TaskKind

TASK_KINDS = {
    OperationKind.CONTRACTION: TaskKind.CONTRACTION,
    OperationKind.LOOKUP: TaskKind.LOOKUP,
    OperationKind.SCATTER_ADD: TaskKind.SCATTER_ADD,
    OperationKind.ELEMENTWISE: TaskKind.ELEMENTWISE,
    OperationKind.SELECTION: TaskKind.SELECTION,
    OperationKind.RESHARD: TaskKind.RESHARD,
    OperationKind.COLLECTIVE: TaskKind.COLLECTIVE,
    OperationKind.EXPERTS: TaskKind.EXPERTS,
    OperationKind.SPARSE_ATTENTION: TaskKind.SPARSE_ATTENTION,
    OperationKind.BLOCK_ATTENTION: TaskKind.BLOCK_ATTENTION,
    OperationKind.CONVERSION: TaskKind.CONVERSION,
    OperationKind.HOST_COPY: TaskKind.HOST_COPY,
}
"""Kind of operation -> kind of task outside of attention; a loop is no task, but its body's operations are."""
USERS_OF_WEIGHTS = (
    OperationKind.RESHARD, OperationKind.EXPERTS, OperationKind.SPARSE_ATTENTION, OperationKind.CONVERSION,
)  # fmt: skip
"""Kinds of operations, besides matmuls, before which parameters are gathered."""


def make_task(operation: Operation, fusion: Fusion, executions: int, used_weights: set[str]) -> Task:
    """Return the task of an operation with all operations fused into it, and record the weights that it uses.

    An elementwise operation reads the inputs of its whole fusion, except the inputs of fused matmuls.

    Args:
        fusion: fusion of the sequence that contains the operation.
        executions: how often it runs in a step.
        used_weights: the weights that earlier operations use; the weights of this operation are added.
    """
    arrays = fusion.arrays
    if operation.kind == OperationKind.ELEMENTWISE:
        matmuls = fusion.fused_matmuls(operation)
        of_matmuls = {fusion.base_of(operand) for matmul in matmuls for operand in matmul.operands}
        moved, writes = fusion.moved(operation)
        reads = sorted(value for value in moved - of_matmuls if arrays[value].axes)
    else:
        reads, writes = list(operation.operands), list(operation.results)
    if operation.kind == OperationKind.RESHARD:
        operands, results = fusion.resharded(operation)
    else:
        operands = tuple(arrays[value] for value in reads)
        results = tuple(arrays[value] for value in writes)
    is_matmul = operation.kind == OperationKind.CONTRACTION
    uses_weights = is_matmul or operation.kind in USERS_OF_WEIGHTS
    is_attention = is_matmul and any(map(is_scores, (*operands, *results)))
    weights = [array.weight for array in operands if array.weight is not None]
    first_used = tuple(weight for weight in weights if weight not in used_weights)
    if uses_weights:
        used_weights.update(weights)
    return Task(
        kind=TaskKind.ATTENTION if is_attention else TASK_KINDS[operation.kind],
        operands=operands,
        results=results,
        contracted=operation.contracted,
        batched=operation.batched,
        groups=operation.groups,
        executions=executions,
        first_used_weights=first_used,
        reduces_partial_sums=not is_matmul
        or (not operation.is_local and fusion.reduces_partial_sums(operation.results[0])),
        is_move=operation.kind == OperationKind.ELEMENTWISE and find_primitive(operation.primitive).is_move,
        is_local=operation.is_local,
        routed=frozenset(
            arrays[value]
            for value in (*reads, *writes)
            if operation.kind != OperationKind.LOOKUP and fusion.is_read_by_grouped_matmuls(value)
        ),
        collective=operation.collective,
        mesh_axes=operation.mesh_axes,
        is_backward=operation.is_backward,
        label=weights[0] if weights else without_mark(operation.label),
        attention=attention_kind(operation) if is_attention else operation.sparse,
        experts=operation.experts,
        blocks=operation.blocks,
    )


def attention_kind(operation: Operation) -> AttentionKind:
    """Return the kind of attention that a matmul with scores belongs to."""
    return kind_of_label(operation.label) or UNMARKED
