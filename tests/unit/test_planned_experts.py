"""What a plan says of routed experts: work, traffic and choices, against calculations by hand."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from shardplan.cost.calibration import Calibration
from shardplan.cost.experts import work_of
from shardplan.cost.gspmd import device_cost
from shardplan.cost.roofline import model_flops, task_seconds, transfer_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.execution import specialize
from shardplan.experts.levanter import has_parallel_experts
from shardplan.experts.method import ExpertMethod, ExpertStrategy
from shardplan.experts.planned_model import with_own_experts
from shardplan.experts.tiles import TileShape
from shardplan.hardware import parse_slice, place_mesh
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import DECODER, LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.mapping import as_tuples
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import Workload
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import TaskKind
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan, model_from_config
from shardplan.verify.cache import facts_digest
from shardplan.verify.case import Case

TOKENS, DEVICES, LAYERS, EXPERTS, PER_TOKEN, EMBED, MLP = 64 * 4096, 32, 32, 8, 2, 4096, 14336
"""Mixtral 8x7B, 64 sequences on 32 devices."""
MESH = {"replica": 4, "data": 8, "model": 1}
OVER_DATA = {"batch": ("replica", "data"), "experts": ("data",)}
OVER_ALL = {**OVER_DATA, "expert_mlp": ("replica",)}
GATHER, EXCHANGE, WEIGHTS = ExpertStrategy


def traced_step(kind, spread=0.0):
    model = build_model(read_config("mixtral-8x7b", None), 4096)
    dtype = "float32" if kind == "train" else "bfloat16"
    return plan_step(model, Workload(kind, 64, 4096, dtype, "bfloat16", expert_load_spread=spread))


def block_cost(kind, compute, method, params=None, spread=0.0):
    """The work of a device for a block, and the cost of all blocks: of the gradient in training."""
    step = traced_step(kind, spread)
    assignment = ShardingAssignment(MESH, compute, params or {}, step.merged_axes, step.activation_axes, experts=method)
    task = [each for each in step.tasks if each.kind == TaskKind.EXPERTS][-1]
    return work_of(task, assignment), device_cost(task, assignment)


def received(cost):
    """Bytes that a device receives in a layer, by kind of collective and cause."""
    return {(str(each.kind), each.cause): each.bytes / LAYERS for each in cost.traffic}


TOKEN_BYTES = TOKENS / DEVICES * EMBED * 2
"""Bytes of a device's tokens, of bfloat16."""


def test_tokens_are_gathered():
    """By the eight devices that share the experts: each has one, and a quarter of all rows of it."""
    work, cost = block_cost("eval", OVER_DATA, ExpertMethod(GATHER))
    assert (work.rows, work.experts, work.mlp) == (TOKENS * PER_TOKEN / DEVICES, 1, MLP)
    assert work.buffer_rows == 1.25 * work.rows
    assert cost.matmul.flops == LAYERS * 3 * 2 * work.rows * EMBED * MLP
    routing = 7 * TOKENS / DEVICES * PER_TOKEN * 8
    assert received(cost) == {
        ("all-gather", "tokens gathered for experts"): 7 * TOKEN_BYTES + routing,
        ("reduce-scatter", "sums of the outputs of experts"): 7 * TOKEN_BYTES,
    }


def test_hidden_states_are_sharded_too():
    """Then 32 devices gather each other's tokens, and each has a quarter of one expert."""
    work, cost = block_cost("eval", OVER_ALL, ExpertMethod(GATHER))
    assert (work.rows, work.experts, work.mlp) == (TOKENS * PER_TOKEN / EXPERTS, 1, MLP / 4)
    # a reduce-scatter over all devices is compiled as an all-reduce
    assert received(cost)["all-reduce", "sums of the outputs of experts"] == 2 * 31 * TOKEN_BYTES


@pytest.mark.slow
def test_tokens_are_exchanged():
    """Seven of eight rows have their expert on another device, there and back; a routing weight has 128 elements."""
    work, cost = block_cost("eval", OVER_DATA, ExpertMethod(EXCHANGE))
    rows = TOKENS * PER_TOKEN / DEVICES
    assert work.rows == rows
    row, weight, exchanged = 2 * EMBED, 4 * 128, ("all-to-all", "tokens exchanged with experts")
    assert received(cost) == {exchanged: rows * (2 * row + weight) * 7 / 8}
    _, cost = block_cost("train", OVER_DATA, ExpertMethod(EXCHANGE))
    assert received(cost)[exchanged] == rows * (3 * row + 2 * weight) * 7 / 8


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "own_experts"), [(("data",), 1), (("replica",), 2), ((), 8)])
def test_the_busiest_device_of_skewed_experts(axes, own_experts):
    """The mean of many draws of normal loads; where every device has all experts, the load is balanced."""
    spread, shards = 0.25, EXPERTS // own_experts
    loads = np.random.default_rng(0).normal(1, spread, size=(20000, shards, own_experts))
    expected = loads.mean(-1).max(-1).mean() if shards > 1 else 1
    compute = {"batch": ("replica", "data"), "experts": axes}
    balanced, _ = block_cost("eval", compute, ExpertMethod(GATHER))
    skewed, _ = block_cost("eval", compute, ExpertMethod(GATHER), spread=spread)
    assert skewed.rows / balanced.rows == pytest.approx(expected, rel=0.01)
    assert skewed.buffer_rows == balanced.buffer_rows


