"""The cost of a block of routed experts on one device, by the strategy of the plan. Pure.

Symbols: T tokens of a device, g devices whose tokens it gathers, k experts of a token, E experts, e their shards, D and
F elements of a token and of a hidden state, f shards of the latter, b bytes of an element, m matrices of an expert.

| strategy | tokens of a device | rows of a device | received, each way |
|---|---|---|---|
| gather_tokens | T g | T g k / e | T (g - 1) D b |
| exchange_tokens, g over shards of hidden states | T g | T g k | T (g - 1) D b, and T g k (e - 1) / e D b |
| gather_weights | T | T k | (m E D F b) (1 - 1 / (e f)), once |

Experts get equally many rows, or as `workload.expert_load_spread` says; then these are the rows of the busiest device.
Kernels compute whole tiles of rows, and one more for every expert, whose rows begin within a tile; they take the longer
of their FLOPs at peak and of the bytes that they read and write (`shardplan.experts.tiles`). Before them, a layer's
weights are copied out of the stack of all layers. A gradient computes the projections of tokens again, and has two
matmuls for each of the block's.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from shardplan.cost.attention import FLOAT32_BYTES
from shardplan.cost.collectives import (
    Overlap,
    Purpose,
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    all_to_all_traffic,
    reduce_scatter_traffic,
)
from shardplan.cost.sharding import ShardingAssignment
from shardplan.experts.measured_load import largest_of_normals
from shardplan.experts.method import ExpertStrategy
from shardplan.experts.tiles import GroupedMatmul, buffer_rows, fastest_tiles
from shardplan.hardware.generations import Generation
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.program.live_buffers import LiveBuffer
from shardplan.program.marked.expert_kind import ExpertKind
from shardplan.program.named_arrays import TracedArray, size_of
from shardplan.program.tasks import Task

ACTIVATION_SLOWDOWN = 2.0
"""Seconds of activation functions in float32 = this x bytes / HBM bandwidth: 1.6 as compiled for v4, 2.2 for v5p
(Mixtral)."""
EXCHANGE_COPY, EXCHANGE_FILL, EXCHANGE_PAD = 5.5, 10.0, 11.5
"""Seconds of each step around a ragged all-to-all, divided by the seconds of its rows' bytes at HBM bandwidth: to copy
rows to or from its layout, to fill a buffer with zeros, and to pad or truncate rows; as compiled for v5p (Mixtral,
Qwen3, gpt-oss)."""
EXCHANGE_RESHAPES = 2
"""Number of reads and writes of rows that are reshaped; an assumption, as the compiler gives no cycles for it."""
EXCHANGED_WEIGHT_COPY = 15.0
"""`EXCHANGE_COPY` for routing weights."""
EXCHANGE_LANES = 256
"""Multiple of bfloat16 elements to which the compiler pads the rows of a ragged all-to-all."""
EXCHANGED_WEIGHT_BYTES = 512
"""Bytes of a row's routing weight in a ragged all-to-all: the compiler pads it to 128 elements of float32."""
ROUTING_BYTES = 8
"""Bytes sent with a token for each of its experts: the expert's number and its routing weight."""


@dataclass(frozen=True)
class ExpertOperands:
    """The operands of an expert task by their meaning; see `shardplan.program.marked.marked_experts`."""

    tokens: TracedArray
    weights: tuple[TracedArray, ...]
    """The matrices of the experts: gate projections (if there are any), up projections, down projections."""
    weight_gradients: tuple[TracedArray, ...]
    """The gradients of all weights, biases included; empty in the forward pass."""

    @classmethod
    def of(cls, task: Task) -> "ExpertOperands":
        """Find the operands of a task."""
        assert task.experts is not None
        is_gradient = len(task.results) > 1
        first = 4 if is_gradient else 3
        weights = task.operands[first : first + task.experts.matrices]
        return cls(task.operands[0], weights, task.results[2:] if is_gradient else ())

    @property
    def up(self) -> TracedArray:
        """The up projections, {experts, embed, mlp}."""
        return self.weights[-2]


