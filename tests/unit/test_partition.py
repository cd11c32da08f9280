"""Collectives that mappings cause, against calculations by hand on one traced layer; and what memory holds of it."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from shardplan.attention.choice import Heads, weigh
from shardplan.cost.attention import has_kernel
from shardplan.cost.gspmd import device_cost
from shardplan.cost.memory import buffer_bytes, memory
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.hardware import GIB, parse_slice
from shardplan.model import build_model, read_config
from shardplan.plan.plan import AttentionPlan
from shardplan.plan.workload import Workload
from shardplan.positions.pattern import CAUSAL
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.program.named_arrays import Array
from shardplan.program.step_trace import abstract_state, optimizer, plan_step
from shardplan.program.tasks import prepare
from shardplan.program.trace import trace_jaxpr

B, P, E, M, V, LAYERS = 8, 16, 32, 64, 128, 3
PARAMETERS = {
    "embed": {"vocab": V, "embed": E},
    "head": {"vocab": V, "embed": E},
    "mlp_down": {"layer": LAYERS, "embed": E, "mlp": M},
    "mlp_up": {"layer": LAYERS, "mlp": M, "embed": E},
}
MESH = {"replica": 2, "data": 4, "model": 2}
TOKENS = {"batch": ("replica", "data")}
WEIGHT = 4 * E * M
"""Bytes of one layer's weight."""


def loss(weights, tokens):
    def layer(x, weights):
        hidden = jnp.tanh(jnp.einsum("bpe,me->bpm", x, weights["mlp_up"]))
        return x + jnp.einsum("bpm,em->bpe", hidden, weights["mlp_down"]), None

    stacked = {path: weights[path] for path in ("mlp_up", "mlp_down")}
    x, _ = jax.lax.scan(layer, weights["embed"][tokens], stacked)
    return jnp.einsum("bpe,ve->bpv", x, weights["head"]).max()


def step(is_training):
    weights = {path: jax.ShapeDtypeStruct(tuple(axes.values()), jnp.float32) for path, axes in PARAMETERS.items()}
    tokens = jax.ShapeDtypeStruct((B, P), jnp.int32)
    jaxpr = jax.make_jaxpr(jax.grad(loss) if is_training else loss)(weights, tokens)
    arguments = [(tuple(axes), path) for path, axes in PARAMETERS.items()] + [(("batch", "position"), None)]
    arrays = [Array(tuple(((name, n),) for name, n in axes.items()), 4, path) for path, axes in PARAMETERS.items()]
    return dataclasses.replace(
        prepare(trace_jaxpr(jaxpr, arguments)),
        parameters=tuple(arrays),
        activation_axes=("batch", "position"),
        vocab="vocab",
    )


def traffic(of, compute, params, is_training=False, quirks=CompilerQuirks(), mesh=MESH):  # noqa: B008
    """(kind, mesh axes, bytes, executions) of the collectives whose cause has `of` in it."""
    layout = ShardingAssignment(mesh, {**TOKENS, **compute}, params, {}, ("batch", "position"), quirks)
    tasks = step(is_training).tasks
    moved = [t for task in tasks for t in device_cost(task, layout).traffic if of in t.cause]
    return [(t.kind, t.mesh_axes, t.bytes, t.count) for t in moved]


def test_a_weight_that_rests_cut_is_gathered_in_every_layer():
    assert traffic("mlp_up", {}, {"embed": ("data",)}) == [("all-gather", ("data",), LAYERS * 3 / 4 * WEIGHT, LAYERS)]


def test_a_weight_is_gathered_up_to_what_it_is_computed_with():
    """On `model` it stays cut: what is gathered is half as large."""
    cut = {"mlp": ("model",)}
    (gather,) = [t for t in traffic("mlp_up", cut, {**cut, "embed": ("data",)}) if t[0] == "all-gather"]
    assert gather == ("all-gather", ("data",), LAYERS * 3 / 4 * WEIGHT / 2, LAYERS)


def test_partial_sums_of_a_cut_contraction():
    """up is cut in its result, down in what it sums over: one all-reduce a layer, of the activations of a device."""
    cut = {"mlp": ("model",)}
    activations = 4 * B * P * E / 8
    assert traffic("partial sums", cut, cut) == [("all-reduce", ("model",), LAYERS * 2 * 1 / 2 * activations, LAYERS)]


