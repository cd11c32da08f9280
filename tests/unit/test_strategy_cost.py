"""Predicted cost of attention strategies, against measured runs, formulas of received bytes, and masks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.attention.strategy_cost import (
    HeadShape,
    ShardedAttention,
    enumerate_layouts,
    rank_strategies,
    strategy_cost,
)
from shardplan.cost.calibration import compiler_quirks, load_calibration
from shardplan.cost.roofline import step_tasks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import build_model
from shardplan.plan.attention_plan import AttentionPlan, Strategy
from shardplan.plan.workload.workload import Workload
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import TaskKind

CAUSAL = Pattern(causal=True)
LLAMA_8B = HeadShape(batch=1, key_heads=8, queries_per_key_head=4, head_size=128, value_size=128)


def mesh(data):
    return {"replica": 1, "data": data, "model": 1}


CASES = {
    # MaxText's published seconds per step, https://github.com/AI-Hypercomputer/maxtext/pull/4687 and docs/log.md:
    # llama2-7b, 64 sequences of 32K tokens, each sharded over 16 of 64 chips of v5p
    "llama2-7b": {("all_gather", 16, 1): 8.83, ("ulysses", 1, 16): 8.90, ("ring", 16, 1): 16.38},
    # llama3-8b, 256K tokens sharded over all 64 chips
    "llama3-8b": {
        ("hybrid", 8, 8): 9.34, ("hybrid", 16, 4): 9.50, ("all_gather", 64, 1): 9.71, ("ring", 64, 1): 10.78
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_auto_ranks_strategies_as_measured(model):
    heads, length, sizes = {
        "llama2-7b": (HeadShape(16, 32, 1, 128, 128), 32768, {"replica": 4, "data": 16, "model": 1}),
        "llama3-8b": (LLAMA_8B, 262144, mesh(64)),
    }[model]
    measured, predicted = CASES[model], {}
    attention = ShardedAttention(CAUSAL, heads, ("data",), sizes, parse_slice("v5p-128"))
    for strategy, ring, ulysses in measured:
        layout = SequenceLayout(length, ring, ulysses, "contiguous" if ring == 1 else "zigzag")
        cost = strategy_cost(Strategy(strategy), layout, attention)
        predicted[strategy, ring, ulysses] = cost.seconds
    assert sorted(predicted, key=predicted.get) == sorted(measured, key=measured.get)
    ranked = rank_strategies(enumerate_layouts(length, sizes["data"]), attention)
    assert ranked[0].strategy != Strategy.RING


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_the_planner_ranks_strategies_as_measured(model):
    """The attention of a training step, with the gradients."""
    base, config, hardware = (
        read_config("llama-3.1-8b", None),
        {"max_position_embeddings": 262144},
        parse_slice("v5p-128"),
    )
    if model == "llama2-7b":
        config = {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32}
    length, batch = (32768, 64) if model == "llama2-7b" else (262144, 1)
    workload = Workload("train", batch, length, "float32", "bfloat16")
    step = plan_step(build_model({**base, **config}, length), workload)
    measured, predicted = CASES[model], {}
    for strategy, ring, ulysses in measured:
        if strategy == "hybrid":
            sizes, mapping = {"replica": ring, "data": ulysses, "model": 1}, {"position": ("replica", "data")}
        else:
            sizes = {"replica": 64 // (ring * ulysses), "data": ring * ulysses, "model": 1}
            mapping = {"batch": ("replica",), "position": ("data",)}
        attention = AttentionPlan(strategy, ulysses, ring, "contiguous" if ring == 1 else "zigzag")
        assignment = ShardingAssignment(
            sizes, mapping, {}, step.merged_axes, step.activation_axes, compiler_quirks(hardware), attention
        )
        predicted[strategy, ring, ulysses] = sum(
            seconds.total
            for task, _, seconds in step_tasks(step, assignment, hardware, load_calibration("v5p"))
            if task.kind == TaskKind.ATTENTION
        )
    assert sorted(predicted, key=predicted.get) == sorted(measured, key=measured.get)


@given(
    st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1), (2, 2), (3, 2), (1, 6)]),
    st.sampled_from([(4, 8), (2, 6), (7, 4), (1, 8), (16, 1)]),
    st.sampled_from([64, 128]),
)
def test_received_bytes(degrees, counts, size):
    """The formulas of the table in `shardplan.cost.attention`, in units of batch x head size, bfloat16."""
    (ring, u), (keys, per_key) = degrees, counts
    heads = HeadShape(3, keys, per_key, size, size)
    length, parts = 1024 * ring * u, ring * u
    attention = ShardedAttention(CAUSAL, heads, ("data",), mesh(parts), parse_slice(f"cpu-{parts}"))
    queries = keys * per_key
    unit = 3 * size * 2
    if u == 1:
        for strategy in ("ring", "all_gather"):
            cost = strategy_cost(strategy, SequenceLayout(length, ring), attention)
            assert cost.received_bytes == 2 * keys * (length / parts) * (parts - 1) * unit
        return
    layout = SequenceLayout(length, ring, u)
    cost = strategy_cost("ulysses" if ring == 1 else "hybrid", layout, attention)
    if keys % u == 0:
        exchanged = (2 * queries + 2 * keys) * (length / parts) * (u - 1) / u
        assert cost.received_bytes == (exchanged + 2 * keys * (length / parts) * (ring - 1)) * unit
    elif u % keys == 0 and queries % u == 0:  # a copy of a key head for every device
        exchanged = (2 * queries + 2 * u) * (length / parts) * (u - 1) / u
        assert cost.received_bytes == (exchanged + 2 * u * (length / parts) * (ring - 1)) * unit
    else:
        assert cost.received_bytes > 0


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_ulysses_receives_less_than_a_ring_above_a_degree(degree):
    """Ulysses receives less if and only if P > 1 + Hq / Hkv."""
    heads = HeadShape(1, 16, 3, 64, 64)
    attention = ShardedAttention(CAUSAL, heads, ("data",), mesh(degree), parse_slice(f"cpu-{degree}"))
    ring, ulysses = (
        strategy_cost(strategy, SequenceLayout(8192, degree // u, u), attention).received_bytes
        for strategy, u in (("ring", 1), ("ulysses", degree))
    )
    assert (ulysses < ring) == (degree > 1 + 3)


@pytest.mark.parametrize(
    ("pattern", "documents", "strategy", "kind", "received"),
    [
        (Pattern(causal=True, window=4096), None, "ring", "contiguous", 2 * 8 * 8192 * 128 * 2),  # one hop
        (Pattern(causal=True, chunk=8192), None, "ring", "contiguous", 0),  # each device has a chunk
        (
            Pattern(causal=True, chunk=12288),
            None,
            "ring",
            "contiguous",
            2 * 8 * 8192 * 128 * 2,
        ),  # reaches into one more
        (CAUSAL, (8192,) * 8, "ring", "contiguous", 0),
        (CAUSAL, None, None, "zigzag", None),
        (CAUSAL, (40960, 24576), None, "documents", None),
    ],
)
def test_best_layout_depends_on_the_mask(pattern, documents, strategy, kind, received):
    """64K tokens of an 8B model on 8 devices of v5p."""
    attention = ShardedAttention(pattern, LLAMA_8B, ("data",), mesh(8), parse_slice("v5p-16"))
    ranked = rank_strategies(enumerate_layouts(65536, 8, documents=documents), attention)
    best = ranked[0] if kind != "contiguous" or received else min(ranked, key=lambda each: each.received_bytes)
    assert best.layout.kind == kind and strategy in (None, best.strategy)
    assert received is None or best.received_bytes == received
    assert {each.layout.kind for each in ranked} == {*SequenceOrder} - (set() if documents else {"documents"})


def test_strategies_that_exceed_memory_are_left_out():
    attention = ShardedAttention(CAUSAL, LLAMA_8B, ("data",), mesh(8), parse_slice("v5p-16"))
    layouts = enumerate_layouts(65536, 8)
    everything = rank_strategies(layouts, attention)
    limit = sorted(each.held_bytes for each in everything)[len(everything) // 2]
    few = rank_strategies(layouts, attention, available=limit)
    assert few == [each for each in everything if each.held_bytes <= limit] and 0 < len(few) < len(everything)
    assert all(math.isfinite(each.seconds) for each in everything)
