"""Plans for Native Sparse Attention: one task a call, its FLOPs and transfers, and the method by length."""

import math
from dataclasses import replace

import pytest
from test_sparse_decoder import SIZES

from shardplan.config import load_config, parse_config
from shardplan.config.command_flags import TrainCommand
from shardplan.cost.gspmd import device_cost
from shardplan.cost.roofline import model_flops_by_kind
from shardplan.cost.sharding import ShardingAssignment
from shardplan.decoder import NativeSparseConfig
from shardplan.decoder.layers.sparse_layers import sparse_attentions
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.decoder.parts.attention.sparse.sharding.traffic import backward_traffic, forward_traffic
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.execution import specialize
from shardplan.hardware import CollectiveKind
from shardplan.levanter_config.writer import trainer_yaml
from shardplan.model.registry import build_model
from shardplan.plan.attention_plan import AttentionPlan, SparseKernel, Strategy
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import Workload
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import TaskKind
from shardplan.search.make_plan import make_plan, model_from_config
from shardplan.train.levanter_file import TrainingFiles, levanter_sections
from shardplan.train.prepare import check_training_plan, make_training_plan

CONFIG = {**SIZES, "hidden_size": 768, "num_attention_heads": 12, "head_dim": 64, "v_head_dim": 64, "vocab_size": 512,
          "intermediate_size": 1024, "max_position_embeddings": 262144,
          "native_sparse_attention": {
              "block": 32, "stride": 16, "selection_block": 64, "selected": 16, "window": 512}}  # fmt: skip
LAYER = NativeSparseConfig(768, 2, 6, 64, 64, 32, 16, 64, 16, 512)


def model_of(position=2048):
    return build_model(dict(CONFIG), position)


def step_of(kind="eval", position=2048, batch=8):
    work = Workload(kind=kind, batch=batch, position=position)
    return plan_step(model_of(position), work.resolve())


def assignment(step, mesh, compute, **attention):
    mesh = {"replica": 1, "data": 1, "model": 1, **mesh}
    return ShardingAssignment(
        mesh, compute, {}, step.merged_axes, step.activation_axes, attention=AttentionPlan(**attention)
    )


def plan_of(**sections):
    config = load_config(
        model={"config": "x"}, hardware={"slice": sections.pop("slice", "v5e-8")}, workload=sections.pop("workload"),
        **sections,
    )  # fmt: skip
    return make_plan(config, model_of(config.workload.position))


@pytest.mark.parametrize(("kind", "expected"), [("eval", [False]), ("train", [False, False, True])])
def test_a_call_is_one_task(kind, expected):
    """In training there are the forward pass, the one that is computed again, and the gradient."""
    step = step_of(kind)
    assert [task.is_sparse_gradient for task in step.sparse_tasks] == expected
    assert all(task.executions == 2 for task in step.sparse_tasks)
    assert not step.unpriced and not step.unnamed and not step.has_attention
    (attention,) = step.attention_kinds
    assert attention.sparse == LAYER
    assert attention.name == "causal, native sparse 16 x 64, window 512, head size 64"
    if kind == "eval":
        assert step.attention_calls == (attention,) * 2
    # a gradient has the shapes of what it is the gradient of
    for task in step.sparse_tasks:
        if task.is_sparse_gradient:
            assert [r.dims for r in task.results] == [o.dims for o in task.operands[1:-2]]


