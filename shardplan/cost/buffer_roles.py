"""The table of live-buffer roles: why a buffer is in memory, when it lives, and its bytes on one device. Pure.

`shardplan.program.walk` says which buffers of which role are live at a point of the program, whatever the sharding.
What a buffer takes in memory under a sharding, and with the quirks of a compiler, is the role's `bytes`: 0 where the
compiler or the sharding needs no such buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from shardplan.cost.attention import FLOAT32_BYTES, extra_attention_bytes
from shardplan.cost.experts import expert_buffer_bytes, expert_gradient_buffer_bytes
from shardplan.cost.partitioned_lookup import partition_lookup
from shardplan.cost.sharding import ShardingAssignment
from shardplan.cost.sparse.memory import given_block_bytes, sparse_buffer_bytes
from shardplan.plan.attention_plan import SparseKernel
from shardplan.program.live_buffers import BufferRole, LiveBuffer


class MemoryPart(StrEnum):
    """The parts into which a plan divides a device's memory."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    CAST_PARAMETERS = "cast_parameters"
    GATHERED_WEIGHTS = "gathered_weights"
    ACTIVATIONS = "activations"
    LOGITS = "logits"


@dataclass(frozen=True)
class RoleRow:
    """A row of the table: why a buffer is in memory, when it lives, and how large it is."""

    name: BufferRole
    meaning: str
    """Description of the buffer."""
    lifetime: str
    """When the buffer is in memory."""
    bytes: Callable[[LiveBuffer, ShardingAssignment], float]
    """Bytes of a buffer on one device."""
    part: MemoryPart | None = None
    """The part of memory that the buffer is reported in; None if the part depends on the array."""
    depends_on_storage: bool = False
    """Whether an activation's bytes depend on the stored sharding of parameters, as parameters' bytes always do."""
    depends_on_attention: bool = False
    """Whether the buffer's bytes depend on the method of attention."""
    depends_on_experts: bool = False
    """Whether the buffer's bytes depend on the method of experts."""


def buffer_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a live buffer on one device; 0 if it is optimized away, not needed, or in host memory."""
    if buffer.array.is_on_host:
        return 0.0
    return ROLES[buffer.role].bytes(buffer, assignment)


def host_buffer_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a live buffer in host memory, for one device; 0 if it is in device memory."""
    return ROLES[buffer.role].bytes(buffer, assignment) if buffer.array.is_on_host else 0.0


def stored_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a buffer in the sharding that its array has between tasks."""
    return assignment.bytes(buffer.array)


def live_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a value between tasks, in the parameter sharding if grouped matmuls read it."""
    return assignment.bytes(buffer.array, assignment.params if buffer.is_read_by_grouped_matmuls else None)


def log_sum_exp_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a log-sum-exp, which only attention kernels write; 0 for attention without a kernel."""
    return 0.0 if assignment.quirks.plain_attention else live_bytes(buffer, assignment)


def block_log_sum_exp_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a log-sum-exp of attention to selected blocks; 0 for methods without kernels."""
    if buffer.blocks is not None:
        method = buffer.blocks.method
    else:
        assert buffer.attention is not None
        method = assignment.attention_of(buffer.attention).sparse_kernel
    return live_bytes(buffer, assignment) if method is SparseKernel.KERNEL else 0.0


def gathered_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a parameter after its all-gather; 0 if it is not gathered."""
    gather = assignment.weight_gather(buffer.array)
    return gather.bytes if gather else 0.0


def reordered_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of the extra copies in which an all-gathered parameter is reordered."""
    gather = assignment.weight_gather(buffer.array)
    return (gather.copies - 1) * gather.bytes if gather else 0.0


def prefetched_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a parameter that is gathered early; 0 if its gather must wait because it reorders."""
    gather = assignment.weight_gather(buffer.array) if assignment.quirks.gathers_early else None
    return gather.bytes if gather and gather.copies == 1 else 0.0


def gathered_first_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a head's parameter that is gathered when the program starts, rather than before its use.

    The compiler does so where the gather is along several dimensions and leaves the parameter sharded, on all
    generations but tpu7x (docs/log.md).
    """
    gather = assignment.weight_gather(buffer.array)
    if gather is None or assignment.quirks.gathers_early:
        return 0.0
    is_partial = assignment.num_shards(buffer.array, assignment.compute) > 1
    return gather.bytes if gather.num_dimensions > 1 and is_partial else 0.0


