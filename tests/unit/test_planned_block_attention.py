"""The price of `attend_to_blocks`: that of the selected branch of Native Sparse Attention with as many blocks."""

import jax.numpy as jnp
import pytest
from block_steps import block_step, block_tasks, sharding

from shardplan.cost.buffer_roles import buffer_bytes
from shardplan.cost.gspmd import device_cost
from shardplan.cost.sparse.stages import call_stages, given_block_flops
from shardplan.cost.sparse.work import SparseWork
from shardplan.decoder import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.hardware import GENERATIONS
from shardplan.plan.attention_plan import SparseKernel
from shardplan.program.live_buffers import BufferRole

LENGTH, GROUPS, HEADS, KEY_SIZE, VALUE_SIZE, BLOCK, SELECTED = 8192, 4, 16, 128, 64, 64, 16
BATCH, MESH, SHARDED = 4, {"replica": 1, "data": 2, "model": 2}, {"batch": "data", "kv_head": "model"}
V5P = GENERATIONS["v5p"]


def step_of(method, is_training=False, selected=SELECTED, length=LENGTH):
    shape = (BATCH, length, GROUPS, HEADS, KEY_SIZE)
    return block_step(shape, VALUE_SIZE, selected, jnp.bfloat16, is_training, BLOCK, method)


def cost_of(step, compute=SHARDED):
    """The cost of the call, or of the call and of its gradient."""
    return [device_cost(task, sharding(MESH, compute, core_memory=V5P.core_memory)) for task in block_tasks(step)]


def native_work(method):
    """One device's work for a layer of Native Sparse Attention that selects as many blocks."""
    config = NativeSparseConfig(
        64, GROUPS, HEADS, KEY_SIZE, VALUE_SIZE, 32, 16, selection_block=BLOCK, selected=SELECTED, window=512
    )  # fmt: skip
    parts = PositionParts(LENGTH)
    return SparseWork(config, method, 2, BATCH / 2, GROUPS / 2, parts, ("data",), (), V5P.core_memory)


@pytest.mark.parametrize("method", SparseKernel)
def test_the_price_is_that_of_the_selected_branch(method):
    """Stages of a device are among those of the layer, forward and backward; of a kernel also the tables of tiles."""
    passes = cost_of(step_of(method, is_training=True))
    for cost, is_gradient in zip(passes, (False, True), strict=True):
        *stages, operands = cost.stages
        assert len(stages) == (2 if method is SparseKernel.KERNEL else 1)
        assert {*stages} <= {*call_stages(native_work(method), is_gradient)}
        assert cost.matmul.flops == pytest.approx(sum(stage.flops for stage in stages))
        assert operands.flops == 0 < operands.bytes


def test_the_price_grows_with_the_blocks():
    """In proportion where blocks are gathered; a kernel's tiles have fewer blocks than their queries near the start."""

    def priced(method, selected, length=LENGTH):
        (cost,) = cost_of(step_of(method, selected=selected, length=length))
        return cost.stages[:-1]

    (one,), (four,) = priced("gathered_blocks", 4), priced("gathered_blocks", 16)
    assert four == one.times(4)
    one, four = (priced("kernel", selected, 1 << 20)[-1] for selected in (16, 64))
    assert four.flops == pytest.approx(4 * one.flops, rel=1e-2)
    assert four.seconds(V5P) > 2 * one.seconds(V5P)
    assert priced("dense_mask", 4) == priced("dense_mask", 16)


def test_flops_of_the_model():
    """By hand, over all devices: each query has the tokens of 16 blocks, or those up to its own if they are fewer."""
    (task,) = block_tasks(step_of("kernel"))
    keys = sum(min(t + 1, SELECTED * BLOCK) for t in range(LENGTH))
    assert given_block_flops(task) == 2 * BATCH * GROUPS * HEADS * keys * (KEY_SIZE + VALUE_SIZE)


def test_devices_that_share_heads_of_a_group():
    """Each has half of the heads, and all blocks; gradients of keys and values are added up."""
    forward, gradient = cost_of(step_of("dense_mask", True), {"batch": "data", "q_heads_per_group": "model"})
    whole, whole_gradient = cost_of(step_of("dense_mask", True), {"batch": "data"})
    assert forward.stages[0] == whole.stages[0].times(0.5)
    assert not forward.traffic and not whole.traffic
    key, value = (BATCH // 2 * LENGTH * GROUPS * size * 2 for size in (KEY_SIZE, VALUE_SIZE))
    assert [traffic.bytes for traffic in gradient.traffic] == [key, value]
    # JAX adds up all gradients over devices that compute the same
    assert [traffic.bytes for traffic in whole_gradient.traffic] == [HEADS * key, key, value]


def transient_bytes(step, role, assignment):
    (buffer,) = {buffer for point in step.points for buffer, _ in point if buffer.role is role}
    return buffer, buffer_bytes(buffer, assignment)


@pytest.mark.parametrize("method", SparseKernel)
def test_memory_is_that_of_the_selected_branch(method):
    """By hand, on one of four devices: float32 keys, and a chunk's scores and gathered rows, or what a kernel needs."""
    step, assignment = step_of(method, is_training=True), sharding(MESH, SHARDED, core_memory=V5P.core_memory)
    heads, channels = BATCH // 2 * GROUPS // 2, KEY_SIZE + VALUE_SIZE
    keys, rows = heads * LENGTH * channels, heads * LENGTH * HEADS
    # 8 queries of 16 heads are a tile, whose union has at most 128 blocks
    tables = heads * LENGTH // 8 * 128 * 8
    scores = {SparseKernel.DENSE_MASK: LENGTH, SparseKernel.GATHERED_BLOCKS: SELECTED * BLOCK, SparseKernel.KERNEL: 0}
    chunk = 2 * 4 * heads * 256 * HEADS * scores[method]
    gathered = heads * 256 * SELECTED * BLOCK * channels * (4 + 2) if method is SparseKernel.GATHERED_BLOCKS else 0
    kernel = tables + rows * 4 + keys * 2 if method is SparseKernel.KERNEL else 0
    _, forward = transient_bytes(step, BufferRole.BLOCK_ATTENTION, assignment)
    assert forward == 4 * keys + chunk + gathered + kernel
    buffer, gradient = transient_bytes(step, BufferRole.BLOCK_GRADIENT, assignment)
    assert gradient == 8 * keys + 2 * chunk + gathered + (kernel + rows * 4 if kernel else 0)
    assert buffer.array.dims == block_tasks(step)[0].operands[0].dims