@pytest.mark.slow
def test_a_spread_changes_the_plan(make_config, raises_message):
    """A skewed load takes longer, and is not that of a step with another spread; no load has a negative one."""
    config = {"model_config": "mixtral-8x7b", "hardware_slice": "v5p-64", "workload_batch": 32}
    balanced, skewed = (make_plan(make_config(**config, workload_expert_load_spread=s)) for s in (0.0, 0.5))
    assert skewed.cost.step_seconds > balanced.cost.step_seconds
    assert skewed.workload.expert_load_spread == 0.5
    with raises_message(ConfigError):
        make_plan(make_config(**config, workload_expert_load_spread=-0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hardware", "spread"), [("mixtral-8x7b", "v5p-64", "0.27"), ("deepseek-v3", "v5p-256", "0.017")]
)
def test_an_even_plan_says_what_a_measured_spread_takes(make_config, name, hardware, spread):
    """That of routers which a loss balances, and of those with corrections; as a plan of the same layout has it."""
    settings = {"model_config": name, "hardware_slice": hardware, "workload_batch": 32, "workload_position": 2048}
    plan = make_plan(make_config(**settings))
    [reason] = [each for each in plan.search.reasons if "as unevenly as" in each]
    found = re.search(r"expert_load_spread (\S+)\): (?:(\S+) %|same) time$", reason)
    config = make_config(**settings, workload_expert_load_spread=float(spread))
    layout = plan.mesh, as_tuples(plan.compute_mapping), as_tuples(plan.param_mapping), plan.attention, plan.experts
    model = model_from_config(config)
    uneven, even = (
        plan_given_mappings(replace(config, workload=replace(plan.workload, expert_load_spread=each)), model, *layout)
        for each in (float(spread), 0.0)
    )
    expected = 100 * (uneven.cost.step_seconds / even.cost.step_seconds - 1)
    assert found and found[1] == spread and float(found[2] or 0) == pytest.approx(expected, abs=0.06)
    assert not any("as unevenly as" in each for each in uneven.search.reasons)


@pytest.mark.parametrize(
    ("compute", "method", "params"),
    [
        (OVER_DATA, ExpertMethod(WEIGHTS), {"experts": ("data",)}),
        ({"batch": ("replica", "data")}, ExpertMethod(GATHER), {"experts": ("data",)}),
    ],
)
def test_weights_are_gathered(compute, method, params):
    """By the strategy, or because experts are sharded only while they are stored: every device has all of them."""
    work, cost = block_cost("eval", compute, method, params)
    assert (work.rows, work.experts) == (TOKENS * PER_TOKEN / DEVICES, EXPERTS)
    weights = 3 * EXPERTS * EMBED * MLP * 2 * 7 / 8
    assert sum(size for (kind, _), size in received(cost).items() if kind == "all-gather") == weights
    # rows of all but the first expert begin within a tile; all matrices are read for each part of the tokens
    for calls in cost.kernels:
        assert calls.matmul.rows * calls.count == work.rows * calls.count / work.chunks
        tiles = TileShape(512, calls.matmul.inner, calls.matmul.columns)
        assert calls.matmul.row_tiles(tiles) == work.rows / work.chunks / 512 + EXPERTS - 1


def test_gathers_of_weights_run_behind_their_layer():
    """Behind projections and attention too, of which each of the devices computes a part, and not behind the logits."""
    step, hardware = traced_step("eval"), parse_slice("v5p-64")
    assignment = ShardingAssignment(
        MESH, OVER_DATA, {}, step.merged_axes, step.activation_axes, experts=ExpertMethod(WEIGHTS)
    )
    [task] = [each for each in step.tasks if each.kind == TaskKind.EXPERTS]
    projections = 2 * TOKENS * EMBED * (2 * 4096 + 2 * 1024 + EXPERTS)  # queries, outputs, keys, values and the router
    attention = 4 * TOKENS * 4096 * 4096 * (4097 / 8192)
    assert task.layer_flops == pytest.approx(projections + attention, rel=1e-6)
    calibration = Calibration(overlap=0.5)
    seconds = task_seconds(task, device_cost(task, assignment), place_mesh(hardware, MESH), calibration)
    beside = LAYERS * task.layer_flops / DEVICES / hardware.generation.flops
    [gather] = device_cost(task, assignment).traffic
    hidden = transfer_seconds(gather, place_mesh(hardware, MESH)) - seconds.exposed
    assert hidden == pytest.approx(0.5 * (seconds.compute + beside))


def test_layers_of_one_loop_divide_what_is_beside_their_experts():
    """GPT-OSS has layers with and without a window in turn."""
    step = plan_step(build_model(read_config("gpt-oss-20b", None), 4096), Workload("eval", 16, 4096))
    first, second = [task.layer_flops for task in step.tasks if task.kind == TaskKind.EXPERTS]
    beside = [task for task in step.tasks if task.kind in (TaskKind.CONTRACTION, TaskKind.ATTENTION)]
    assert first == second == sum(task.flops for task in beside if task.executions == 12) / 2


@pytest.mark.slow
def test_gradients_of_weights_are_summed_over_other_tokens():
    """Devices with the same expert have parts of its gradient; there are two matmuls for each of the block's."""
    work, cost = block_cost("train", OVER_DATA, ExpertMethod(EXCHANGE))
    assert cost.matmul.flops == LAYERS * 6 * 2 * work.rows * EMBED * MLP
    gradients = [each for each in cost.traffic if each.cause.startswith("gradient of")]
    assert {each.mesh_axes for each in gradients} == {("replica",)}
    # an all-reduce of the gradient of one expert, in bfloat16
    assert sum(each.bytes for each in gradients) / LAYERS == 3 * EMBED * MLP * 2 * 2 * 3 / 4


@pytest.mark.slow
def test_the_model_has_the_flops_of_levanters_class():
    """Each token passes through two experts, by either class."""
    classes = (None, LEVANTER)
    flops = []
    for kind in ("eval", "train"):
        for name in classes:
            model = build_model(read_config("mixtral-8x7b", None, name), 1024)
            flops.append(model_flops(model, Workload(kind, 4, 1024, "bfloat16", "bfloat16")))
    assert flops[0] == pytest.approx(flops[1], rel=1e-4) and flops[2] == pytest.approx(flops[3], rel=1e-4)


@pytest.mark.slow
def test_a_plan_names_how_experts_are_computed(make_config):
    """And says what the other strategy would change; it is read back with its method."""
    config = make_config(model_config="mixtral-8x7b", hardware_slice="v5p-64", workload_batch=32)
    plan = make_plan(config)
    assert plan.experts is not None and plan.compute_mapping["experts"]
    assert "experts" in plan.to_json() and Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    others = {GATHER: EXCHANGE, EXCHANGE: GATHER}
    other = f"other expert strategies, by time: {others[plan.experts.strategy]} "
    assert any(reason.startswith(other) for reason in plan.search.reasons)
    dense = make_plan(make_config(model_config="llama-3.1-8b", hardware_slice="v5p-16", workload_batch=8))
    assert dense.experts is None and "experts" not in dense.to_json()


@pytest.mark.slow
def test_plans_with_other_shardings_have_other_facts(make_config):
    """The rows of a block depend on its sharding: verdicts on several plans of a model do not share them."""
    config = make_config(model_config="mixtral-8x7b", hardware_slice="v5p-64", workload_batch=32)
    hf_config, plan = read_config("mixtral-8x7b", None), make_plan(config)
    other = replace(plan, compute_mapping={**plan.compute_mapping, "experts": [], "expert_mlp": ["data"]})
    digests = {facts_digest(Case("", each, hf_config)) for each in (plan, other)}
    assert len(digests) == 2


@pytest.mark.slow
def test_experts_of_levanters_class_are_planned_as_the_decoders(make_config):
    """Both have the same blocks, and Levanter's class keeps its parameters and their axes."""
    plans = []
    for name in (DECODER, LEVANTER):
        config = make_config(
            model_config="mixtral-8x7b", hardware_slice="v5p-64", workload_batch=32, model_levanter_class=name
        )
        plans.append(make_plan(config))
    decoder, levanter = plans
    assert levanter.mesh == decoder.mesh and levanter.experts == decoder.experts
    assert levanter.compute_mapping["experts"] == decoder.compute_mapping["experts"]
    assert levanter.cost.step_seconds == pytest.approx(decoder.cost.step_seconds, rel=0.01)
    assert levanter.memory.peak == pytest.approx(decoder.memory.peak, rel=0.01)
    [gate] = [each for each in levanter.parameters if each.path.endswith("block_sparse_moe.gate.weight")]
    assert {*gate.axes} == {"layers", "embed", "experts"} and not any("*" in axis for axis in levanter.model.axes)


@pytest.mark.slow
def test_levanters_own_experts_are_planned_as_before(make_config):
    """Experts are not sharded in computations; a plan of before that has no method runs with Levanter's own blocks."""
    config = make_config(
        model_config="mixtral-8x7b", hardware_slice="v5p-64", workload_batch=32, model_levanter_class=LEVANTER
    )
    planned = model_from_config(config)
    own = with_own_experts(planned)
    plan = make_plan(config, own)
    assert plan.experts is None and not plan.compute_mapping.get("experts")
    for model in (own, planned):
        assert not has_parallel_experts(specialize(model, plan).template)
        assert has_parallel_experts(specialize(model, replace(plan, experts=ExpertMethod())).template)


@pytest.mark.parametrize(
    "change", [{"buffer_factor": 0.0}, {"buffer_factor": float("nan")}, {"token_chunks": 0}, {"strategy": "gather"}]
)
def test_impossible_methods_are_refused(change, raises_message):
    with raises_message(ConfigError):
        ExpertMethod(**change)
