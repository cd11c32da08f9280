"""The stages of Native Sparse Attention on one device, by the method of its selected branch. Pure.

Symbols of a device: B sequences, T positions of S, G groups with R heads of queries each, D channels of a key and a
value, b bytes of an element; C compressed and J selection blocks of the sequence; block l, stride d, selection block
l', n selected blocks, window w, h hidden elements of the compression; q queries of a chunk.

| stage | FLOPs, forward | bytes through HBM |
|---|---|---|
| compression | 2 B G T / d (l D h + h D) | the tokens of all blocks, each in l / d of them, written and read |
| compressed branch | 2 B T G R C D | float32 scores B T G R C, `COMPRESSED_PASSES` times |
| choice of blocks | - | float32 importance B T G J, `CHOICE_PASSES` times |
| selected, dense mask | 2 B T G R S D | float32 scores B T G R S, `SELECTED_PASSES` times |
| selected, gathered | 2 B T G R n l' D | scores as above, with n l' for S; the rows B T G n l' D, in float32 and in b |
| window | 2 B T G R (q + w - 1) D | scores as above, with q + w - 1 for S |

A stage takes the longer of its FLOPs at peak and its bytes at HBM bandwidth. A gradient has two matmuls for each, and
computes the forward pass again where a device has more than one chunk of queries. XLA computes masked scores too.

By the method of kernels, the three branches are kernels (`shardplan.cost.sparse.kernels`), which compute nothing again
in chunks. The choice of blocks runs where a call has it as a result: in the forward pass, and again only if a policy
of gradient checkpointing keeps no blocks (`nested`). No gradient flows through it. A call of `attend_to_blocks` has
the stages of the selected branch alone.
"""

from collections.abc import Iterator
from typing import assert_never

from shardplan.cost.attention import FLOAT32_BYTES
from shardplan.cost.sharding import ShardingAssignment
from shardplan.cost.sparse.kernels import kernel_stages, selected_kernel_stages
from shardplan.cost.sparse.stage import Stage, StageName
from shardplan.cost.sparse.work import SelectedWork, SparseWork, given_block_work
from shardplan.decoder.parts.attention.sparse.config import Compression
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.plan.attention_plan import SparseKernel
from shardplan.program.named_arrays import size_of
from shardplan.program.tasks import Task

COMPRESSED_PASSES, SELECTED_PASSES, CHOICE_PASSES = 12.5, 7.5, 17.0
"""Number of times that float32 scores, or the importance of blocks, pass through HBM in a forward pass, by the
compiler's cycles for v5p with 8K to 64K tokens, 64 heads and 4 groups (docs/log.md)."""
GATHERED_PASSES = 2
"""Number of times that gathered rows go through HBM, in float32 and in the queries' type: written and read."""
GRADIENT_PASSES = 2.0
"""Number of passes of a gradient per pass of the forward computation."""


def sparse_stages(task: Task, work: SparseWork) -> tuple[Stage, ...]:
    """Return the stages of all executions of a task."""
    has_blocks = len(task.results) > 2
    stages = call_stages(work, task.is_sparse_gradient, selects=has_blocks)
    return tuple(stage.times(task.executions) for stage in stages)


def call_stages(work: SparseWork, is_gradient: bool, selects: bool = True) -> list[Stage]:
    """Return the stages of one call, or of its gradient.

    Args:
        selects: whether the call chooses blocks; False for a recomputation whose blocks were kept.
    """
    selects = selects and not is_gradient
    if work.method is SparseKernel.KERNEL:
        return [*_stages_of_kernels(work, is_gradient, selects)]
    return [stage.times(_passes(work, is_gradient)) for stage in _forward_stages(work, selects)]


def given_block_stages(task: Task, assignment: ShardingAssignment) -> tuple[Stage, ...]:
    """Return the stages of all executions of a call of `attend_to_blocks`, or of its gradient."""
    assert task.blocks is not None
    work = given_block_work(task.blocks, task.sparse_queries, assignment)
    stages = selected_branch_stages(work, task.is_sparse_gradient)
    return tuple(stage.times(task.executions) for stage in stages)


def selected_branch_stages(work: SelectedWork, is_gradient: bool) -> list[Stage]:
    """Return the stages of attention to selected blocks, or of its gradient, without the choice of blocks."""
    if work.method is SparseKernel.KERNEL:
        return [*selected_kernel_stages(work, is_gradient)]
    return [_selected_stage(work).times(_passes(work, is_gradient))]


