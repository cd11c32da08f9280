"""Bytes per device of live buffers and optimizer state, against calculations by hand."""

import dataclasses
from itertools import permutations, product

import haliax as hax
import jax
import pytest
from traced_layer import LAYERS, MESH, TOKENS, WEIGHT, B, E, M, P, V, traced_step

from shardplan.cost.buffer_roles import ROLES, ROWS, buffer_bytes
from shardplan.cost.memory import estimate_memory, point_bytes
from shardplan.cost.partitioned_lookup import partition_lookup
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.hardware import GIB
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.mapping import mesh_size
from shardplan.plan.workload.workload import Workload
from shardplan.program.live_buffers import BufferRole, LiveBuffer
from shardplan.program.named_arrays import TracedArray
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import TaskKind
from shardplan.steps.optimizer import abstract_optimizer_state, make_optimizer


def test_memory_of_the_largest_point():
    """Behind the layers: the residual stream, the logits, and the gathered head."""
    assignment = ShardingAssignment(MESH, TOKENS, {"embed": ("data",)}, {}, ("batch", "position"))
    memory = estimate_memory(traced_step(False), assignment)
    stored = (2 * V * E + 2 * LAYERS * E * M) * 4 / 4
    tokens = B * P / 8
    assert memory.parameters == stored and memory.optimizer == 0
    assert memory.peak == stored + 4 * (tokens * E + tokens * V + V * E)
    assert memory.logits == 4 * tokens * V and memory.gathered_weights == 4 * V * E


def test_memory_of_prefetched_weights():
    """In a layer, both its weights may be gathered, and all stacked parameters are copied; the head waits."""
    assignment = ShardingAssignment(
        MESH,
        TOKENS,
        {"embed": ("data",)},
        {},
        ("batch", "position"),
        CompilerQuirks(copies_stacks=True, gathers_early=True),
    )
    memory = estimate_memory(traced_step(False), assignment)
    assert (memory.cast_parameters, memory.gathered_weights) == (2 * LAYERS * E * M * 4 / 4, 2 * WEIGHT)
    assert memory.logits == 0 < memory.activations
    points = [
        point for point in traced_step(False).points if any(each.role == BufferRole.COPIED_STACK for each, _ in point)
    ]
    gathered = (BufferRole.GATHERED_WEIGHT, BufferRole.PREFETCHED_WEIGHT)
    in_layer = max(
        sum(count * buffer_bytes(each, assignment) for each, count in point if each.role in gathered)
        for point in points
    )
    assert in_layer == 2 * WEIGHT
    # a gather that leaves a weight out of order waits until the weight is used
    along_two = dataclasses.replace(assignment, params={"embed": ("data",), "mlp": ("replica",)})
    assert all(
        buffer_bytes(each, along_two) == 0
        for point in points
        for each, _ in point
        if each.role == BufferRole.PREFETCHED_WEIGHT and "mlp" in each.array.axes
    )


@pytest.mark.parametrize(
    ("batch", "vocab", "embed", "expected"),
    [
        # partial sums of all columns become the result by an all-to-all: the sum's input and output stay until then
        (4 * B, ("model",), ("replica", "data"), 2 * 4 * (4 * B * P * E / 8)),
        # without partial sums the all-to-all needs nothing beyond its input, whose place the result takes
        (B, (), ("replica", "data"), 0),
        # the rows are gathered, so that a group of devices with a quarter of the columns divides its tokens
        (B, ("model", "replica"), ("data",), 4 * V * E / 4),
        # the major mesh axis of the tokens shards the columns: all devices have all tokens, first half of the columns
        (B, (), ("replica",), 4 * B * P * (E / 2 + E - E / 8)),
        # a group of devices with a quarter of the rows sums its tokens, four times those of a device
        (B, ("data",), (), 4 * B * P * E * (2 * 2 / 8 - 1 / 8)),
    ],
)
def test_memory_of_lookups(batch, vocab, embed, expected):
    table = TracedArray(((("vocab", V),), (("embed", E),)), 4, weight="table")
    result = TracedArray(((("batch", batch),), (("position", P),), (("embed", E),)), 4)
    assignment = ShardingAssignment(MESH, TOKENS, {"vocab": vocab, "embed": embed}, {}, ("batch", "position"))
    assert buffer_bytes(LiveBuffer(BufferRole.LOOKUP_RESULT, result, (table,)), assignment) == expected


