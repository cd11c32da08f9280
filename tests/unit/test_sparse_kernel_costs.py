"""Plans for the kernels of Native Sparse Attention: their time and memory, and where there are none."""

from dataclasses import replace

import pytest
from test_planned_sparse_attention import CONFIG, assignment, step_of

from shardplan.config import load_config
from shardplan.cost.memory import estimate_memory
from shardplan.cost.sparse.kernels import compressed_stages, kernel_bytes, mean_union, selected_stages, window_stages
from shardplan.cost.sparse.work import SparseWork
from shardplan.decoder import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.parts import PositionParts
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


def work_of(length, devices=1, order=SequenceOrder.CONTIGUOUS):
    return SparseWork(PAPER, SparseKernel.KERNEL, 2, 1, 4, PositionParts(length, devices, order), (), ())


def milliseconds(stages, generation="v5p"):
    return [1e3 * stage.seconds(GENERATIONS[generation]) for stage in stages]


def test_seconds_of_kernels():
    """By hand, at 64K: cycles of two cores of 1.75 GHz; of another generation in the ratio of FLOP/s."""
    tiles, blocks, cycles = 4 * 8192, 4 * 1024, 2 * 1.75e6
    forward = (724 * tiles * 3 + 500 * tiles) / cycles
    assert milliseconds(selected_stages(work_of(65536), 24, False)) == pytest.approx([forward])
    gradients = (599 * tiles * 3 + 306 * tiles) / cycles, (547 * tiles * 24 / 4 + 3700 * blocks) / cycles
    assert milliseconds(selected_stages(work_of(65536), 24, True)) == pytest.approx(gradients)
    # 2,048 tiles of 32 queries a group, 8 chunks of 512 keys
    compressed = [(a * 8192 * 4.5 + b * 8192 * 8) / cycles for a, b in ((1902, 250), (1258, 120))]
    assert milliseconds(compressed_stages(work_of(65536), False)) == pytest.approx(compressed)
    # 5 blocks of keys for each tile
    window = 8192 * 5 * (364 + 55) / cycles
    assert milliseconds(window_stages(work_of(65536), False)) == pytest.approx([window])
    v5e = GENERATIONS["v5p"].flops / GENERATIONS["v5e"].flops
    assert milliseconds(window_stages(work_of(65536), False), "v5e") == pytest.approx([v5e * window])


def test_unrelated_neighbours_are_limited_by_copies():
    """Where cycles are few, a kernel takes its bytes at 80 % of the bandwidth."""
    copied = 4 * 8192 * 100 * 64 * 256 * 2
    generation = replace(GENERATIONS["v5p"], hbm_bandwidth=1e11)
    (stage,) = selected_stages(work_of(65536), 100, False)
    assert stage.seconds(generation) == pytest.approx(copied / 0.8e11)


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
    """By hand, at 64K: tables of 128 blocks, log-sum-exp of three branches, and keys in bfloat16."""
    tables, log_sums, keys = 4 * 8192 * 128 * 8, 3 * 65536 * 64 * 4, 4 * (2 * 65536 + 4095) * 256 * 2
    assert kernel_bytes(work_of(65536), False) == tables + log_sums + keys
    assert kernel_bytes(work_of(65536), True) == 2 * tables + 2 * log_sums + keys


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_a_step_needs_the_least_memory_by_kernels(kind):
    step = step_of(kind, 65536, batch=1)
    peaks = {kernel: estimate_memory(step, assignment(step, {}, {}, kernel=kernel)).peak for kernel in SparseKernel}
    assert min(peaks, key=peaks.get) is SparseKernel.KERNEL


def test_a_layer_without_kernels():
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
    with pytest.raises(ConfigError, match="native sparse attention: selection_block is 12"):
        specialize(model, edited)
