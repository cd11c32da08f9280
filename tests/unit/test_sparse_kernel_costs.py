"""Plans for the kernels of Native Sparse Attention: their time and memory, and where there are none."""

from dataclasses import replace

import pytest
from test_planned_sparse_attention import CONFIG, assignment, step_of

from shardplan.config import load_config
from shardplan.cost.memory import estimate_memory
from shardplan.cost.sparse.kernels import (
    compressed_stages,
    kernel_bytes,
    mean_union,
    selected_ranges,
    selected_stages,
    window_stages,
)
from shardplan.cost.sparse.work import SparseWork
from shardplan.decoder import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.errors import ConfigError
from shardplan.execution import specialize
from shardplan.hardware import GENERATIONS
from shardplan.model.registry import build_model
from shardplan.plan.attention_plan import SparseKernel
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.search.make_plan import make_plan

PAPER = NativeSparseConfig(2560, 4, 16, 128, 128, block=32, stride=16, selection_block=64, selected=16, window=512)
ODD = {**CONFIG, "native_sparse_attention": {
    "block": 4, "stride": 4, "selection_block": 12, "selected": 16, "window": 512}}  # fmt: skip


def work_of(length, devices=1, order=SequenceOrder.CONTIGUOUS, generation="v5p"):
    parts, memory = PositionParts(length, devices, order), GENERATIONS[generation].core_memory
    return SparseWork(PAPER, SparseKernel.KERNEL, 2, 1, 4, parts, (), (), memory)


def milliseconds(stages, generation="v5p"):
    return [1e3 * stage.seconds(GENERATIONS[generation]) for stage in stages]


def test_seconds_of_kernels():
    """By hand, at 64K: cycles of two cores of 1.75 GHz; of another generation in the ratio of FLOP/s."""
    tiles, cycles = 4 * 8192, 2 * 1.75e6
    # 24 blocks are 2 steps of 1,024 keys
    forward = tiles * (688 * 2 + 407) / cycles
    assert milliseconds(selected_stages(work_of(65536), 24, False)) == pytest.approx([forward])
    # 2 ranges of 32,768 keys, each with 12 blocks of a tile, which are 2 steps of 512 keys
    gradients = tiles * 2 * (712 * 2 + 360) / cycles
    assert milliseconds(selected_stages(work_of(65536), 24, True)) == pytest.approx([gradients])
    # 2,048 tiles of 32 queries a group, 8 chunks of 512 keys
    compressed = [8192 * (a * 4.5 + b * 8 + c) / cycles for a, b, c in ((1218, 130, 300), (760, 110, 515))]
    assert milliseconds(compressed_stages(work_of(65536), False)) == pytest.approx(compressed)
    gradients = tiles * (674 * 4.5 + 204) / cycles
    assert milliseconds(compressed_stages(work_of(65536), True)) == pytest.approx([gradients])
    # 5 blocks of keys for each tile
    window = 8192 * 5 * (364 + 55) / cycles
    assert milliseconds(window_stages(work_of(65536), False)) == pytest.approx([window])
    v5e = GENERATIONS["v5p"].flops / GENERATIONS["v5e"].flops
    assert milliseconds(window_stages(work_of(65536), False), "v5e") == pytest.approx([v5e * window])