@pytest.mark.parametrize("sizes", [(3, 4, 2), (5, 1, 3), (2, 6, 3), (4, 6, 1)])
def test_lookups_on_meshes_of_any_size(sizes):
    """Every collective has several devices along its mesh axes, and a device ends with no less than its own tokens."""
    mesh = dict(zip(("replica", "data", "model"), sizes, strict=True))
    table = TracedArray(((("vocab", 720),), (("embed", 720),)), 2, weight="table")
    result = TracedArray(((("batch", 720),), (("position", 720),), (("embed", 720),)), 2)
    several = [axes for count in range(4) for axes in permutations(mesh, count)]
    for tokens, rows, columns in product(several, repeat=3):
        if {*rows} & {*columns}:
            continue
        for compute in ({"batch": tokens}, {"batch": tokens[:1], "position": tokens[1:]}):
            params = {"vocab": rows, "embed": columns}
            assignment = ShardingAssignment(mesh, compute, params, {}, ("batch", "position"))
            lookup = partition_lookup(table, result, assignment)
            assert all(1 < step.devices <= mesh_size(mesh, step.axes) for step in lookup.steps)
            of_result = [step.bytes_after for step in lookup.steps if not step.is_of_table]
            assert not of_result or (of_result[-1] >= lookup.result_bytes and lookup.transient_bytes >= 0)


def test_memory_of_a_head_gathered_at_the_start():
    """The head is in memory from the lookup on, if its gather is along two dimensions and leaves it sharded."""
    mapping = TOKENS | {"vocab": ("model",)}
    params = {"vocab": ("model", "replica"), "embed": ("data",)}
    assignment = ShardingAssignment(MESH, mapping, params, {}, ("batch", "position"))
    points = traced_step(False).points
    role = BufferRole.WEIGHT_GATHERED_FIRST

    def gathered(assignment):
        return {sum(buffer_bytes(each, assignment) for each, _ in point if each.role == role) for point in points[:-2]}

    assert gathered(assignment) == {4 * V * E / 2}
    assert gathered(dataclasses.replace(assignment, compute=TOKENS, shard_counts={})) == {0}
    assert gathered(dataclasses.replace(assignment, params={"vocab": ("model",), "embed": ("data",)})) == {0}
    assert gathered(dataclasses.replace(assignment, quirks=CompilerQuirks(gathers_early=True))) == {0}


def test_memory_of_a_gradient_before_its_reduce_scatter():
    """The head's gradient is unsharded while its matmul runs, until each device keeps its shard."""
    step = traced_step(True)
    assignment = ShardingAssignment(MESH, TOKENS, {"embed": ("data",)}, {}, ("batch", "position"))
    role, gradient = BufferRole.UNSCATTERED_RESULT, 4 * V * E
    unscattered = [
        sum(n * buffer_bytes(each, assignment) for each, n in point if each.role == role) for point in step.points
    ]
    assert unscattered.count(gradient) == 1
    memory = estimate_memory(step, assignment)
    assert memory.peak - memory.parameters == max(point_bytes(point, assignment) for point in step.points)


def test_rows_of_experts_in_float32():
    """A kernel that writes float32 needs four more bytes for every number of the result that it computes."""
    config = {**read_config("mixtral-8x7b", None, LEVANTER), "num_hidden_layers": 2}
    mixtral = plan_step(build_model(config, 1024), Workload("eval", 8, 1024, "bfloat16", "bfloat16"))
    mapping = {"mlp": ("model",), "vocab": ("model",)}
    assignment = ShardingAssignment({"model": 16}, mapping, mapping, mixtral.merged_axes, mixtral.activation_axes)
    narrow, wide = (
        estimate_memory(mixtral, dataclasses.replace(assignment, quirks=CompilerQuirks(wide_rows=is_wide)))
        for is_wide in (False, True)
    )
    experts_per_token, embed, mlp = 2, 4096, 14336
    tokens = 8 * 1024 * experts_per_token
    # without float32, the largest point has the rows of embed twice: before and after they are reordered; the numbers
    # of rows of each expert are activations as well
    assert wide.activations - narrow.activations == pytest.approx(2 * tokens * (embed + mlp / 16), rel=1e-6)


