"""What becomes of activations: other policies from one trace, other batches from one trace, and options that add up."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from shardplan.cost.buffer_roles import buffer_bytes
from shardplan.cost.calibration import calibration_of
from shardplan.cost.gspmd import device_cost
from shardplan.cost.roofline import host_copy_seconds, seconds_beside, step_tasks, task_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import InfeasibleError
from shardplan.hardware import parse_slice, place_mesh
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.workload.checkpointing import CheckpointPolicy
from shardplan.plan.workload.workload import Workload
from shardplan.program.layer_flops import copy_window
from shardplan.program.operations import all_operations
from shardplan.program.step_trace import plan_kept_activations, plan_step, trace_step
from shardplan.program.variants.checkpointed import is_rewritable, with_policy
from shardplan.program.variants.resized import Resizer, TracedBatch
from shardplan.program.walk import build_step
from shardplan.search.make_plan import make_plan
from shardplan.search.tolerances import LEFT_OUT, TIME_RESOLUTION

pytestmark = pytest.mark.slow

POSITIONS = 256
EVERYTHING = "default+query_proj+key_proj+value_proj+context+attn_out+mlp_out"
POLICIES = (
    "offload_carries", "default+query_proj", "default+key_proj@host+value_proj@host",
    "offload_carries+context@host+attn_out", EVERYTHING,
)  # fmt: skip
SMALL = {"num_hidden_layers": 2}
MODELS = {
    "llama-3.1-8b": SMALL, "gemma-2-2b": SMALL, "mixtral-8x7b": SMALL, "qwen3-8b": SMALL,
    "deepseek-v3": {"num_hidden_layers": 4, "first_k_dense_replace": 2},
    "gpt-oss-20b": {**SMALL, "layer_types": ["sliding_attention", "full_attention"]},
    "pythia-410m": SMALL, "gemma-3-1b": {},
}  # fmt: skip
"""Bundled model -> keys of its config.json that are changed, so that it is traced quickly."""
OTHERS = tuple(name for name in MODELS if name not in ("llama-3.1-8b", "mixtral-8x7b"))
CHOSEN = ["llama-3.1-8b", "mixtral-8x7b", *(pytest.param(name, marks=pytest.mark.whole) for name in OTHERS)]


def model_of(name, class_name=LEVANTER):
    return build_model({**read_config(name, None, class_name), **MODELS[name]}, POSITIONS)


def training(batch=8, microbatches=1, policy="default"):
    return Workload("train", batch, POSITIONS, gradient_checkpointing=policy, microbatches=microbatches).resolve()


def facts(step):
    """Return the tasks and the points of a step, in no order; loops and the order of summands are of one trace."""
    tasks = []
    for task in step.tasks:
        task = replace(task.cost_key, loop=None)
        in_order = task.operands if task.kind != "elementwise" else tuple(sorted(task.operands, key=repr))
        tasks.append(replace(task, operands=in_order, first_used_weights=()).cost_key)
    return Counter(tasks), {frozenset(point) for point in step.points}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_policy_is_that_of_its_own_trace(name, microbatches):
    """The program that JAX makes of a policy has the same tasks, and the same live buffers at every point."""
    model = model_of(name)
    base = trace_step(model, training(microbatches=microbatches))
    names = {operation.activation for operation in all_operations(base.operations)}
    for text in POLICIES:
        policy = CheckpointPolicy.parse(text)
        # Levanter's Mixtral has no output of an MLP with a name
        kept, offloaded = (tuple(filter(names.__contains__, each)) for each in (policy.kept, policy.offloaded))
        policy = replace(policy, kept=kept, offloaded=offloaded)
        assert is_rewritable(base, policy)
        expected = build_step(trace_step(model, training(8, microbatches, str(policy))))
        assert facts(build_step(with_policy(base, policy))) == facts(expected), text


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("policy", ["default", "nested", "save_all", "recompute"])
def test_a_batch_is_that_of_its_own_trace(name, policy):
    """Prime numbers of sequences and microbatches, replaced by others, give the step that is traced with those."""
    model = model_of(name)
    for microbatches in (1, 6):
        traced = TracedBatch(1009, 509 if microbatches > 1 else 1)
        of_primes = build_step(
            trace_step(model, training(traced.sequences * traced.microbatches, traced.microbatches, policy))
        )
        resized = Resizer(traced, TracedBatch(24 // microbatches, microbatches)).step(of_primes)
        assert facts(resized) == facts(build_step(trace_step(model, training(24, microbatches, policy))))


@pytest.mark.parametrize("name", CHOSEN)
def test_options_add_up(name):
    """Seconds and peak memory of policies are the sums of what their options add, for random policies and shardings."""
    model, hardware = model_of(name), parse_slice("v5e-16")
    workload = training(64, 4)
    kept, base = plan_kept_activations(model, workload, True), plan_step(model, workload)
    calibration = calibration_of(base, hardware)
    mesh = {axis: {"data": 8, "model": 2}.get(axis, 1) for axis in ("replica", "data", "model")}
    mapping = {"batch": ("data",), "mlp": ("model",), "kv_head": ("model",), "vocab": ("model",)}
    stored = {**mapping, "embed": ("data",)}
    del stored["batch"]
    assignment = ShardingAssignment(mesh, mapping, stored, base.merged_axes, base.activation_axes)
    placement = place_mesh(hardware, mesh)

    def seconds_of(tasks):
        costs = ((task, n, device_cost(task, assignment)) for task, n in tasks)
        return sum(n * task_seconds(task, cost, placement, calibration).total for task, n, cost in costs)

    def bytes_of(buffers):
        return sum(n * buffer_bytes(buffer, assignment) for buffer, n in buffers)

    chooser = random.Random(name)
    for _ in range(8):
        chosen = [chooser.choice((None, *options)) for options in kept.activations]
        chosen = [option for option in chosen if option is not None]
        step = plan_step(model, replace(workload, gradient_checkpointing=str(kept.policy(chosen))))
        seconds = seconds_of((task, 1) for task in base.tasks)
        copies, flops = [0.0] * len(kept.windows), [window.flops for window in kept.windows]
        for option in chosen:
            seconds += seconds_of(option.added) - seconds_of(option.removed)
            for copy in option.copies:
                cost = device_cost(copy.task, assignment)
                copies[copy.window] += copy.number * host_copy_seconds(copy.task, cost, hardware)
            flops = [before - saved for before, saved in zip(flops, option.saved_flops, strict=True)]
        late, copied = Counter(), Counter()
        for window, of_window, hiding in zip(kept.windows, copies, flops, strict=True):
            copied[window.loop] += of_window
            due = seconds_beside(hiding, hardware, calibration)
            late[window.loop] = max(late[window.loop], copied[window.loop] - due)
        seconds += sum(late.values())
        exact = sum(each.total for *_, each in step_tasks(step, assignment, hardware, calibration))
        assert seconds == pytest.approx(exact, rel=1e-9)
        sizes = [
            bytes_of(point) + sum(bytes_of(option.buffers[i].items()) for option in chosen)
            for i, point in enumerate(kept.points)
        ]
        assert max(sizes) == pytest.approx(max(bytes_of(point) for point in step.points), rel=1e-9)


def test_a_copy_to_the_host_hides_behind_what_comes_before():
    """The next layer's activation overwrites it, after the matmuls before that in the program; carries have all."""
    text = "offload_carries+key_proj@host+attn_out@host+up_proj@host"
    tasks = plan_step(model_of("llama-3.1-8b"), training(policy=text)).tasks
    copies = [copy_window(task) for task in tasks if task.loop is not None and task.is_to_host]
    back = {copy_window(task) for task in tasks if task.loop is not None and not task.is_to_host}
    tokens, hidden, keys, mlp, layers = 8 * POSITIONS, 4096, 1024, 14336, 2
    queries = 2 * tokens * layers * hidden * hidden
    projections = queries + 2 * 2 * tokens * layers * hidden * keys
    attention = 2 * 2 * tokens * layers * POSITIONS * hidden / 2 * (POSITIONS + 1) / POSITIONS
    gate = 2 * tokens * layers * hidden * mlp
    before_mlp = projections + attention + queries  # the output projection has the size of queries
    expected = [before_mlp + 3 * gate, queries, projections + attention, before_mlp + gate]
    assert [window.flops for window in copies] == pytest.approx(expected, rel=1e-9)
    assert len(back) == 1  # behind the whole body of the loop of the backward pass