def test_flops_of_a_step():
    """By hand: the scores that XLA computes, masked or not; and for the model, those that count."""
    step, rows = step_of(), 8 * 2048 * 12
    (task,) = step.sparse_tasks
    compression = 2 * (8 * 2048 // 16) * 2 * 2 * (32 * 64 * 128 + 128 * 64)
    for kernel, selected in (("dense_mask", 2048), ("gathered_blocks", 1024)):
        cost = device_cost(task, assignment(step, {}, {}, kernel=kernel))
        keys = 127 + selected + 256 + 511
        assert cost.matmul.flops == pytest.approx(2 * (compression + 2 * rows * keys * 128))
    by_kind = model_flops_by_kind(model_of(), Workload(batch=8, position=2048).resolve())
    visible = [min(t + 1, 1024) + min(t + 1, 512) for t in range(2048)]
    keys = sum(visible) / 2048 + 127 / 2
    assert by_kind[step.attention_kinds[0]] == pytest.approx(2 * (compression + 2 * rows * keys * 128))


@pytest.mark.parametrize("order", [SequenceOrder.CONTIGUOUS, SequenceOrder.ZIGZAG])
@pytest.mark.parametrize("kind", ["eval", "train"])
def test_transfers_are_those_of_the_layer(order, kind):
    """Received bytes of all layers, as `traffic` has them: calls gather, and a gradient sends gradients.

    `tests/multidevice/test_planned_sparse_steps.py` has the gathers of a compiled step.
    """
    step, parts = step_of(kind), PositionParts(2048, 4, order)
    shards = {"position": ("data",), "batch": ("replica",), "kv_head": ("model",)}
    sharded = assignment(
        step, {"replica": 2, "data": 4, "model": 2}, shards, strategy=Strategy.ALL_GATHER, ring=4, layout=order
    )
    itemsize = step.sparse_tasks[0].sparse_queries.itemsize
    forward, backward = (each(LAYER, parts, 1, itemsize) for each in (forward_traffic, backward_traffic))
    per_layer = 8 // 2 * 2  # sequences of a device, layers
    for task in step.sparse_tasks:
        cost = device_cost(task, sharded)
        received = {each: 0.0 for each in CollectiveKind}
        for traffic in cost.traffic:
            if traffic.mesh_axes == ("data",):
                received[traffic.kind] += traffic.bytes / per_layer
        expected = backward if task.is_sparse_gradient else forward
        by_kind = {CollectiveKind.ALL_GATHER: forward.gathered, CollectiveKind.REDUCE_SCATTER: 0}
        if task.is_sparse_gradient:
            by_kind = {CollectiveKind.ALL_GATHER: 0, CollectiveKind.REDUCE_SCATTER: backward.gathered}
        by_kind[CollectiveKind.COLLECTIVE_PERMUTE] = expected.permuted
        assert {kind: received[kind] for kind in by_kind} == pytest.approx(by_kind)


@pytest.mark.parametrize(
    ("slice_name", "position", "kernel"),
    [
        ("cpu-8", 2048, SparseKernel.DENSE_MASK),
        ("cpu-8", 65536, SparseKernel.GATHERED_BLOCKS),
        *(("v5p-16", position, SparseKernel.KERNEL) for position in (2048, 8192, 65536, 262144)),
    ],
)
def test_the_method_follows_from_the_length(slice_name, position, kernel):
    plan = plan_of(workload={"batch": 8, "position": position}, slice=slice_name)
    assert plan.attention.kernel is kernel
    excluded = "excluded: kernels of native sparse attention: they are for TPUs" in plan.search.reasons
    assert excluded == (slice_name == "cpu-8")
    assert "q_heads_per_group" not in plan.compute_mapping
    assert any("q_heads_per_group in computations" in reason for reason in plan.search.reasons)
    for other in (SparseKernel.DENSE_MASK, SparseKernel.GATHERED_BLOCKS):
        is_slower = any(f" {other} +" in reason for reason in plan.search.reasons)
        assert is_slower == (other is not kernel)
    assert Plan.from_json(plan.to_json()).attention == plan.attention
    (attention,) = sparse_attentions(specialize(model_of(position), plan).config.segments)
    assert (attention.method.value, attention.layout) == (kernel.value, plan.attention.layout)


def test_positions_are_sharded_by_whole_blocks(raises_message):
    """32 blocks of one sequence: 16 devices share them, 64 do not."""
    plan = plan_of(workload={"batch": 1, "position": 2048}, slice="v5e-16", pin=["position=data", "mesh.data=16"])
    assert plan.attention.strategy is Strategy.ALL_GATHER
    assert plan.attention.ring == 16
    assert plan.attention.layout in (SequenceOrder.CONTIGUOUS, SequenceOrder.ZIGZAG)
    with raises_message(InfeasibleError):
        plan_of(workload={"batch": 1, "position": 2048}, slice="v5e-64", pin=["position=data", "mesh.data=64"])


@pytest.mark.parametrize(("batch", "sharded"), [(1, "position"), (8, "batch")])
def test_a_training_shards_positions_where_sequences_are_few(batch, sharded):
    """In sequence order, also for Levanter's Trainer; whatever else the search finds is slower."""
    workload = {"kind": "train", "batch": batch, "position": 65536}
    plan = plan_of(workload=workload, slice="v5p-16")
    assert {*plan.compute_mapping} == {sharded}
    assert plan.attention.runs_in_levanter
    devices = 8 if sharded == "position" else 1
    assert (plan.attention.ring, plan.attention.layout) == (devices, SequenceOrder.CONTIGUOUS)
    assert any("zigzag order in training" in reason for reason in plan.search.reasons) == (devices > 1)
    assert "shardplan eval" not in trainer_yaml(plan)
    config = load_config(model={"config": "x"}, hardware={"slice": "v5p-16"}, workload=workload)
    by_trainer = make_plan(config, model_of(65536), own_attention=True)
    assert (by_trainer.attention, by_trainer.compute_mapping) == (plan.attention, plan.compute_mapping)
    unsharded = plan_of(workload=workload, slice="v5p-16", pin=["position="])
    assert plan.cost.step_seconds <= unsharded.cost.step_seconds


def test_zigzag_order_is_refused_in_training(raises_message):
    workload = {"kind": "train", "batch": 1, "position": 2048}
    plan = plan_of(workload=workload, slice="cpu-8", pin=["position=data", "mesh.data=8"])
    check_training_plan(plan, model_of())
    edited = replace(plan, attention=replace(plan.attention, layout=SequenceOrder.ZIGZAG))
    with raises_message(ConfigError):
        check_training_plan(edited, model_of())


def test_a_pin_of_the_heads_of_a_group_is_refused(raises_message):
    with raises_message(ConfigError):
        plan_of(workload={"batch": 8, "position": 2048}, pin=["q_heads_per_group=model"])


def test_compressed_without_a_window_of_chunks():
    """A device with one chunk of queries computes nothing again for gradients."""
    step = step_of("train", position=256)
    *_, gradient = step.sparse_tasks
    forward = device_cost(step.sparse_tasks[0], assignment(step, {}, {}))
    cost = device_cost(gradient, assignment(step, {}, {}))
    assert math.isclose(cost.matmul.flops, 2 * forward.matmul.flops)
    longer = step_of("train", position=512)
    forward, cost = (device_cost(longer.sparse_tasks[i], assignment(longer, {}, {})) for i in (0, 2))
    assert math.isclose(cost.matmul.flops, 3 * forward.matmul.flops)


def test_kinds_of_tasks():
    """What was there before is as it was: projections are matmuls."""
    step = step_of()
    names = [task.label.rpartition(".")[2] for task in step.tasks if task.kind == TaskKind.CONTRACTION]
    assert {"parameters['q']", "parameters['o']", "parameters['k_slc']"} <= {*names}
    assert replace(step.attention_kinds[0], sparse=None).name == "causal, head size 64"


def test_a_training_has_the_method_and_no_packed_documents(raises_message):
    """The `model` section of Levanter's file has the plan's method; documents are refused before anything starts."""

    def sections(*argv):
        config = parse_config(["--config", "configs/nsa-tiny.yaml", *argv], TrainCommand)
        model = model_from_config(config)
        plan = make_training_plan(config, model)
        return plan, levanter_sections(config, plan, model, TrainingFiles("/x", "/x", "/x", "x"))

    plan, made = sections()
    assert plan.attention.kernel is SparseKernel.DENSE_MASK
    assert made["model"]["selected_method"] == "dense_mask"
    with raises_message(ConfigError):
        sections("--data.tokenizer=gpt2")
    *_, made = sections("--data.tokenizer=gpt2", "--data.block_cross_document_attention=false")
    assert made["data"]["block_cross_document_attention"] is False
