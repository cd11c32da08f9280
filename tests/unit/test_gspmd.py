"""Collectives that mappings cause, against calculations by hand on one traced layer and on models."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from traced_layer import LAYERS, MESH, TOKENS, WEIGHT, B, E, M, P, V, traced_step

from shardplan.cost.calibration import compiler_quirks, load_calibration
from shardplan.cost.collectives import Overlap, Purpose
from shardplan.cost.gspmd import device_cost
from shardplan.cost.roofline import step_tasks
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.hardware import CollectiveKind, parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.workload.workload import Workload
from shardplan.program.named_arrays import AxisCopy, AxisPart, TracedArray
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import TaskKind
from shardplan.program.trace import Argument, trace_jaxpr
from shardplan.program.walk import build_step

GRADIENTS = (Purpose.WEIGHT_GRADIENTS, Purpose.LOOKUP_GRADIENTS)


def traffic(purposes, compute, params, subject=None, is_training=False, quirks=CompilerQuirks(), mesh=MESH):  # noqa: B008
    """(kind, mesh axes, bytes, executions) of the collectives with any of `purposes`, and with `subject` if given."""
    assignment = ShardingAssignment(mesh, {**TOKENS, **compute}, params, {}, ("batch", "position"), quirks)
    collectives = [t for task in traced_step(is_training).tasks for t in device_cost(task, assignment).traffic]
    return [
        (t.kind, t.mesh_axes, t.bytes, t.count)
        for t in collectives
        if t.purpose in purposes and subject in (None, t.subject)
    ]


def test_a_weight_that_is_stored_in_shards_is_gathered_in_every_layer():
    gather = ("all-gather", ("data",), LAYERS * 3 / 4 * WEIGHT, LAYERS)
    assert traffic(Purpose, {}, {"embed": ("data",)}, "mlp_up") == [gather]


def test_a_weight_is_gathered_to_its_compute_sharding():
    """It stays sharded over `model`, so that a device receives half as many bytes."""
    mapping = {"mlp": ("model",)}
    moved = traffic(Purpose, mapping, {**mapping, "embed": ("data",)}, "mlp_up")
    (gather,) = [each for each in moved if each[0] == "all-gather"]
    assert gather == ("all-gather", ("data",), LAYERS * 3 / 4 * WEIGHT / 2, LAYERS)


def test_partial_sums_of_a_sharded_contraction():
    """`mlp` is an axis of up's result, and contracted in down: one all-reduce of local activations per layer."""
    mapping = {"mlp": ("model",)}
    activations = 4 * B * P * E / 8
    reduced = ("all-reduce", ("model",), LAYERS * 2 * 1 / 2 * activations, LAYERS)
    assert traffic([Purpose.PARTIAL_SUMS], mapping, mapping) == [reduced]


@pytest.mark.parametrize(
    ("name", "is_stored"),
    [
        ("embed", True),
        (AxisPart("embed"), True),
        ("position", False),
        (AxisCopy("position"), False),
        (AxisPart(AxisCopy("position")), False),
        (None, False),
    ],
)
def test_only_arrays_of_parameters_are_stored_like_parameters(name, is_stored):
    """A mask of keys has the copy of the positions that scores have; a split batch has a part of it."""
    assignment = ShardingAssignment(MESH, TOKENS, {}, {}, ("batch", "position"), CompilerQuirks())
    assert assignment.is_stored_like_a_parameter(TracedArray((((name, 8),),), 4)) == is_stored
    assert assignment.is_stored_like_a_parameter(TracedArray((((name, 8),),), 4, "path"))


@pytest.mark.parametrize(("named", "n"), [(("data",), 4), (("replica", "model"), 4), (("replica", "data"), 8)])
@pytest.mark.parametrize(
    ("kind", "received"),
    [
        (CollectiveKind.ALL_REDUCE, lambda n: 2 * (n - 1) / n),
        (CollectiveKind.REDUCE_SCATTER, lambda n: (n - 1) / n),
        (CollectiveKind.ALL_GATHER, lambda n: n - 1),
        (CollectiveKind.ALL_TO_ALL, lambda n: (n - 1) / n),
        (CollectiveKind.COLLECTIVE_PERMUTE, lambda n: 1),
    ],
)
def test_a_collective_in_a_shard_map_is_over_the_mesh_axes_that_it_names(named, n, kind, received):
    """Bytes that a device receives, for every byte of its own shard."""
    task = dataclasses.replace(traced_step(False).tasks[0], kind=TaskKind.COLLECTIVE, collective=kind, mesh_axes=named)
    (array,) = task.results
    assignment = ShardingAssignment(MESH, TOKENS, {}, {}, ("batch", "position"), CompilerQuirks())
    size = assignment.bytes(array, assignment.compute)
    (moved,) = device_cost(task, assignment).traffic
    assert (moved.kind, moved.mesh_axes) == (kind, named)
    assert moved.bytes == received(n) * size
    assert not device_cost(task, dataclasses.replace(assignment, mesh={axis: 1 for axis in MESH})).traffic


