"""Operations of a traced program, as their kinds decide cost and memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardplan.hardware import CollectiveKind
from shardplan.plan.mapping import MeshAxes
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.marked.expert_kind import ExpertKind
from shardplan.program.named_arrays import Dim, TracedArray

BACKWARD_SCOPE, REMATERIALIZED_SCOPE = "transpose(", "rematted_computation"
"""JAX's named scopes of the backward pass, and of what `jax.checkpoint` computes again in it."""


class OperationKind(StrEnum):
    """The kinds of operations: how each uses its operands."""

    CONTRACTION = "contraction"
    """A matmul, or a convolution as one: `dot_general`, `ragged_dot`, `conv_general_dilated`."""
    LOOKUP = "lookup"
    """A `gather` of rows of a table."""
    SCATTER_ADD = "scatter-add"
    """A `scatter-add`, such as the gradient of a lookup."""
    ELEMENTWISE = "elementwise"
    """Everything that XLA can fuse into a loop over its result."""
    SELECTION = "selection"
    """A `top_k`: the largest elements along a dimension."""
    RESHARD = "reshard"
    """A change of sharding where a `shard_map` begins or ends."""
    COLLECTIVE = "collective"
    """A collective over mesh axes that a `shard_map` names, such as `psum`."""
    EXPERTS = "experts"
    """A block of routed experts, or its gradient, as `shardplan.program.marked.marked_experts` marks it."""
    SPARSE_ATTENTION = "sparse attention"
    """A call of Native Sparse Attention, or its gradient, as `shardplan.program.marked.marked_sparse` marks it."""
    CONVERSION = "conversion"
    """The conversion of a weight that is kept as stored, which `shardplan.program.marked.marked_conversions` marks."""
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
    """Of an operation that gives an activation a name for policies of gradient checkpointing: this name."""
    contracted: Dim = ()
    """Of a contraction: the axes that it sums over. Of a selection: the axes that it selects along."""
    batched: Dim = ()
    """Of a contraction: the batch axes, which number independent matmuls."""
    groups: int = 1
    """Of a contraction: the number of matrices in the second operand of a grouped matmul (`ragged_dot`); each row of
    the first operand is multiplied by one of them."""
    collective: CollectiveKind | None = None
    """Of a collective: its kind."""
    mesh_axes: MeshAxes = ()
    """Of a collective: the mesh axes that it names."""
    is_local: bool = False
    """Whether each device computes it with its own part of the operands alone, in a `shard_map`."""
    experts: ExpertKind | None = None
    """Of a block of routed experts, and of its gradient: its kind."""
    sparse: AttentionKind | None = None
    """Of a call of Native Sparse Attention, and of its gradient: its kind."""
    body: tuple["Operation", ...] = ()
    """Of a loop: its operations."""
    trips: int = 1
    """Of a loop: its iterations."""
    slices: tuple[tuple[int, int], ...] = ()
    """Of a loop: pairs of a stacked value outside and its slice for one iteration inside. The loop reads the stacked
    value, or writes it where the value is one of the loop's results."""
    carried: tuple[tuple[int, int, int, int], ...] = ()
    """Of a loop: its carry, as (value before, value at the body's start, value at the body's end, value after)."""

    @property
    def is_backward(self) -> bool:
        """Whether the operation computes gradients; recomputation by `jax.checkpoint` does not count."""
        return BACKWARD_SCOPE in self.label and REMATERIALIZED_SCOPE not in self.label


def all_operations(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield operations and those in the bodies of loops."""
    for operation in operations:
        yield operation
        yield from all_operations(operation.body)


def stacked_axes(operations: Iterable[Operation], arrays: Sequence[TracedArray]) -> Iterator[str]:
    """Yield the logical axes that loops index, one element per iteration, such as the axis of stacked layers."""
    for operation in operations:
        for stacked, each in operation.slices:
            yield from {*arrays[stacked].logical_axes} - {*arrays[each].logical_axes}
        yield from stacked_axes(operation.body, arrays)