@pytest.mark.parametrize(
    ("hardware", "endings", "batches"),
    [
        ("cpu-4", ("",), (64, 124)),
        pytest.param("v5e-4", ("", "@host"), (128, 384), marks=pytest.mark.whole),
    ],
)
def test_the_planner_equals_brute_force_over_all_policies(make_config, hardware, endings, batches):
    """Every policy is planned by itself: of those that fit none is faster, by more than what the estimate leaves out.

    Batches from little memory to more than any policy needs.
    """
    model = build_model({**read_config("pythia-410m", None), "num_hidden_layers": 4}, 2048)
    settings = {
        "model_config": "pythia-410m", "workload_kind": "train", "workload_microbatches": 1, "workload_position": 2048,
        "hardware_slice": hardware, "mesh_data": 4,
    }  # fmt: skip
    carries = ("default", "offload_carries") if "@host" in endings else ("default",)
    groups = (("query_proj",), ("context",), ("up_proj",), ("key_proj", "value_proj"))
    choices = [carries]
    for names in groups:
        choices.append(("", *("".join(f"+{name}{ending}" for name in names) for ending in endings)))
    policies = ["".join(parts) for parts in itertools.product(*choices)]
    fitting = []
    for batch in batches:
        seconds = {}
        for text in policies:
            arguments = {**settings, "workload_batch": batch, "workload_gradient_checkpointing": text}
            try:
                plan = make_plan(make_config(**arguments), model)
            except InfeasibleError:
                continue
            seconds[text] = plan.cost.step_seconds * (1 + LEFT_OUT * (plan.workload.checkpoint_policy.copied > 0))
        fitting.append(len(seconds))
        arguments = {**settings, "workload_batch": batch, "workload_gradient_checkpointing": "auto"}
        chosen = make_plan(make_config(**arguments), model)
        policy = chosen.workload.checkpoint_policy
        arguments["workload_gradient_checkpointing"] = str(policy)
        expected = make_plan(make_config(**arguments), model)
        assert chosen.cost.step_seconds == pytest.approx(expected.cost.step_seconds, rel=1e-9)
        assert (chosen.memory.peak, chosen.memory.host) == (expected.memory.peak, expected.memory.host)
        handicapped = chosen.cost.step_seconds * (1 + LEFT_OUT * (policy.copied > 0))
        assert handicapped <= min(seconds.values()) * (1 + TIME_RESOLUTION)
    assert len(policies) == fitting[0] > fitting[-1] > 0  # memory decides