def test_gradients_of_a_weight_that_is_stored_in_shards():
    """Each pass gathers it. Its gradient is reduce-scattered over `data`, and then summed over `replica`."""
    params = {"embed": ("data",)}
    gathered = traffic([Purpose.WEIGHTS], {}, params, "mlp_up", is_training=True)
    assert gathered == [("all-gather", ("data",), LAYERS * 3 / 4 * WEIGHT, LAYERS)] * 2  # forward and backward
    gradients = [each for each in traffic(GRADIENTS, {}, params, is_training=True) if each[3] == LAYERS]
    scattered = ("reduce-scatter", ("data",), LAYERS * 3 / 4 * WEIGHT, LAYERS)
    summed = ("all-reduce", ("replica",), LAYERS * 2 * 1 / 2 * WEIGHT / 4, LAYERS)
    assert gradients == [scattered, summed] * 2  # of both weights


def test_gradients_of_a_replicated_weight():
    gradients = [each for each in traffic(GRADIENTS, {}, {}, is_training=True) if each[3] == LAYERS]
    assert gradients == [("all-reduce", ("replica", "data"), LAYERS * 2 * 7 / 8 * WEIGHT, LAYERS)] * 2


def test_partial_sums_that_are_added_up_are_reduced_once():
    """The gradient of a gated layer's input is the sum of two matmuls, with either weight."""

    def gated(x, gate, up):
        return (jnp.sin(x @ gate.T) * (x @ up.T)).sum()

    weight = Argument.parameter(("mlp", "embed"), "w")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((B, E), (M, E), (M, E))]
    jaxpr = jax.make_jaxpr(jax.grad(gated))(*shapes)
    tasks = build_step(trace_jaxpr(jaxpr, [Argument(("batch", "embed")), weight, weight])).tasks
    assignment = ShardingAssignment(MESH, {**TOKENS, "mlp": ("model",)}, {"mlp": ("model",)}, {}, ("batch",))
    reduced = [t for task in tasks for t in device_cost(task, assignment).traffic]
    assert [(t.kind, t.mesh_axes, t.bytes) for t in reduced] == [("all-reduce", ("model",), 2 * 1 / 2 * 4 * B * E / 8)]


def test_collectives_over_the_whole_mesh():
    """For most slices the TPU compiler has no reduce-scatter over all devices, and for some no all-gather."""
    mesh, params = {"replica": 1, "data": 8, "model": 1}, {"embed": ("data",)}
    kinds = {each[0] for each in traffic(GRADIENTS, {}, params, is_training=True, mesh=mesh)}
    assert kinds == {"all-reduce", "all-to-all"}  # the latter for the lookup
    quirks = CompilerQuirks(scatters_over_slice=True)
    moved = traffic([Purpose.WEIGHT_GRADIENTS], {}, params, is_training=True, quirks=quirks, mesh=mesh)
    assert {each[0] for each in moved} == {"reduce-scatter"}
    quirks = CompilerQuirks(gathers_become_sums_from=8)
    gathered = traffic([Purpose.WEIGHTS], {}, params, "mlp_up", quirks=quirks, mesh=mesh)
    assert gathered == [("all-reduce", ("data",), LAYERS * 2 * 7 / 8 * WEIGHT, LAYERS)]
    assert traffic([Purpose.WEIGHTS], {}, params, "mlp_up", quirks=quirks)[0][0] == "all-gather"


@pytest.mark.parametrize(
    ("slice_name", "scatters"),
    [("v6e-8", True), ("v6e-16", False), ("v6e-128", True), ("v5e-64", False), ("v5p-16", False), ("v4-32", False),
     ("tpu7x-16", True)],
)  # fmt: skip
def test_slices_whose_compiler_has_reduce_scatters_over_all_devices(slice_name, scatters):
    """Rectangles of chips, but no squares; in three dimensions those of tpu7x."""
    assert compiler_quirks(parse_slice(slice_name)).scatters_over_slice == scatters