def unscattered_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a result before its reduce-scatter; 0 without one."""
    result = buffer.array
    is_stored = assignment.is_stored_like_a_parameter(result)
    is_scattered = is_stored and assignment.num_shards(result) > assignment.num_shards(result, assignment.compute)
    return assignment.bytes(result, assignment.compute) if is_scattered else 0.0


def local_gradient_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a parameter's gradient on one device before summation; 0 for an activation."""
    is_gradient = assignment.is_stored_like_a_parameter(replace(buffer.array, is_local=False))
    return assignment.bytes(buffer.array) if is_gradient else 0.0


def float32_result_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of rows that a kernel of grouped matmuls writes in float32, before they are converted.

    The rows have the sharding of the parameters that they were multiplied with.
    """
    rows = buffer.array
    is_narrow = rows.itemsize < FLOAT32_BYTES
    if not assignment.quirks.wide_rows or not is_narrow or assignment.is_stored_like_a_parameter(rows):
        return 0.0
    return assignment.bytes(rows, assignment.params) * FLOAT32_BYTES / rows.itemsize


def unfreed_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of expert rows that the compiler neither frees nor overwrites after their last use."""
    return 0.0 if assignment.quirks.frees_rows else live_bytes(buffer, assignment)


def gathered_row_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of expert rows that are gathered before grouped matmuls slice them; 0 if nothing slices them.

    Grouped matmuls slice rows if the experts' parameters have more shards than the rows. Only compilers that free rows
    gather them early.
    """
    rows = buffer.array
    is_sliced = assignment.num_shards(rows, assignment.params) > assignment.num_shards(rows)
    return live_bytes(buffer, assignment) if assignment.quirks.frees_rows and is_sliced else 0.0


def held_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of rows kept for experts' gradients, on compilers that free other rows; else 0."""
    return live_bytes(buffer, assignment) if assignment.quirks.frees_rows else 0.0


def lookup_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of the gathered table and the transient copies of a lookup."""
    steps = partition_lookup(buffer.related_arrays[0], buffer.array, assignment)
    return steps.gathered_table_bytes + steps.transient_bytes


def copied_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a copy of stacked parameters; 0 if the compiler does not copy them."""
    return assignment.bytes(buffer.array) if assignment.quirks.copies_stacks else 0.0