def test_gradients_of_a_weight_that_rests_cut():
    """A gather for each pass. Over `data` each device keeps a part of the sum, which is then summed over `replica`."""
    gathered = traffic("weights of mlp_up", {}, {"embed": ("data",)}, is_training=True)
    assert gathered == [("all-gather", ("data",), LAYERS * 3 / 4 * WEIGHT, LAYERS)] * 2  # forward and backward
    gradients = [t for t in traffic("gradient of", {}, {"embed": ("data",)}, is_training=True) if t[3] == LAYERS]
    scattered = ("reduce-scatter", ("data",), LAYERS * 3 / 4 * WEIGHT, LAYERS)
    summed = ("all-reduce", ("replica",), LAYERS * 2 * 1 / 2 * WEIGHT / 4, LAYERS)
    assert gradients == [scattered, summed] * 2  # of both weights


def test_gradients_of_a_replicated_weight():
    gradients = [t for t in traffic("gradient of", {}, {}, is_training=True) if t[3] == LAYERS]
    assert gradients == [("all-reduce", ("replica", "data"), LAYERS * 2 * 7 / 8 * WEIGHT, LAYERS)] * 2


def test_sums_that_are_added_up_are_reduced_once():
    """The input's gradient is the sum of what comes back through both weights of a gated layer."""

    def gated(x, gate, up):
        return (jnp.sin(x @ gate.T) * (x @ up.T)).sum()

    weight = (("mlp", "embed"), "w")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((B, E), (M, E), (M, E))]
    jaxpr = jax.make_jaxpr(jax.grad(gated))(*shapes)
    tasks = prepare(trace_jaxpr(jaxpr, [(("batch", "embed"), None), weight, weight])).tasks
    layout = ShardingAssignment(MESH, {**TOKENS, "mlp": ("model",)}, {"mlp": ("model",)}, {}, ("batch",))
    reduced = [t for task in tasks for t in device_cost(task, layout).traffic]
    assert [(t.kind, t.mesh_axes, t.bytes) for t in reduced] == [("all-reduce", ("model",), 2 * 1 / 2 * 4 * B * E / 8)]


def test_the_whole_mesh_has_no_reduce_scatter():
    """What the TPU compiler does where a collective's group is everybody."""
    mesh = {"replica": 1, "data": 8, "model": 1}
    kinds = {t[0] for t in traffic("gradient of", {}, {"embed": ("data",)}, is_training=True, mesh=mesh)}
    assert kinds == {"all-reduce", "all-to-all"}  # the latter of the lookup
    quirks = CompilerQuirks(gathers_become_sums_from=8)
    gathered = traffic("weights of mlp_up", {}, {"embed": ("data",)}, quirks=quirks, mesh=mesh)
    assert gathered == [("all-reduce", ("data",), LAYERS * 2 * 7 / 8 * WEIGHT, LAYERS)]
    assert traffic("weights of mlp_up", {}, {"embed": ("data",)}, quirks=quirks)[0][0] == "all-gather"


def test_gathers_that_leave_a_weight_out_of_order():
    """Along two of its dimensions, or written as a sum, over the whole mesh; once a layer each."""
    whole = {"replica": 1, "data": 8, "model": 1}

    def rearranged(mesh, params, quirks):
        layout = ShardingAssignment(mesh, TOKENS, params, {}, ("batch", "position"), quirks)
        return sum(device_cost(t, layout).rearranged_bytes for t in step(False).tasks if t.cause == "mlp_up")

    sums = CompilerQuirks(gathers_become_sums_from=8)
    assert rearranged(whole, {"embed": ("data",)}, CompilerQuirks()) == 0
    assert rearranged(whole, {"embed": ("data",)}, sums) == LAYERS * WEIGHT
    assert rearranged(MESH, {"embed": ("data",)}, sums) == 0
    assert rearranged(MESH, {"embed": ("data",), "mlp": ("replica",)}, CompilerQuirks()) == LAYERS * WEIGHT


def test_lookups_in_a_cut_table():
    """Cut rows leave partial sums; cut columns are found for everybody's tokens, and exchanged.

    Where the tokens are cut otherwise than the columns, the larger keeps its cut: tests/compiler/test_lookup.py.
    """
    rows = 4 * B * P * E / 8
    assert traffic("rows of", {}, {"vocab": ("model",)}) == [("all-reduce", ("model",), 2 * 1 / 2 * rows, 1)]
    assert traffic("rows of", {}, {"vocab": ("data",)}) == [("all-reduce", ("data",), 2 * 3 / 4 * 2 * rows, 1)]
    # an axis of one device cuts nothing
    alone = {"replica": 1, "data": 8, "model": 1}
    assert traffic("rows of", {}, {"embed": ("data",)}, mesh=alone) == [("all-to-all", ("data",), 7 / 8 * rows, 1)]
    # of as many elements as the table: it makes way
    assert traffic("rows of", {}, {"vocab": ("model",), "embed": ("data",)}) == [
        ("all-reduce", ("model",), 2 * 1 / 2 * rows, 1),
        ("all-gather", ("replica",), 1 / 2 * 2 * rows, 1),
        ("all-gather", ("data",), 3 / 4 * 8 * rows, 1),
    ]