@dataclass(frozen=True)
class KernelCalls:
    """Several equal calls of a kernel for grouped matmuls."""

    matmul: GroupedMatmul
    buffer_rows: float
    """Rows of the calls' arrays, which determine the kernel's tiles."""
    count: float

    def seconds(self, generation: Generation) -> float:
        """Return the seconds of all calls."""
        tiles = fastest_tiles(replace(self.matmul, rows=self.buffer_rows), generation)
        return self.count * self.matmul.seconds(tiles, generation)


@dataclass(frozen=True)
class ExpertWork:
    """One device's work in one forward execution of a block of experts."""

    kind: ExpertKind
    itemsize: int
    strategy: ExpertStrategy
    tokens: float
    """Number of tokens of the device."""
    token_axes: MeshAxes
    """Mesh axes that shard tokens."""
    expert_axes: MeshAxes
    """Mesh axes that shard experts."""
    mlp_axes: MeshAxes
    """Mesh axes that shard hidden states."""
    gathered_axes: MeshAxes
    """Mesh axes along which tokens are gathered and their results reduce-scattered."""
    summed_axes: MeshAxes
    """Mesh axes along which devices add up results for the same tokens."""
    gathered_tokens: float
    """Number of tokens after the gather, the device's own included."""
    rows: float
    """Number of rows (pairs of token and expert) on the busiest device."""
    buffer_rows: float
    """Number of rows in the device's buffers."""
    experts: float
    """Number of experts that the device computes."""
    chunks: int
    """Number of chunks in which the device's tokens are gathered and computed, one after the other."""
    mlp: float
    """Elements of the hidden states that the device computes."""

    @cached_property
    def row_bytes(self) -> float:
        """Bytes of a token."""
        return self.kind.embed * self.itemsize

    @cached_property
    def hidden_bytes(self) -> float:
        """Bytes of the device's part of a hidden state."""
        return self.mlp * self.itemsize

    @property
    def matrix_bytes(self) -> float:
        """Bytes of one matrix of every expert of the device."""
        return self.experts * self.kind.embed * self.hidden_bytes

    @property
    def hidden_buffer(self) -> float:
        """Bytes of the hidden states of one chunk of tokens."""
        return self.buffer_rows / self.chunks * self.hidden_bytes

    @property
    def transferred_bytes(self) -> float:
        """Bytes of buffers for gathered tokens or exchanged rows, and for their results."""
        if self.exchanges_rows:
            return 2 * self.rows * self.row_bytes
        if not self.gathered_axes:
            return 0.0
        gathered = self.gathered_tokens * self.row_bytes
        return gathered if self.chunks == 1 else gathered + gathered / self.chunks

    @property
    def gathered_weight_bytes(self) -> float:
        """Bytes of gathered weights in memory at a time: the matrices of one matmul and of the next."""
        is_gathered = self.strategy is ExpertStrategy.GATHER_WEIGHTS and (self.expert_axes or self.mlp_axes)
        return 2 * self.matrix_bytes if is_gathered else 0.0

    @property
    def exchanges_rows(self) -> bool:
        """Whether rows are exchanged between devices, which have different experts."""
        return self.strategy is ExpertStrategy.EXCHANGE_TOKENS and bool(self.expert_axes)

    @property
    def exchanged_embed(self) -> int:
        """Elements of a token in an exchange, padding included."""
        return -(-self.kind.embed // EXCHANGE_LANES) * EXCHANGE_LANES

    @property
    def rows_of_kernel(self) -> float:
        """Rows in one call of a kernel."""
        return self.rows / self.chunks


def work_of(task: Task, assignment: ShardingAssignment) -> ExpertWork:
    """Return one device's work for a task's block of experts in the forward pass, even if the task is its gradient."""
    assert task.experts is not None
    operands = ExpertOperands.of(task)
    return expert_work(task.experts, operands.tokens, operands.up, assignment)


def expert_work(kind: ExpertKind, x: TracedArray, up: TracedArray, assignment: ShardingAssignment) -> ExpertWork:
    """Return one device's work for a block of experts.

    Args:
        x: the tokens, {..., embed}.
        up: the projections up, {experts, embed, mlp}.
    """
    method = assignment.experts
    axes_of = [assignment.mesh_axes(dim, assignment.compute) for dim in (*x.dims[:-1], up.dims[0], up.dims[2])]
    *by_token, experts, mlp = ((axis for axis in axes if assignment.mesh[axis] > 1) for axes in axes_of)
    tokens_sharded = {axis for axes in by_token for axis in axes}
    expert_axes, mlp_axes = tuple(experts), tuple(mlp)
    token_axes = tuple(axis for axis in assignment.mesh if axis in tokens_sharded)
    count = math.prod(map(size_of, x.dims[:-1])) / mesh_size(assignment.mesh, token_axes)
    shared: MeshAxes = ()  # mesh axes whose devices compute parts of the sums of each other's tokens
    if method.strategy is ExpertStrategy.GATHER_TOKENS:
        shared = (*expert_axes, *mlp_axes)
    elif method.strategy is ExpertStrategy.EXCHANGE_TOKENS:
        shared = mlp_axes
    gathered_axes = tuple(axis for axis in shared if axis in tokens_sharded)
    gathered = count * mesh_size(assignment.mesh, gathered_axes)
    shards, mlp_shards = mesh_size(assignment.mesh, expert_axes), mesh_size(assignment.mesh, mlp_axes)
    if method.strategy is ExpertStrategy.GATHER_WEIGHTS:
        shards = mlp_shards = 1
    rows = gathered * kind.experts_per_token
    most = gathered * min(kind.experts_per_token, kind.experts / shards)
    if method.strategy is ExpertStrategy.GATHER_TOKENS:
        rows /= shards
    elif method.strategy is ExpertStrategy.EXCHANGE_TOKENS:
        most *= shards
    is_chunked = method.strategy is ExpertStrategy.GATHER_TOKENS and count % method.token_chunks == 0
    chunks = method.token_chunks if is_chunked else 1
    rows_of_buffers = most
    if method.strategy is not ExpertStrategy.GATHER_WEIGHTS:
        rows_of_buffers = min(most, chunks * buffer_rows(rows / chunks, method.buffer_factor))
    rows = min(most, rows * busiest_part(kind, shards))
    return ExpertWork(
        kind=kind,
        itemsize=x.itemsize,
        strategy=method.strategy,
        tokens=count,
        token_axes=token_axes,
        expert_axes=expert_axes,
        mlp_axes=mlp_axes,
        gathered_axes=gathered_axes,
        summed_axes=tuple(axis for axis in shared if axis not in tokens_sharded),
        gathered_tokens=gathered,
        rows=rows,
        buffer_rows=rows_of_buffers,
        experts=kind.experts / shards,
        chunks=chunks,
        mlp=kind.mlp / mlp_shards,
    )


def busiest_part(kind: ExpertKind, shards: float) -> float:
    """Return the rows of the busiest device, divided by the mean rows of a device, for experts on `shards` devices.

    The model assumes that the loads of experts are independent and normally distributed. A device's load is the sum of
    its experts' loads; the result is the expected maximum over devices.

    >>> skewed = ExpertKind(experts=8, experts_per_token=2, embed=4096, mlp=14336, load_spread=0.3)
    >>> round(busiest_part(skewed, shards=8), 2), busiest_part(skewed, shards=1)
    (1.43, 1.0)
    """
    if shards <= 1 or not kind.load_spread:
        return 1.0
    return 1 + kind.load_spread / math.sqrt(kind.experts / shards) * largest_of_normals(shards)


def kernel_calls(task: Task, work: ExpertWork) -> tuple[KernelCalls, ...]:
    """Return the kernel calls of all executions of a task: up and down projections, or recomputation and gradients."""
    embed, mlp, projections = work.kind.embed, work.mlp, work.kind.matrices - 1

    def calls(inner: float, columns: float, times: int, is_matrix_gradient: bool = False) -> KernelCalls:
        matmul = GroupedMatmul(
            work.rows_of_kernel, work.experts, int(inner), int(columns), work.itemsize, is_matrix_gradient
        )
        return KernelCalls(matmul, work.buffer_rows / work.chunks, times * work.chunks * task.executions)

    to_hidden, from_hidden = calls(embed, mlp, projections), calls(mlp, embed, 1)
    if not _is_gradient(task):
        return to_hidden, from_hidden
    gradients_of_rows = calls(embed, mlp, 1), calls(mlp, embed, projections)
    gradients_of_matrices = calls(embed, mlp, projections, True), calls(mlp, embed, 1, True)
    return to_hidden, *gradients_of_rows, *gradients_of_matrices


def sliced_weight_bytes(task: Task, assignment: ShardingAssignment) -> float:
    """Return the bytes of expert weights copied for kernels, over all executions; a gradient also copies transposes."""
    copies = 2 if _is_gradient(task) else 1
    # numbers of kept weights are arrays of one layer already
    stacked = (array for array in ExpertOperands.of(task).weights if not array.is_local)
    stored = sum(assignment.bytes(array, assignment.params) for array in stacked)
    return task.executions * copies * stored


def moved_bytes(task: Task, work: ExpertWork, is_wide: bool) -> float:
    """Return the bytes that one execution reads and writes outside kernels to look up rows and add them up by token.

    Rows that are exchanged are also copied before and after the exchange, and biases are looked up for each row. A
    gradient also masks rows without a token.

    Args:
        is_wide: whether kernels write rows in float32.
    """
    looked_up = 2 * work.buffer_rows * work.row_bytes + _exchange_bytes(work) + _bias_bytes(work)
    added_up = work.buffer_rows * work.row_bytes + 2 * work.gathered_tokens * work.row_bytes
    activated = ACTIVATION_SLOWDOWN * _activation_bytes(work, is_wide)
    if not _is_gradient(task):
        return looked_up + activated + added_up
    # rows of tokens and of gradients are looked up, and the gradients of rows added up
    removed = ACTIVATION_SLOWDOWN * 2 * work.buffer_rows * work.row_bytes
    return 2 * looked_up + 2 * activated + removed + added_up


def _activation_bytes(work: ExpertWork, is_wide: bool) -> float:
    """Return the bytes that activation functions and additions of biases read and write."""
    projections, columns = work.kind.matrices - 1, work.buffer_rows * work.mlp
    read = columns * (FLOAT32_BYTES if is_wide else work.itemsize) * projections
    written = columns * work.itemsize
    if not work.kind.has_bias:
        return read + written
    return read + written + projections * written + 3 * work.buffer_rows * work.row_bytes


def _bias_bytes(work: ExpertWork) -> float:
    """Return the bytes read and written to look up each row's biases by its expert; 0 without biases."""
    if not work.kind.has_bias:
        return 0.0
    return 2 * work.buffer_rows * ((work.kind.matrices - 1) * work.hidden_bytes + work.row_bytes)


def _exchange_bytes(work: ExpertWork) -> float:
    """Return the HBM bytes of the compiler's copies around an exchange of rows; 0 without an exchange."""
    if not work.exchanges_rows:
        return 0.0
    sent, received = work.rows * work.row_bytes, work.buffer_rows * work.row_bytes
    copied = EXCHANGE_COPY * (sent + received) + EXCHANGE_FILL * sent
    # rows, the zeros and outputs of a sender, and the rows that are received
    copied += EXCHANGE_RESHAPES * (3 * sent + received)
    # routing weights are copied before and after, and cut to one element
    copied += EXCHANGED_WEIGHT_COPY * EXCHANGED_WEIGHT_BYTES * (work.rows + 2 * work.buffer_rows)
    if work.exchanged_embed == work.kind.embed:
        return copied
    # sent rows and the buffer are padded, and received rows are cut; so are outputs
    return copied + EXCHANGE_PAD * (2 * sent + 3 * received)


def elementwise_bytes(task: Task, work: ExpertWork, is_wide: bool) -> float:
    """Return the bytes that one execution reads and writes in elementwise work besides activation functions.

    Outputs are converted if kernels write them in float32. A backward pass adds the gradients of rows from the gate and
    the up projection (once more if rows are exchanged), and the gradients of weights from all chunks of tokens.
    """
    projections = work.kind.matrices - 1
    outputs = projections if _is_gradient(task) else 1
    converted = outputs * work.buffer_rows * work.kind.embed * (FLOAT32_BYTES + work.itemsize) if is_wide else 0.0
    if not _is_gradient(task):
        return converted
    sums_of_rows = (projections - 1) * work.buffer_rows + (work.rows if work.exchanges_rows else 0.0)
    sums_of_weights = (work.chunks - 1) * work.kind.matrices * work.matrix_bytes
    # two arrays are read and one is written
    return converted + 3 * (sums_of_rows * work.row_bytes + sums_of_weights)


def expert_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the collectives of a block of experts, under the compute sharding: of its tokens, results and weights."""
    work, count = work_of(task, assignment), task.executions
    is_gradient = _is_gradient(task)
    size = work.gathered_tokens * work.row_bytes
    if work.gathered_axes:
        # the gradient needs the tokens again, and the gradients of the sums
        times = 2 if is_gradient else 1
        routing = work.gathered_tokens * work.kind.experts_per_token * ROUTING_BYTES
        axes = work.gathered_axes
        for traffic in (
            all_gather_traffic(times * size + routing, assignment, axes, count, Purpose.TOKENS_FOR_EXPERTS),
            reduce_scatter_traffic(size, assignment, axes, count, Purpose.SUMS_OF_EXPERTS),
        ):
            yield replace(traffic, overlap=Overlap.KERNELS) if work.chunks > 1 else traffic
    if work.summed_axes:
        shards = mesh_size(assignment.mesh, work.gathered_axes)
        yield all_reduce_traffic(size / shards, assignment, work.summed_axes, count, Purpose.SUMS_OF_EXPERTS)
    if work.exchanges_rows:
        # there and back, with routing weights there; a gradient sends rows, weights and gradients there, and back the
        # gradients of rows and of weights
        times, times_of_weights = (3, 2) if is_gradient else (2, 1)
        row = times * work.exchanged_embed * work.itemsize + times_of_weights * EXCHANGED_WEIGHT_BYTES
        yield all_to_all_traffic(work.rows * row, assignment, work.expert_axes, count, Purpose.ROWS_OF_EXPERTS)
    sharding = (*work.expert_axes, *work.mlp_axes)
    if work.strategy is ExpertStrategy.GATHER_WEIGHTS and sharding:
        weights = work.kind.matrices * work.matrix_bytes
        yield all_gather_traffic(weights, assignment, sharding, count, Purpose.WEIGHTS, task.label, Overlap.LAYER)
        if is_gradient:
            yield reduce_scatter_traffic(weights, assignment, sharding, count, Purpose.WEIGHT_GRADIENTS, task.label)


def gradient_sum_axes(task: Task, assignment: ShardingAssignment) -> MeshAxes:
    """Return the mesh axes over which gradients of weights are summed: token axes that do not shard the weights."""
    work = work_of(task, assignment)
    return tuple(axis for axis in work.token_axes if axis not in (*work.expert_axes, *work.mlp_axes))


def expert_buffer_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of temporary buffers while a block of experts runs, besides its operands and results.

    The most bytes are in memory while the activation is computed: gathered tokens, or the rows sent and received; the
    rows of the device; and its gates and up projections, one of which the hidden states overwrite. If tokens are
    divided into chunks, the next chunk is gathered and the results of the previous one are sent at the same time.
    Weights are gathered for one matmul and the next.
    """
    work = _work_of_buffer(buffer, assignment)
    hidden = (work.kind.matrices - 1) * work.hidden_buffer
    return work.gathered_weight_bytes + work.transferred_bytes + work.buffer_rows * work.row_bytes + hidden


def expert_gradient_buffer_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of temporary buffers while a block's gradient runs, besides its operands and results."""
    work = _work_of_buffer(buffer, assignment)
    rows = 2 * (work.transferred_bytes + work.buffer_rows * work.row_bytes)
    return 2 * work.gathered_weight_bytes + rows + 2 * (work.kind.matrices - 1) * work.hidden_buffer


def _work_of_buffer(buffer: LiveBuffer, assignment: ShardingAssignment) -> ExpertWork:
    assert buffer.experts is not None
    (up,) = buffer.related_arrays
    return expert_work(buffer.experts, buffer.array, up, assignment)


def _is_gradient(task: Task) -> bool:
    return len(task.results) > 1


def products(task: Task) -> int:
    """Return the number of matmuls of a block of experts or of its gradient, without recomputed ones."""
    assert task.experts is not None
    return 2 * task.experts.matrices if _is_gradient(task) else task.experts.matrices