@pytest.mark.parametrize(("length", "is_gradient", "tile_bytes"), [
    (65536, False, 7 * 1024 * 256 * 2), (32768, True, 128 * (256 * 2 + 2 * 128 * 2)),
    (65536, True, 2 * 128 * (256 * 2 + 2 * 128 * 4)),
])  # fmt: skip
def test_unrelated_neighbours_are_limited_by_copies(length, is_gradient, tile_bytes):
    """Where cycles are few, a kernel takes its bytes at 80 % of the bandwidth.

    These are 7 steps of 1,024 keys forward; and for each range of keys queries, gradients of the output, and dq.
    """
    generation = replace(GENERATIONS["v5p"], hbm_bandwidth=1e9)
    (stage,) = selected_stages(work_of(length), 100, is_gradient)
    assert stage.seconds(generation) == pytest.approx(4 * (length // 8) * tile_bytes / 0.8e9)


def test_flops_of_gradients():
    """By hand, at 64K: 5 products for all scores of 24 blocks, and of the compressed keys that a tile sees."""
    rows = 65536 * 64
    (stage,) = selected_stages(work_of(65536), 24, True)
    assert stage.flops == 2 * 5 * 128 * rows * 24 * 64
    (stage,) = compressed_stages(work_of(65536), True)
    assert stage.flops == 2 * 5 * 128 * rows * 4.5 * 512


@pytest.mark.parametrize(("generation", "ranges"), [("v4", 8), ("v5e", 1), ("v5p", 2), ("v6e", 1), ("tpu7x", 2)])
def test_ranges_follow_from_the_memory_of_a_core(generation, ranges):
    """At 64K, 96 MiB of keys, values and gradients; a quarter of the memory is for tiles."""
    work = work_of(65536, generation=generation)
    assert selected_ranges(work) == ranges
    # a sum of ranges is in float32
    carried = 65536 * 64 * 128 * 4 if ranges > 1 else 0
    whole = replace(work, core_memory=2**40)
    assert kernel_bytes(work, True) - kernel_bytes(whole, True) == carried


@pytest.mark.parametrize("length", [2048, 65536])
def test_union_of_a_tile(length):
    """8 neighbours that select 16 blocks have 24 together, or all blocks up to their own."""
    expected = [min(own + 1, 16 + 7 * 0.07 * 16) for own in range(length // 64)]
    assert mean_union(PAPER, 8, length) == pytest.approx(sum(expected) / len(expected), rel=1e-2)


def test_positions_in_zigzag_order_are_balanced():
    """The last device of a contiguous order sees almost all chunks of compressed keys."""
    contiguous, zigzag = (
        sum(milliseconds(compressed_stages(work_of(262144, 8, order), False)))
        for order in (SequenceOrder.CONTIGUOUS, SequenceOrder.ZIGZAG)
    )
    assert 1.5 < contiguous / zigzag < 2


def test_memory_of_kernels():
    """By hand, at 64K: tables of 128 blocks, log-sum-exp of three branches, keys in bfloat16, and float32 dq."""
    tables, log_sums, keys = 4 * 8192 * 128 * 8, 3 * 65536 * 64 * 4, 4 * (2 * 65536 + 4095) * 256 * 2
    assert kernel_bytes(work_of(65536), False) == tables + log_sums + keys
    dq = 65536 * 64 * 128 * 4
    assert kernel_bytes(work_of(65536), True) == tables + 2 * log_sums + dq + keys


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_a_step_needs_the_least_memory_by_kernels(kind):
    step = step_of(kind, 65536, batch=1)
    peaks = {kernel: estimate_memory(step, assignment(step, {}, {}, kernel=kernel)).peak for kernel in SparseKernel}
    assert min(peaks, key=peaks.get) is SparseKernel.KERNEL


def test_a_layer_without_kernels(raises_message):
    """The reason is in the plan, and a plan that was edited is refused with it."""
    config = load_config(
        model={"config": "x"}, hardware={"slice": "v5p-16"}, workload={"batch": 8, "position": 12288}
    )  # fmt: skip
    model = build_model(dict(ODD), 12288)
    plan = make_plan(config, model)
    assert plan.attention.kernel is not SparseKernel.KERNEL
    reason = "selection_block is 12; kernels copy blocks of a multiple of 8 tokens: use 16, or another method"
    assert f"excluded: kernels of native sparse attention: {reason}" in plan.search.reasons
    edited = replace(plan, attention=replace(plan.attention, kernel="kernel"))
    with raises_message(ConfigError):
        specialize(model, edited)
