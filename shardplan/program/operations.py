"""Operations of a traced program, and the kinds that determine their cost and memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardplan.hardware import CollectiveKind
from shardplan.plan.mapping import MeshAxes
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.marked.block_attention_kind import BlockAttentionKind
from shardplan.program.marked.expert_kind import ExpertKind
from shardplan.program.named_arrays import Dim, TracedArray

BACKWARD_SCOPE, REMATERIALIZED_SCOPE = "transpose(", "rematted_computation"
"""JAX's named scopes of the backward pass, and of recomputation by `jax.checkpoint` in it."""


class OperationKind(StrEnum):
    """The kinds of operations, which differ in how they use their operands."""

    CONTRACTION = "contraction"
    """A matmul, or a convolution treated as one: `dot_general`, `ragged_dot`, `conv_general_dilated`."""
    LOOKUP = "lookup"
    """A `gather` of rows of a table."""
    SCATTER_ADD = "scatter-add"
    """A `scatter-add`, such as the gradient of a lookup."""
    ELEMENTWISE = "elementwise"
    """Everything that XLA can fuse into a loop over its result."""
    SELECTION = "selection"
    """A `top_k`: the largest elements along a dimension."""
    RESHARD = "reshard"
    """A change of sharding at the start or end of a `shard_map`."""
    COLLECTIVE = "collective"
    """A collective over mesh axes that a `shard_map` calls, such as `psum`."""
    EXPERTS = "experts"
    """A block of routed experts, or its gradient, as `shardplan.program.marked.marked_experts` marks it."""
    SPARSE_ATTENTION = "sparse attention"
    """A call of Native Sparse Attention, or its gradient, as `shardplan.program.marked.marked_sparse` marks it."""
    BLOCK_ATTENTION = "attention to given blocks"
    """A call of `attend_to_blocks`, or its gradient, as `shardplan.program.marked.marked_blocks` marks it."""
    CONVERSION = "conversion"
    """The conversion of a weight kept as stored, which `shardplan.program.marked.marked_conversions` marks."""
    HOST_COPY = "host copy"
    """A copy between the memories of a device and of its host."""
    LOOP = "loop"
    """A `scan`."""


@dataclass(frozen=True)
class Operation:
    """One operation of a traced program; its values are indices into `Trace.arrays`."""

    kind: OperationKind
    operands: tuple[int, ...]
    results: tuple[int, ...]
    label: str
    """The named scopes of the traced program around the operation."""
    primitive: str = ""
    """Name of the JAX primitive; empty for a loop or a reshard."""
    activation: str = ""
    """Name of the activation, for an operation that names one for gradient checkpointing policies."""
    contracted: Dim = ()
    """For a contraction, the axes summed over; for a selection, the axes selected along."""
    batched: Dim = ()
    """For a contraction: the batch axes, which index independent matmuls."""
    groups: int = 1
    """For a contraction: number of matrices in the second operand of a grouped matmul (`ragged_dot`), one of which
    multiplies each row of the first operand."""
    collective: CollectiveKind | None = None
    """For a collective: its kind."""
    mesh_axes: MeshAxes = ()
    """For a collective: its mesh axes."""
    is_local: bool = False
    """Whether each device computes the operation on its own part of the operands alone, in a `shard_map`."""
    experts: ExpertKind | None = None
    """For a block of routed experts, and for its gradient: its kind."""
    sparse: AttentionKind | None = None
    """For a call of Native Sparse Attention, and for its gradient: its kind."""
    blocks: BlockAttentionKind | None = None
    """For a call of `attend_to_blocks`, and for its gradient: its kind."""
    body: tuple["Operation", ...] = ()
    """For a loop: the operations of its body."""
    trips: int = 1
    """For a loop: its number of iterations."""
    slices: tuple[tuple[int, int], ...] = ()
    """For a loop: pairs (stacked value outside, slice for one iteration inside). The loop writes the stacked value if
    it is one of the loop's results, and else reads it."""
    carried: tuple[tuple[int, int, int, int], ...] = ()
    """For a loop: its carry, as (value before, value at the body's start, value at the body's end, value after)."""

    @property
    def is_backward(self) -> bool:
        """Whether the operation computes gradients; recomputation by `jax.checkpoint` does not count."""
        return BACKWARD_SCOPE in self.label and REMATERIALIZED_SCOPE not in self.label


def all_operations(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield all operations, including those in the bodies of loops."""
    for operation in operations:
        yield operation
        yield from all_operations(operation.body)


def stacked_axes(operations: Iterable[Operation], arrays: Sequence[TracedArray]) -> Iterator[str]:
    """Yield the logical axes that loops slice, one element per iteration, such as the axis of stacked layers."""
    for operation in operations:
        for stacked, each in operation.slices:
            yield from {*arrays[stacked].logical_axes} - {*arrays[each].logical_axes}
        yield from stacked_axes(operation.body, arrays)