def test_keys_and_values_of_other_positions():
    model = build_model({**read_config("configs/models/llama-3.1-8b.json", None), "num_hidden_layers": 2}, 1024)
    llama = plan_step(model, Workload("batch", 4, 1024, "bfloat16", "bfloat16"))
    cut = {"position": ("data",)}
    layout = ShardingAssignment({"data": 4}, cut, {}, llama.merged, llama.activation_axes)
    attention = [task for task in llama.tasks if task.kind == "attention"]
    moved = [(t.kind, t.bytes) for task in attention for t in device_cost(task, layout).traffic]
    whole = 2 * 4 * 1024 * 8 * 128
    assert moved == [("all-gather", 2 * 3 / 4 * whole)] * 2
    assert not any(has_kernel(task, layout) for task in attention)
    ours = dataclasses.replace(layout, attention=AttentionPlan("all_gather", ring=4))
    assert all(has_kernel(task, ours) for task in attention)
    # the last quarter's queries, a block of 256, see the keys of all four
    assert [device_cost(task, ours).unmasked for task in attention] == [1] * 2
    short = dataclasses.replace(
        ours, mesh={"data": 16}, attention=AttentionPlan("all_gather", ring=16)
    )  # 64 positions of a device, less than the kernel's 128
    assert not any(has_kernel(task, short) for task in attention)
    by_heads = dataclasses.replace(layout, compute={"kv_head": ("data",), "heads": ("data",), "batch": ()})
    assert all(has_kernel(task, by_heads) for task in attention)