def _passes(work: SelectedWork, is_gradient: bool) -> float:
    """Return the work of XLA's pass relative to a forward pass; for gradients, each chunk is recomputed first."""
    if not is_gradient:
        return 1.0
    return GRADIENT_PASSES + (1.0 if work.has_chunks else 0.0)


def _forward_stages(work: SparseWork, selects: bool) -> Iterator[Stage]:
    """Yield the stages of the forward pass by XLA."""
    yield _compression_stage(work)
    yield _attention_stage(StageName.COMPRESSED, work, work.compressed_blocks, COMPRESSED_PASSES)
    if selects:
        yield _choice_stage(work)
    yield _selected_stage(work)
    yield _attention_stage(StageName.WINDOW, work, work.window_keys, SELECTED_PASSES)


def _stages_of_kernels(work: SparseWork, is_gradient: bool, selects: bool) -> Iterator[Stage]:
    """Yield the stages of a call, or of its gradient, if kernels compute its branches."""
    yield _compression_stage(work).times(GRADIENT_PASSES if is_gradient else 1.0)
    if selects:
        yield _choice_stage(work)
    yield from kernel_stages(work, is_gradient, selects)


def _choice_stage(work: SparseWork) -> Stage:
    importance = work.rows * work.config.selection_blocks(work.parts.length)
    return Stage(StageName.CHOICE, 0.0, CHOICE_PASSES * FLOAT32_BYTES * importance)


def _attention_stage(name: StageName, work: SelectedWork, keys: float, passes: float) -> Stage:
    """Return the stage in which every query attends to `keys` keys that are shared, not gathered per query."""
    scores = work.rows * work.config.heads_per_group * keys
    return Stage(name, 2 * scores * work.channels, passes * FLOAT32_BYTES * scores)


def _selected_stage(work: SelectedWork) -> Stage:
    stage = _attention_stage(StageName.SELECTED, work, work.selected_keys, SELECTED_PASSES)
    assert work.method is not SparseKernel.KERNEL
    match work.method:
        case SparseKernel.GATHERED_BLOCKS:
            gathered = work.rows * work.selected_keys * work.channels
            return stage._replace(bytes=stage.bytes + GATHERED_PASSES * gathered * (FLOAT32_BYTES + work.itemsize))
        case SparseKernel.DENSE_MASK:
            return stage
        case _:
            assert_never(work.method)


def _compression_stage(work: SparseWork) -> Stage:
    config, tokens = work.config, work.rows
    blocks, elements = tokens / config.stride, tokens * config.strides_per_block * work.channels
    flops = 0.0
    for size in (config.key_size, config.value_size):
        if config.compression is Compression.LINEAR:
            flops += 2 * blocks * config.block * size * size
        elif config.compression is Compression.MLP:
            hidden = config.hidden_size(size)
            flops += 2 * blocks * (config.block * size * hidden + hidden * size)
    return Stage(StageName.COMPRESSION, flops, 2 * work.itemsize * elements)


def model_flops(task: Task) -> float:
    """Return the FLOPs of a call over all devices, without scores that masks remove.

    A query at t attends to the compressed blocks up to t, to the tokens up to t of `selected` blocks, and to its
    window.
    """
    assert task.attention is not None
    config = task.attention.sparse
    assert config is not None
    batch, length = (size_of(dim) for dim in task.sparse_queries.dims[:2])
    alone = SparseWork(config, SparseKernel.DENSE_MASK, 2, batch, config.groups, PositionParts(length), (), ())
    compression = _compression_stage(alone)
    keys = _mean_keys(config.selected * config.selection_block, length) + _mean_keys(config.window, length)
    keys += alone.compressed_blocks / 2
    attention = 2 * alone.rows * config.heads_per_group * keys * alone.channels
    return task.executions * (compression.flops + attention)


def given_block_flops(task: Task) -> float:
    """Return the FLOPs of a call of `attend_to_blocks` over all devices, without scores that masks remove.

    The estimate assumes that every query attends to its own block, and to as many earlier blocks as it may select.
    """
    kind, queries = task.blocks, task.sparse_queries
    assert kind is not None
    keys = _mean_keys(kind.selected * kind.selection_block, size_of(queries.dims[1]))
    rows = queries.elements // kind.key_size
    return task.executions * 2 * rows * keys * (kind.key_size + kind.value_size)


def _mean_keys(limit: int, length: int) -> float:
    """Return the mean over t < length of min(limit, t + 1), the number of keys of a query at t."""
    limit = min(length, limit)
    return limit - limit * (limit - 1) / (2 * length)