ROWS = (
    RoleRow(
        BufferRole.PARAMETER,
        "A parameter in its stored sharding.",
        "At every point.",
        stored_bytes,
        MemoryPart.PARAMETERS,
    ),
    RoleRow(
        BufferRole.OPTIMIZER_STATE,
        "State of the optimizer, sharded like parameters.",
        "At every point.",
        stored_bytes,
        MemoryPart.OPTIMIZER,
    ),
    RoleRow(
        BufferRole.LIVE,
        "A value that an operation writes to memory.",
        "From that operation to the last one that reads the value.",
        live_bytes,
    ),
    RoleRow(
        BufferRole.LOG_SUM_EXP,
        "The log-sum-exp of scores that a kernel of attention writes beside a context that is kept.",
        "As long as the stack of contexts.",
        log_sum_exp_bytes,
    ),
    RoleRow(
        BufferRole.GATHERED_WEIGHT,
        "The all-gathered copy of a parameter.",
        "Between its first and its last use in the body of a loop.",
        gathered_bytes,
        MemoryPart.GATHERED_WEIGHTS,
    ),
    RoleRow(
        BufferRole.REORDERED_WEIGHT,
        "Another copy of a gathered parameter, whose elements the gather puts in order.",
        "Until the gather is complete.",
        reordered_bytes,
        MemoryPart.GATHERED_WEIGHTS,
    ),
    RoleRow(
        BufferRole.PREFETCHED_WEIGHT,
        "A parameter that the compiler gathers with all others of the body of a loop.",
        "From the start of the body to the first use.",
        prefetched_bytes,
        MemoryPart.GATHERED_WEIGHTS,
    ),
    RoleRow(
        BufferRole.WEIGHT_GATHERED_FIRST,
        "A parameter of the head that the compiler gathers at the start of the program.",
        "From the start to the first use.",
        gathered_first_bytes,
        MemoryPart.GATHERED_WEIGHTS,
    ),
    RoleRow(
        BufferRole.UNSCATTERED_RESULT,
        "The result of a matmul before its reduce-scatter: a gradient is unsharded until each device keeps its shard.",
        "While the matmul runs.",
        unscattered_bytes,
    ),
    RoleRow(
        BufferRole.LOCAL_GRADIENT,
        "A device's own gradient of a parameter, which the compiler sums over devices after the last loop.",
        "From the end of its shard_map to the end of the last loop.",
        local_gradient_bytes,
        MemoryPart.GRADIENTS,
    ),
    RoleRow(
        BufferRole.FLOAT32_RESULT,
        "The result of a grouped matmul in float32.",
        "While the grouped matmul runs.",
        float32_result_bytes,
        depends_on_storage=True,
    ),
    RoleRow(
        BufferRole.SUMMED_ROWS,
        "The sum of results of grouped matmuls; a compiler that frees rows writes it over one of them.",
        "While it is written.",
        unfreed_bytes,
    ),
    RoleRow(
        BufferRole.UNFREED_ROWS,
        "Rows routed to experts that the compiler does not free.",
        "From their last use until the gradients of experts are computed.",
        unfreed_bytes,
    ),
    RoleRow(
        BufferRole.ROUTED_TOKENS,
        "The tokens from which rows for experts are looked up.",
        "From their last use until the gradients of experts are computed.",
        held_bytes,
    ),
    RoleRow(
        BufferRole.FACTOR_OF_GRADIENT,
        "A resharded factor of the gradient of rows, which the gradient of the routing weights reads again.",
        "While the gradients of experts are computed.",
        held_bytes,
    ),
    RoleRow(
        BufferRole.GATHERED_ROWS,
        "The experts' result, computed again for the gradient of the routing weights and gathered from slices.",
        "While the gradients of experts are computed.",
        gathered_row_bytes,
        depends_on_storage=True,
    ),
    RoleRow(
        BufferRole.LOOKUP_RESULT,
        "The gathered table and the transient copies of a lookup.",
        "While the lookup runs.",
        lookup_bytes,
    ),
    RoleRow(
        BufferRole.COPIED_STACK,
        "A copy of stacked parameters in another memory layout.",
        "From before the loop over them until its end.",
        copied_bytes,
    ),
    RoleRow(
        BufferRole.KEYS_OR_VALUES,
        "Keys or values beyond a device's own; nonzero where positions are sharded.",
        "While attention uses them.",
        extra_attention_bytes,
        depends_on_attention=True,
    ),
    RoleRow(
        BufferRole.EXPERT_ROWS,
        "Gathered tokens, rows and hidden states of a block of experts.",
        "While the block runs.",
        expert_buffer_bytes,
        depends_on_experts=True,
    ),
    RoleRow(
        BufferRole.EXPERT_GRADIENT_ROWS,
        "Gathered tokens, rows and hidden states of a block of experts, and their gradients.",
        "While the gradient of the block runs.",
        expert_gradient_buffer_bytes,
        depends_on_experts=True,
    ),
    RoleRow(
        BufferRole.SPARSE_ATTENTION,
        "Keys and values of the sequence, outputs of branches and scores of a chunk, of Native Sparse Attention.",
        "While a call of it runs.",
        sparse_buffer_bytes,
        depends_on_attention=True,
    ),
    RoleRow(
        BufferRole.SPARSE_GRADIENT,
        "The same, and their gradients.",
        "While the gradient of a call runs.",
        sparse_buffer_bytes,
        depends_on_attention=True,
    ),
    RoleRow(
        BufferRole.BLOCK_ATTENTION,
        "Keys and values of the sequence, and scores of a chunk or what a kernel needs, of attention to given blocks.",
        "While a call of it runs.",
        given_block_bytes,
    ),
    RoleRow(
        BufferRole.BLOCK_GRADIENT,
        "The same, and their gradients.",
        "While the gradient of a call runs.",
        given_block_bytes,
    ),
    RoleRow(
        BufferRole.LOG_SUM_EXP_OF_BLOCKS,
        "The log-sum-exp that kernels of attention to selected blocks write beside outputs that are kept.",
        "As long as the stack of outputs.",
        block_log_sum_exp_bytes,
        depends_on_attention=True,
    ),
)

ROLES = {row.name: row for row in ROWS}
"""Name of a role -> its row."""