def test_gathers_that_leave_a_weight_out_of_order():
    """A gather along two dimensions, of shards with less than a tile's 8 rows of float32, or one that is compiled to an
    all-reduce, over the whole mesh; once per layer."""
    whole_mesh = {"replica": 1, "data": 4, "model": 1}

    def reordered(mesh, params, quirks):
        assignment = ShardingAssignment(mesh, TOKENS, params, {}, ("batch", "position"), quirks)
        tasks = [task for task in traced_step(False).tasks if task.label == "mlp_up"]
        return sum(device_cost(task, assignment).reordered_weight_bytes for task in tasks)

    as_all_reduce = CompilerQuirks(gathers_become_sums_from=4)
    assert reordered(whole_mesh, {"embed": ("data",)}, CompilerQuirks()) == 0
    assert reordered(whole_mesh, {"embed": ("data",)}, as_all_reduce) == LAYERS * WEIGHT
    assert reordered({"replica": 1, "data": 8, "model": 1}, {"embed": ("data",)}, CompilerQuirks()) == LAYERS * WEIGHT
    assert reordered(MESH, {"embed": ("data",)}, as_all_reduce) == 0
    assert reordered(MESH, {"embed": ("data",), "mlp": ("replica",)}, CompilerQuirks()) == LAYERS * WEIGHT


def test_lookups_in_a_sharded_table():
    """Sharded rows leave partial sums; sharded columns are looked up for the tokens of a group, and exchanged.

    tests/compiler/test_lookup.py compares all shardings with the compiler.
    """
    rows, lookups = 4 * B * P * E / 8, [Purpose.LOOKUPS]
    assert traffic(lookups, {}, {"vocab": ("model",)}) == [("all-reduce", ("model",), 2 * 1 / 2 * rows, 1)]
    # two devices along data and model have the same rows, and divide the tokens that need them
    assert traffic(lookups, {}, {"vocab": ("data",)}) == [("all-reduce", ("data",), 2 * 3 / 4 * 2 * rows, 1)]
    # mesh axes of one device do not shard anything
    mesh = {"replica": 1, "data": 8, "model": 1}
    assert traffic(lookups, {}, {"embed": ("data",)}, mesh=mesh) == [("all-to-all", ("data",), 7 / 8 * rows, 1)]
    # a quarter of the columns is looked up in all rows, each device half of its group's tokens
    assert traffic(lookups, {}, {"vocab": ("model",), "embed": ("data",)}) == [
        ("all-gather", ("model",), 1 / 2 * 4 * V * E / 4, 1),
        ("all-gather", ("model",), 1 / 2 * rows, 1),
        ("all-to-all", ("data",), 3 / 4 * rows, 1),
    ]


def test_a_group_as_large_as_one_of_several_slices_is_summed_as_a_whole_mesh_is():
    mesh, params = {"replica": 2, "data": 8, "model": 1}, {"embed": ("data",)}
    for devices, kind in ((None, "reduce-scatter"), (8, "all-reduce")):
        quirks = CompilerQuirks(devices_per_slice=devices)
        moved = traffic([Purpose.WEIGHT_GRADIENTS], {}, params, is_training=True, quirks=quirks, mesh=mesh)
        assert {each[0] for each in moved if "data" in each[1]} == {kind}