@pytest.mark.slow
def test_summed_rows_of_experts():
    """The gradient of rows is the sum of two grouped matmuls, which a compiler that frees rows writes over one of them.

    If rows are not freed, they are live until then; if they are, the tokens are live from which rows are looked up, and
    their gradient with the routing weights, whose product is the gradient of rows.
    """
    config = {**read_config("mixtral-8x7b", None, LEVANTER), "num_hidden_layers": 2}
    mixtral = plan_step(build_model(config, 1024), Workload("train", 8, 1024, "float32", "bfloat16"))
    mapping = {"mlp": ("model",)}
    assignment = ShardingAssignment({"model": 16}, mapping, mapping, mixtral.merged_axes, mixtral.activation_axes)
    tokens, embed = 8 * 1024, 4096
    rows = 2 * 2 * tokens * embed
    points = [point for point in mixtral.points if any(each.role == BufferRole.SUMMED_ROWS for each, _ in point)]

    def max_bytes(role, points=points, **quirks):
        with_quirks = dataclasses.replace(assignment, quirks=CompilerQuirks(**quirks))
        return max(
            sum(count * buffer_bytes(each, with_quirks) for each, count in point if each.role == role)
            for point in points
        )

    assert max_bytes(BufferRole.FLOAT32_RESULT, mixtral.points, wide_rows=True) == 2 * rows
    assert max_bytes(BufferRole.FLOAT32_RESULT, mixtral.points) == 0
    assert max_bytes(BufferRole.SUMMED_ROWS) == rows
    assert max_bytes(BufferRole.SUMMED_ROWS, frees_rows=True) == 0
    assert max_bytes(BufferRole.ROUTED_TOKENS, frees_rows=True) == 2 * tokens * embed
    assert max_bytes(BufferRole.ROUTED_TOKENS) == 0 < max_bytes(BufferRole.UNFREED_ROWS)
    assert max_bytes(BufferRole.FACTOR_OF_GRADIENT, frees_rows=True) == 2 * tokens * (embed + 2)
    assert max_bytes(BufferRole.FACTOR_OF_GRADIENT) == max_bytes(BufferRole.GATHERED_ROWS, frees_rows=True) == 0
    # grouped matmuls take slices of rows if the experts' embed axis is stored in shards: those of the experts' result
    # are gathered for the gradient of the routing weights
    assignment = dataclasses.replace(assignment, params={"embed": ("model",)})
    assert max_bytes(BufferRole.GATHERED_ROWS, frees_rows=True) == rows


def test_every_role_has_one_row():
    assert [row.name for row in ROWS] == list(BufferRole)


