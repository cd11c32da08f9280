"""Collectives and costs of sharded attention are those of its strategy, and of the compiler in training."""

import dataclasses

import pytest

from shardplan.attention.strategy_cost import HeadShape, ShardedAttention, strategy_cost
from shardplan.cost.attention import has_kernel
from shardplan.cost.calibration import compiler_quirks, load_calibration
from shardplan.cost.collectives import Purpose
from shardplan.cost.gspmd import device_cost
from shardplan.cost.roofline import step_tasks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.attention_plan import AttentionPlan, Strategy
from shardplan.plan.workload.workload import Workload
from shardplan.positions.pattern import CAUSAL
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import TaskKind


def test_keys_and_values_of_other_positions():
    model = build_model({**read_config("llama-3.1-8b", None), "num_hidden_layers": 2}, 1024)
    llama = plan_step(model, Workload("eval", 4, 1024, "bfloat16", "bfloat16"))
    compute = {"position": ("data",)}
    assignment = ShardingAssignment({"data": 4}, compute, {}, llama.merged_axes, llama.activation_axes)
    attention = [task for task in llama.tasks if task.kind == TaskKind.ATTENTION]
    moved = [(t.kind, t.bytes) for task in attention for t in device_cost(task, assignment).traffic]
    all_keys = 2 * 4 * 1024 * 8 * 128
    assert moved == [("all-gather", 2 * 3 / 4 * all_keys)] * 2
    assert not any(has_kernel(task, assignment) for task in attention)
    sequence_parallel = dataclasses.replace(assignment, attention=AttentionPlan("all_gather", ring=4))
    assert all(has_kernel(task, sequence_parallel) for task in attention)
    # the queries of the last device, a block of 256, attend to keys of all four
    assert [device_cost(task, sequence_parallel).unmasked_fraction for task in attention] == [1] * 2
    short = dataclasses.replace(
        sequence_parallel, mesh={"data": 16}, attention=AttentionPlan("all_gather", ring=16)
    )  # 64 positions per device, less than the kernel's 128
    assert not any(has_kernel(task, short) for task in attention)
    by_heads = dataclasses.replace(assignment, compute={"kv_head": ("data",), "heads": ("data",), "batch": ()})
    assert all(has_kernel(task, by_heads) for task in attention)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "queries", "is_gathered"),
    [(("model", "replica"), (), False), (("model",), (), False), ((), (), False), (("replica",), (), True),
     ((), ("data",), True)],
)  # fmt: skip
def test_heads_stay_sharded_when_they_are_flattened(heads, queries, is_gathered):
    """The output projection sums over the mesh axes of `kv_head`, unless others contradict them."""
    model = build_model({**read_config("llama-3.1-8b", None), "num_hidden_layers": 1}, 1024)
    llama = plan_step(model, Workload("eval", 4, 1024, "bfloat16", "bfloat16"))
    compute = {"kv_head": ("model", "replica"), "heads": heads, "q_heads_per_group": queries}
    mesh = {"replica": 2, "data": 2, "model": 4}
    assignment = ShardingAssignment(mesh, compute, {}, llama.merged_axes, llama.activation_axes)
    (projection,) = [task for task in llama.tasks if "heads" in dict(task.contracted)]
    moved = {t.purpose: (t.mesh_axes, t.bytes) for t in device_cost(projection, assignment).traffic}
    output = 2 * 4 * 1024 * 4096
    if is_gathered:
        axes, n = (("replica", "data", "model"), 16) if queries else (("replica", "model"), 8)
        assert moved[Purpose.FLATTENED_AXES] == (axes, output * (n - 1) / n)
    else:
        assert moved == {Purpose.PARTIAL_SUMS: (("replica", "model"), 2 * output * 7 / 8)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ulysses", "ring", "kind"),
    [
        ("all_gather", 1, 8, "zigzag"), ("ring", 1, 8, "contiguous"), ("ring", 1, 8, "zigzag"),
        ("ulysses", 8, 1, "contiguous"), ("hybrid", 4, 2, "zigzag"), ("hybrid", 2, 4, "contiguous"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_model", [1, 4])
def test_task_costs_add_up_to_the_cost_of_a_strategy(strategy, ulysses, ring, kind, by_model):
    """The planner's time of attention in a traced model is the one by which `auto` chooses a strategy."""
    model = build_model({**read_config("llama-3.1-8b", None), "num_hidden_layers": 1}, 8192)
    llama = plan_step(model, Workload("eval", 2, 8192, "bfloat16", "bfloat16"))
    sizes = {"replica": ring, "data": ulysses} if strategy == "hybrid" else {"replica": 1, "data": 8}
    along = tuple(axis for axis, size in sizes.items() if size > 1)
    compute = {"position": along, "kv_head": ("model",), "heads": ("model",)}
    hardware = parse_slice(f"v5p-{2 * 8 * by_model}")
    assignment = ShardingAssignment(
        {**sizes, "model": by_model}, compute, {}, llama.merged_axes, llama.activation_axes,
        compiler_quirks(hardware), AttentionPlan(strategy, ulysses, ring, kind),
    )  # fmt: skip
    attention = [
        (cost, seconds.total)
        for task, cost, seconds in step_tasks(llama, assignment, hardware, load_calibration("v5p"))
        if task.kind == TaskKind.ATTENTION
    ]
    # `auto` has positions on one mesh axis too, of which Ulysses takes a part
    one_axis = {"replica": 1, "data": 8, "model": by_model}
    for mesh, axes in ((assignment.mesh, along), (one_axis, ("data",))):
        cost = strategy_cost(
            Strategy(strategy),
            SequenceLayout(8192, ring, ulysses, SequenceOrder(kind)),
            ShardedAttention(CAUSAL, HeadShape(2, 8 // by_model, 4, 128, 128), axes, mesh, hardware),
        )
        assert sum(t.bytes for each, _ in attention for t in each.traffic) == pytest.approx(cost.received_bytes)
        if mesh == assignment.mesh:
            assert sum(seconds for _, seconds in attention) == pytest.approx(cost.seconds)


FLOAT32 = 2
"""Bytes of a gradient in float32, relative to those of its array in bfloat16."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ulysses", "ring", "moved"),
    [
        # the forward pass and its rematerialization receive keys and values (2); gradients are sent back
        ("all_gather", 1, 4, {"all-gather": 2 * (2 * 3), "reduce-scatter": FLOAT32 * (2 * 3)}),
        ("ring", 1, 4, {"collective-permute": 3 * (2 * 3) + FLOAT32 * (2 * 3)}),
        # queries and outputs (4 each) too, and their gradients
        ("ulysses", 4, 1, {"all-to-all": 3 * (2 + 8) * 3 / 4}),
        ("hybrid", 2, 2, {"all-to-all": 3 * (2 + 8) / 2, "collective-permute": 3 * 2 + FLOAT32 * 2}),
    ],
)
@pytest.mark.parametrize("model_class", [None, LEVANTER])
def test_attention_of_a_training_step(strategy, ulysses, ring, moved, model_class):
    """Bytes are as the TPU compiler has them: tests/compiler/test_verify.py."""
    model = build_model({**read_config("llama-3.1-8b", None, model_class), "num_hidden_layers": 1}, 4096)
    llama = plan_step(model, Workload("train", 2, 4096, "bfloat16", "bfloat16"))
    sizes = {"replica": ring, "data": ulysses} if strategy == "hybrid" else {"replica": 4, "data": 1}
    compute = {"position": tuple(axis for axis, size in sizes.items() if size > 1)}
    method, mesh = AttentionPlan(strategy, ulysses, ring), {**sizes, "model": 2}
    assignment = ShardingAssignment(mesh, compute, {}, llama.merged_axes, llama.activation_axes, attention=method)
    costs = {task: device_cost(task, assignment) for task in llama.tasks}
    received = dict.fromkeys(moved, 0.0)
    for task, cost in costs.items():
        for each in cost.traffic if task.kind == TaskKind.ATTENTION else ():
            received[each.kind] += each.bytes
    own = 2 * (2 * 4096 * 8 * 128) / 4
    assert received == {kind: times * own for kind, times in moved.items()}
    # every weight of the layer is used for all positions, those for keys and values too
    summed = {("kv_head",): [], ("kv_head", "q_heads_per_group"): []}
    for task in llama.tasks:
        for gradient in task.results:
            heads = tuple(axis for axis in gradient.axes if axis in ("kv_head", "q_heads_per_group"))
            if "embed" in gradient.axes and heads:
                summed[heads] += [each.bytes for each in costs[task].traffic if each.kind == "all-reduce"]
    of_head = 2 * 3 / 4 * 2 * 4096 * 128
    keys_and_values, queries_and_outputs = 2 * [8 * of_head], 2 * [32 * of_head]
    assert list(summed.values()) == [keys_and_values, queries_and_outputs]