@pytest.mark.slow
def test_weights_that_a_loop_saves_for_the_backward_pass_are_gathered_again():
    """Without recomputation the forward pass stacks slices of weights; these are parameters, in their stored sharding.

    XLA gathers them in both passes (32B on v5p-128 in docs/benchmarks/published.md: 455 GiB, 229 in one pass).
    """
    model = build_model({**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": 3}, 1024)
    gathers = []
    for checkpointing in ("save_all", "default"):
        step = plan_step(model, Workload("train", 8, 1024, "float32", gradient_checkpointing=checkpointing))
        mesh, tokens = {"replica": 1, "data": 8, "model": 1}, {"batch": ("data",)}
        assignment = ShardingAssignment(mesh, tokens, {"embed": ("data",)}, step.merged_axes, step.activation_axes)
        traffic = [each for task in step.tasks for each in device_cost(task, assignment).traffic]
        gathers.append(sum(each.count for each in traffic if each.purpose is Purpose.WEIGHTS))
    # seven matrices and two norms, of which matmuls use the former, in each of three layers and both passes; lm_head
    assert gathers == [2 * 3 * 7 + 1] * 2


@pytest.mark.slow
def test_tied_embeddings_count_once():
    """Gemma's table is one parameter: gathered once for logits and their gradients, and its gradient is summed once.

    Hugging Face counts 8,537,680,896 parameters; the compiled step has one gather and one sum of the table's shape.
    """
    step = plan_step(build_model(read_config("gemma-7b", None, LEVANTER), 1024), Workload("train", 16, 1024, "float32"))
    assert sum(array.elements for array in step.parameters) == 8_537_680_896
    mesh, tokens = {"replica": 1, "data": 16, "model": 1}, {"batch": ("data",)}
    assignment = ShardingAssignment(mesh, tokens, {"embed": ("data",)}, step.merged_axes, step.activation_axes)
    tasks = [task for task in step.tasks if any("vocab" in each.axes for each in (*task.operands, *task.results))]
    traffic = [each for task in tasks for each in device_cost(task, assignment).traffic]
    large = [(t.kind, t.purpose, t.bytes, t.count) for t in traffic if t.kind != CollectiveKind.ALL_TO_ALL]
    received = 2 * 256_000 * 3072 * 15 / 16
    assert large == [
        (CollectiveKind.ALL_GATHER, Purpose.WEIGHTS, received, 1),
        (CollectiveKind.ALL_REDUCE, Purpose.WEIGHT_GRADIENTS, 2 * received, 1),
    ]


def train_step():
    model = build_model({**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": 2}, 1024)
    return plan_step(model, Workload("train", 8, 1024, "float32", "bfloat16"))


@pytest.mark.slow
def test_gathers_of_the_first_weights_of_a_layer_run_late_in_trainings():
    """Queries, keys and values, in the forward pass and in the backward pass; evaluations hide all gathers."""
    evaluation = plan_step(
        build_model({**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": 2}, 1024),
        Workload("eval", 8, 1024),
    )
    assert late_gathers(evaluation, CompilerQuirks(gathers_late=True)) == {}
    assert late_gathers(train_step(), CompilerQuirks()) == {}
    layers = 2
    assert late_gathers(train_step(), CompilerQuirks(gathers_late=True)) == {
        f"transformer.layers.stacked.self_attn.{name}_proj.weight": 2 * layers for name in "qkv"
    }


def late_gathers(step, quirks):
    """Name of each parameter whose gathers nothing hides -> number of its gathers in a step."""
    assignment = ShardingAssignment(
        {"replica": 1, "data": 8, "model": 1}, {"batch": ("data",)}, {"embed": ("data",)}, step.merged_axes,
        step.activation_axes, quirks,
    )  # fmt: skip
    counts = Counter()
    for task in step.tasks:
        for each in device_cost(task, assignment).traffic:
            if each.purpose is Purpose.WEIGHTS and each.overlap is Overlap.NONE:
                counts[each.subject] += each.count
    return dict(counts)


@pytest.mark.slow
def test_elementwise_work_on_gradients_is_on_stored_shards():
    step = train_step()
    tasks = [task for task in step.tasks if task.is_on_parameters]
    assert tasks and all(task.kind == TaskKind.ELEMENTWISE for task in tasks)
    sizes = []
    for params in ({}, {"embed": ("data",)}):
        mesh = {"replica": 1, "data": 8, "model": 1}
        assignment = ShardingAssignment(mesh, {"batch": ("data",)}, params, step.merged_axes, step.activation_axes)
        sizes.append(sum(device_cost(task, assignment).memory_bytes for task in tasks))
    assert sizes[1] == pytest.approx(sizes[0] / 8)


def test_kernels_of_gradients_compute_seven_matmuls():
    """Two in the forward pass, two again in the backward pass, and there three for queries and four for keys."""
    step, hardware = train_step(), parse_slice("v5p-16")
    mesh = {"replica": 1, "data": 8, "model": 1}
    assignment = ShardingAssignment(mesh, {"batch": ("data",)}, {}, step.merged_axes, step.activation_axes)
    attention = [
        (cost, seconds.compute)
        for task, cost, seconds in step_tasks(step, assignment, hardware, load_calibration("v5p"))
        if task.kind == TaskKind.ATTENTION
    ]
    one = min(cost.matmul.flops for cost, _ in attention) * attention[0][0].unmasked_fraction
    assert len(attention) == 8
    assert sum(seconds for _, seconds in attention) == pytest.approx((2 + 2 + 7) * one / hardware.generation.flops)