@pytest.mark.slow
def test_bytes_that_depend_on_stored_parameters():
    """The search keeps the bytes of every other buffer for all mappings of parameters."""
    config = {**read_config("mixtral-8x7b", None, LEVANTER), "num_hidden_layers": 2}
    mixtral = plan_step(build_model(config, 1024), Workload("train", 8, 1024, "float32", "bfloat16"))
    mapping = {"mlp": ("model",)}
    quirks = CompilerQuirks(wide_rows=True, frees_rows=True)
    sharded = ShardingAssignment(
        {"data": 2, "model": 4}, mapping, mapping, mixtral.merged_axes, mixtral.activation_axes, quirks
    )
    fully = dataclasses.replace(sharded, params={"mlp": ("model",), "embed": ("data",)})
    narrow = dataclasses.replace(quirks, wide_rows=False)
    buffers = {buffer for point in mixtral.points for buffer, _ in point}
    changed = {
        buffer
        for buffer in buffers
        for each in (quirks, narrow)
        if buffer_bytes(buffer, dataclasses.replace(sharded, quirks=each))
        != buffer_bytes(buffer, dataclasses.replace(fully, quirks=each))
    }
    roles = {buffer.role for buffer in changed}
    assert {BufferRole.FLOAT32_RESULT, BufferRole.GATHERED_ROWS} < roles
    for buffer in changed:
        of_parameters = map(sharded.is_stored_like_a_parameter, (buffer.array, *buffer.related_arrays))
        assert buffer.is_read_by_grouped_matmuls or ROLES[buffer.role].depends_on_storage or any(of_parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("adamw", 2),
        ("adamw+mu_bfloat16", 1.5),
        ("adamw+mu_bfloat16+ema", 2.5),
        ("lion", 1),
        ("sgd", 0),
        ("adafactor", 0),
    ],
)
def test_memory_of_optimizers(name, times):
    """Moments have the parameters' sizes; Adafactor has a row and a column for every matrix."""
    config = {**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": 2}
    workload = Workload("train", 8, 1024, "float32", "bfloat16", optimizer=name)
    llama = plan_step(build_model(config, 1024), workload)
    assignment = ShardingAssignment(
        {"data": 8}, {"batch": ("data",)}, {"embed": ("data",)}, llama.merged_axes, llama.activation_axes
    )
    memory = estimate_memory(llama, assignment)
    assert memory.optimizer / memory.parameters == pytest.approx(times, abs=0.02)
    assert (memory.optimizer > 0) == (name != "sgd")


def test_optimizers_that_cannot_be_planned(raises_message):
    with raises_message(ConfigError):
        make_optimizer("adamv")
    with raises_message(ConfigError):
        make_optimizer("adamw+mu_bf16")
    with raises_message(ConfigError):
        make_optimizer("sgd+mu_bfloat16")
    with raises_message(ConfigError):
        weight = jax.ShapeDtypeStruct((2, 3), "float32")
        abstract_optimizer_state(
            make_optimizer("sm3"), hax.NamedArray(weight, (hax.Axis("embed", 2), hax.Axis("mlp", 3)))
        )
    with pytest.raises(ConfigError, match=r"needs more than gradients; use another: .*'value_fn'"):
        abstract_optimizer_state(make_optimizer("lbfgs"), weight)


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [None, LEVANTER])
def test_masks_are_not_live_while_training(model_class):
    """The loop over layers takes masks, but kernels compute them from positions. Tables of angles are live."""
    model = build_model({**read_config("llama-3.1-8b", None, model_class), "num_hidden_layers": 2}, 8192)
    llama = plan_step(model, Workload("train", 1, 8192, "bfloat16", "bfloat16"))
    live = [each.array for point in llama.points for each, _ in point if each.role == BufferRole.LIVE]
    assert not any(array.factors.count((None, 8192)) == 2 for array in live)
    assert {("position", 8192), ("head_size", 128)} in [set(array.factors) for array in live]


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [None, LEVANTER])
@pytest.mark.parametrize("checkpointing", ["default", "save_all"])
def test_activations_that_training_saves_in_every_layer(checkpointing, model_class):
    """With checkpointing these are the residual stream; else everything that the backward pass reads."""
    llama = plan_step(
        build_model(read_config("llama-3.1-8b", None, model_class), 4096),  # of 32 layers
        Workload("train", 8, 4096, "bfloat16", "bfloat16", gradient_checkpointing=checkpointing),
    )
    assignment = ShardingAssignment(
        {"data": 8}, {"batch": ("data",)}, {"embed": ("data",)}, llama.merged_axes, llama.activation_axes
    )
    memory = estimate_memory(llama, assignment)
    stream = 32 * 4096 * 4096 * 2 / GIB
    everything = 32 * 4096 * (3 * 4096 + 2 * 1024 + 3 * 14336) * 2 / GIB
    assert memory.optimizer == pytest.approx(2 * memory.parameters, rel=1e-3)
    saved = memory.activations / GIB
    assert (stream < saved < 3 * stream) if checkpointing == "default" else saved > everything


@pytest.mark.slow
def test_the_gathered_head_stays_while_microbatches_run():
    """Levanter's loss needs it gathered, and padded to whole blocks: both are made once, before the loop."""
    config = {**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": 2}
    model = build_model(config, 1024)
    mesh, params = {"replica": 1, "data": 8, "model": 1}, {"embed": ("data",)}
    in_layers, gathers = {}, {}
    for parts in (1, 2):
        work = Workload("train", 8 * parts, 1024, "float32", "bfloat16", microbatches=parts)
        step = plan_step(model, work)
        assignment = ShardingAssignment(mesh, {"batch": ("data",)}, params, step.merged_axes, step.activation_axes)
        in_layers[parts] = min(
            sum(n * buffer_bytes(buffer, assignment) for buffer, n in point if buffer.array.axes == ("embed", "vocab"))
            for point, label in zip(step.points, step.point_labels, strict=True)
            if "layers" in label.text and label.executions > 1  # not the update of their weights
        )
        heads = [task for task in step.tasks if "lm_head.weight" in (array.weight for array in task.operands)]
        gathers[parts] = [task.executions for task in heads if task.kind == TaskKind.RESHARD]
    head, padded = 4096 * 128256 * 2, 4096 * 131072 * 2
    assert in_layers[1] < head and in_layers[2] >= head + padded
    assert gathers == {1: [1, 1], 2: [1, 1]}  # the second is for the gradients, which find it gathered