@pytest.mark.parametrize(
    ("strategy", "ulysses", "ring", "kind"),
    [
        ("all_gather", 1, 8, "zigzag"), ("ring", 1, 8, "contiguous"), ("ring", 1, 8, "zigzag"),
        ("ulysses", 8, 1, "contiguous"), ("hybrid", 4, 2, "zigzag"), ("hybrid", 2, 4, "contiguous"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_model", [1, 4])
def test_products_and_the_choice_of_a_strategy_agree(strategy, ulysses, ring, kind, by_model):
    """What product by product is received, and computed of scores, is what `auto` weighs for attention as a whole."""
    model = build_model({**read_config("configs/models/llama-3.1-8b.json", None), "num_hidden_layers": 1}, 8192)
    llama = plan_step(model, Workload("batch", 2, 8192, "bfloat16", "bfloat16"))
    sizes = {"replica": ring, "data": ulysses} if strategy == "hybrid" else {"replica": 1, "data": 8}
    along = tuple(axis for axis, size in sizes.items() if size > 1)
    compute = {"position": along, "kv_head": ("model",), "heads": ("model",)}
    method = AttentionPlan(strategy, ulysses, ring, kind)
    layout = ShardingAssignment(
        {**sizes, "model": by_model}, compute, {}, llama.merged, llama.activation_axes, attention=method
    )
    shares = [device_cost(task, layout) for task in llama.tasks if task.kind == "attention"]
    heads = Heads(2, 8 // by_model, 4, 128, 128)
    weighed = weigh(
        strategy,
        SequenceLayout(8192, ring, ulysses, kind),
        CAUSAL,
        heads,
        along,
        layout.mesh,
        parse_slice(f"cpu-{8 * by_model}"),
    )
    assert sum(t.bytes for each in shares for t in each.traffic) == pytest.approx(weighed.received_bytes)
    flops = sum(each.unmasked * each.product.flops for each in shares)
    generation = parse_slice("cpu-8").generation
    assert flops / generation.flops == pytest.approx(weighed.compute_seconds)


WIDE = 2
"""Gradients in float32, in bfloat16 of what they are of."""


@pytest.mark.parametrize(
    ("strategy", "ulysses", "ring", "moved"),
    [
        # keys and values (2) come in the forward pass and when it is done again; gradients go back
        ("all_gather", 1, 4, {"all-gather": 2 * (2 * 3), "reduce-scatter": WIDE * (2 * 3)}),
        ("ring", 1, 4, {"collective-permute": 3 * (2 * 3) + WIDE * (2 * 3)}),
        # queries and outputs (4 each) too, and their gradients
        ("ulysses", 4, 1, {"all-to-all": 3 * (2 + 8) * 3 / 4}),
        ("hybrid", 2, 2, {"all-to-all": 3 * (2 + 8) / 2, "collective-permute": 3 * 2 + WIDE * 2}),
    ],
)
def test_attention_of_a_training_step(strategy, ulysses, ring, moved):
    """As the TPU compiler has it: tests/compiler/test_verify.py."""
    model = build_model({**read_config("configs/models/llama-3.1-8b.json", None), "num_hidden_layers": 1}, 4096)
    llama = plan_step(model, Workload("batch", 2, 4096, "bfloat16", "bfloat16", "train"))
    sizes = {"replica": ring, "data": ulysses} if strategy == "hybrid" else {"replica": 4, "data": 1}
    along = tuple(axis for axis, size in sizes.items() if size > 1)
    method = AttentionPlan(strategy, ulysses, ring)
    mesh = {**sizes, "model": 2}
    layout = ShardingAssignment(mesh, {"position": along}, {}, llama.merged, llama.activation_axes, attention=method)
    shares = {task: device_cost(task, layout) for task in llama.tasks}
    received = dict.fromkeys(moved, 0.0)
    for task, mine in shares.items():
        for each in mine.traffic if task.kind == "attention" else ():
            received[each.kind] += each.bytes
    own = 2 * (2 * 4096 * 8 * 128) / 4
    assert received == {kind: times * own for kind, times in moved.items()}
    # every weight of the layer is the same for all positions, those that make keys and values among them
    summed = {t.bytes for mine in shares.values() for t in mine.traffic if t.kind == "all-reduce" and "qkv" in t.cause}
    assert summed == {2 * 3 / 4 * 2 * 4096 * size * 128 for size in (8, 32)}


def test_memory_of_the_largest_moment():
    """In a layer: the stream, what the nonlinearity makes of the first product, and the second product, added to it."""
    layout = ShardingAssignment(MESH, TOKENS, {"embed": ("data",)}, {}, ("batch", "position"))
    found = memory(step(False), layout)
    stored = (2 * V * E + 2 * LAYERS * E * M) * 4 / 4
    tokens = B * P / 8
    assert found.parameters == stored and found.optimizer == 0
    # behind the layers: the stream, the logits, and the gathered head
    assert found.peak == stored + 4 * (tokens * E + tokens * V + V * E)
    assert found.logits == 4 * tokens * V and found.gathered_weights == 4 * V * E


def test_memory_of_what_is_prepared_early():
    """While tokens are looked up the layers' parameters may be copied already, and in a layer both its weights and the
    head be gathered."""
    layout = ShardingAssignment(
        MESH,
        TOKENS,
        {"embed": ("data",)},
        {},
        ("batch", "position"),
        CompilerQuirks(copies_stacks=True, gathers_early=True),
    )
    early = memory(step(False), layout)
    assert (early.cast_parameters, early.gathered_weights) == (2 * LAYERS * E * M * 4 / 4, 4 * V * E)
    assert early.logits == 0 < early.activations
    moments = [point for point in step(False).points if any(item.role == "copied" for item in point)]
    in_layer = max(sum(buffer_bytes(i, layout) for i in m if i.role in ("gathered", "early")) for m in moments)
    assert in_layer == 4 * V * E + 2 * WEIGHT
    # a gather that leaves a weight out of order waits until it is used
    both = dataclasses.replace(layout, params={"embed": ("data",), "mlp": ("replica",)})
    assert all(
        buffer_bytes(item, both) == 0
        for point in moments
        for item in point
        if item.role == "early" and "mlp" in item.array.axes
    )


def test_rows_of_experts_in_float32():
    """Where the kernel writes float32 there are four bytes more for every number of the result that is being made."""
    config = {**read_config("configs/models/mixtral-8x7b.json", None), "num_hidden_layers": 2}
    mixtral = plan_step(build_model(config, 1024), Workload("batch", 8, 1024, "bfloat16", "bfloat16"))
    cut = {"mlp": ("model",), "vocab": ("model",)}
    layout = ShardingAssignment({"model": 16}, cut, cut, mixtral.merged, mixtral.activation_axes)
    plain, wide = (
        memory(mixtral, dataclasses.replace(layout, quirks=CompilerQuirks(wide_rows=w))) for w in (False, True)
    )
    experts_per_token, embed, mlp = 2, 4096, 14336
    tokens = 8 * 1024 * experts_per_token
    # without, the largest point has rows of embed twice: before and after they are put in order
    assert wide.activations - plain.activations == 2 * tokens * (embed + mlp / 16)


def test_sums_of_rows_in_float32():
    """The gradient of rows comes back through two weights: what is added up is in float32 until then, and the sum is
    not. The tokens that the rows are looked up in are there still, where rows themselves are not."""
    config = {**read_config("configs/models/mixtral-8x7b.json", None), "num_hidden_layers": 2}
    mixtral = plan_step(build_model(config, 1024), Workload("batch", 8, 1024, "float32", "bfloat16", "train"))
    layout = ShardingAssignment(
        {"model": 16}, {"mlp": ("model",)}, {"mlp": ("model",)}, mixtral.merged, mixtral.activation_axes
    )
    tokens, embed = 8 * 1024, 4096
    summed = [point for point in mixtral.points if sum(item.role == "summand" for item in point) == 2]

    def largest(role, **quirks):
        mine = dataclasses.replace(layout, quirks=CompilerQuirks(**quirks))
        return max(sum(buffer_bytes(item, mine) for item in point if item.role == role) for point in summed)

    assert largest("summand", wide_rows=True) == 2 * largest("summand") == 2 * 4 * 2 * tokens * embed
    assert largest("looked_up", frees_rows=True) == 2 * tokens * embed
    assert largest("looked_up") == 0 < largest("lingering")
    # products take slices of rows where the experts' embed axis rests cut: these stay, two of them
    assert largest("sliced", frees_rows=True) == 0
    layout = dataclasses.replace(layout, params={"embed": ("model",)})
    assert largest("sliced", frees_rows=True) == 2 * 2 * 2 * tokens * embed / 16


@pytest.mark.parametrize(("name", "times"), [("adamw", 2), ("lion", 1), ("sgd", 0), ("adafactor", 0)])
def test_what_optimizers_keep(name, times):
    """Moments of the parameters' sizes; Adafactor a row and a column for every matrix."""
    config = {**read_config("configs/models/llama-3.1-8b.json", None), "num_hidden_layers": 2}
    work = Workload("batch", 8, 1024, "float32", "bfloat16", "train", optimizer=name)
    llama = plan_step(build_model(config, 1024), work)
    layout = ShardingAssignment(
        {"data": 8}, {"batch": ("data",)}, {"embed": ("data",)}, llama.merged, llama.activation_axes
    )
    found = memory(llama, layout)
    assert found.optimizer / found.parameters == pytest.approx(times, abs=0.02)
    assert (found.optimizer > 0) == (name != "sgd")


def test_no_optimizer():
    with pytest.raises(ConfigError, match="'adamv' is no optimizer of optax; did you mean 'adam'"):
        optimizer("adamv")
    with pytest.raises(ConfigError, match="has lists of arrays as state, which no mapping can cut"):
        weight = jax.ShapeDtypeStruct((2, 3), "float32")
        abstract_state(optimizer("sm3"), hax.NamedArray(weight, (hax.Axis("embed", 2), hax.Axis("mlp", 3))))
    with pytest.raises(ConfigError, match=r"needs more than gradients; use another: .*'value_fn'"):
        abstract_state(optimizer("lbfgs"), weight)


def test_training_keeps_no_masks():
    """The loop over layers is given them, but kernels go by positions. Tables of angles there are, cut as positions."""
    model = build_model({**read_config("configs/models/llama-3.1-8b.json", None), "num_hidden_layers": 2}, 8192)
    llama = plan_step(model, Workload("batch", 1, 8192, "bfloat16", "bfloat16", "train"))
    kept = [item.array for point in llama.points for item in point if item.role == "kept"]
    assert not any(array.factors.count((None, 8192)) == 2 for array in kept)
    assert (("position", 8192), ("head_size", 128)) in [array.factors for array in kept]


@pytest.mark.parametrize("checkpointing", ["default", "save_all"])
def test_what_training_keeps_of_every_layer(checkpointing):
    config = {**read_config("configs/models/llama-3.1-8b.json", None), "num_hidden_layers": 8}
    llama = plan_step(
        build_model(config, 4096), Workload("batch", 8, 4096, "bfloat16", "bfloat16", "train", checkpointing)
    )
    layout = ShardingAssignment(
        {"data": 8}, {"batch": ("data",)}, {"embed": ("data",)}, llama.merged, llama.activation_axes
    )
    found = memory(llama, layout)
    stream = 8 * 4096 * 4096 * 2 / GIB
    everything = 8 * 4096 * (3 * 4096 + 2 * 1024 + 3 * 14336) * 2 / GIB
    assert found.optimizer == pytest.approx(2 * found.parameters, rel=1e-3)
    kept = found.activations / GIB
    assert (stream < kept < 3 * stream) if checkpointing == "default" else kept > everything
