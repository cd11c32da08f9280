"""Steps of a decoder with Native Sparse Attention on 8 devices, as plans say, against one device without a plan."""

import json

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_native_sparse_attention_traffic import received_by_shape

from shardplan.decoder.layers.sparse_layers import sparse_attentions
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.decoder.parts.attention.sparse.sharding.traffic import backward_traffic, forward_traffic
from shardplan.execution import specialize, step_program
from shardplan.execution.device_mesh import make_mesh
from shardplan.plan.attention_plan import AttentionPlan, SparseKernel, Strategy
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import model_from_config
from shardplan.steps.forward import SequenceForward
from shardplan.steps.kind import StepRun
from shardplan.steps.kinds import step_of

CONFIG = {
    "model_type": "llama_nsa", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "native_sparse_attention": {"block": 8, "stride": 4, "selection_block": 8, "selected": 4, "window": 24},
}  # fmt: skip
BATCH = 2
DDP, FSDP = {}, {"embed": ["data"], "phi_k_hidden": ["data"]}
SEQUENCE = {"position": ["data"], "kv_head": ["model"]}


@pytest.fixture
def planned(make_config, tmp_path):
    """The model of a step, and its plan for given mappings."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))

    def make(kind, batch, position, mesh, compute, params, attention):
        config = make_config(
            model_config=path, workload_kind=kind, workload_batch=batch, workload_position=position,
            workload_param_dtype="float32", workload_compute_dtype="float32",
        )  # fmt: skip
        model = model_from_config(config)
        sizes = dict(zip(("replica", "data", "model"), mesh, strict=True))
        return model, plan_given_mappings(config, model, sizes, compute, params, attention)

    return make


def build(model):
    made = model.config.build(model.vocab, key=jax.random.PRNGKey(0))
    return jax.tree.map(lambda array: array * 10 if array.std() > 0 else array, made)


def inputs_of(model, plan):
    rng = np.random.default_rng(3)
    shape = (plan.workload.batch, plan.workload.position)
    tokens = hax.named(jnp.asarray(rng.integers(0, 64, shape), jnp.int32), ("batch", "position"))
    return tokens, hax.ones_like(tokens).astype(bool)


def program_of_plan(model, plan):
    """The step of a plan on the devices."""
    return step_program(specialize(model, plan), plan, make_mesh(plan))


def place(program, *arguments):
    """The arguments of a program, with its shardings."""
    like, static = eqx.partition(program.arguments, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    arrays = jax.tree.leaves(eqx.filter(arguments, eqx.is_array))
    placed = [
        jnp.copy(jax.device_put(array, each.sharding))
        for array, each in zip(arrays, jax.tree.leaves(like), strict=True)
    ]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(like), placed), static)


def run_planned(model, plan, *arguments):
    """Run the step of a plan on the devices; returns its results."""
    program = program_of_plan(model, plan)
    return program.compile({})(*place(program, *arguments))


def initial_state(work, module):
    """The state of the optimizer before the first step."""
    (state,) = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf,
        step_of(work).state(work.resolve(), eqx.filter(module, eqx.is_array)),
    )
    return state


@pytest.mark.parametrize("kernel", SparseKernel)
@pytest.mark.parametrize(("layout", "position"), [("contiguous", 96), ("zigzag", 64)])
def test_evaluation_with_sharded_positions(planned, kernel, layout, position):
    """Losses of all tokens, with positions over four devices and groups over two."""
    method = AttentionPlan(Strategy.ALL_GATHER, 1, 4, layout, kernel)
    model, plan = planned("eval", 2, position, (1, 4, 2), SEQUENCE, {"embed": ["data"]}, method)
    module, (tokens, predicted) = build(model), inputs_of(model, plan)
    run = StepRun(model, plan.workload.resolve(), SequenceForward())
    expected = hax.named_jit(lambda m, *a: step_of(plan.workload).compute(run, m, *a))(module, tokens, predicted)
    losses = run_planned(model, plan, module, tokens, predicted)
    for one, other in zip(jax.tree.leaves(losses), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(one) - np.asarray(other)).max() < 1e-4 * np.abs(np.asarray(other)).max()


@pytest.mark.parametrize(("params", "kernel"), [(DDP, "dense_mask"), (FSDP, "dense_mask"), (FSDP, "gathered_blocks")])
def test_training(planned, params, kernel):
    """The loss and the updated parameters of a step are those of one device."""
    model, plan = planned("train", 8, 40, (1, 8, 1), {"batch": ["data"]}, params, AttentionPlan(kernel=kernel))
    module, (tokens, predicted) = build(model), inputs_of(model, plan)
    work, kind, state = plan.workload.resolve(), step_of(plan.workload), initial_state(plan.workload, module)
    run = StepRun(model, work, SequenceForward())
    expected = hax.named_jit(lambda *a: kind.compute(run, *a))(module, state, tokens, predicted)
    updated, _, loss = run_planned(model, plan, module, state, tokens, predicted)
    assert float(loss) == pytest.approx(float(expected[2]), rel=1e-5)
    before = jax.tree.leaves(module)
    for old, one, other in zip(before, jax.tree.leaves(updated), jax.tree.leaves(expected[0]), strict=True):
        moved = np.abs(np.asarray(other) - np.asarray(old))
        difference = np.abs(np.asarray(one) - np.asarray(other))
        # a first step of Adam is the sign of the gradient, so that gradients of nearly 0 may move either way
        assert np.quantile(difference, 0.99) < 0.02 * moved.max() + 1e-7


def test_training_with_sharded_positions(planned):
    """Losses of three steps are those of one device, and the program transfers what the table of traffic says."""
    method = AttentionPlan(Strategy.ALL_GATHER, 1, 4, "contiguous", "dense_mask")
    mesh, params = (1, 4, 2), {"embed": ["data"]}
    model, plan = planned("train", BATCH, 64, mesh, SEQUENCE, params, method)
    module, (tokens, predicted) = build(model), inputs_of(model, plan)
    state = initial_state(plan.workload, module)
    run, kind = StepRun(model, plan.workload.resolve(), SequenceForward()), step_of(plan.workload)
    alone = hax.named_jit(lambda *a: kind.compute(run, *a))
    program = program_of_plan(model, plan)
    compiled = program.lower().compile()
    check_transfers(model, compiled.as_text())
    one, many = (module, state), place(program, module, state, tokens, predicted)
    for _ in range(3):
        *one, expected = alone(*one, tokens, predicted)
        *updated, loss = compiled(*eqx.filter(many, eqx.is_array))
        many = place(program, *updated, tokens, predicted)
        assert float(loss) == pytest.approx(float(expected), rel=1e-4)


def check_transfers(model, text):
    """The gathers of keys and values in a training step, within 1 %, and nothing that runs on the host."""
    assert not any(word in text for word in ("callback", "infeed", "outfeed", "SendToHost", "RecvFromHost"))
    config, parts = next(sparse_attentions(model.config.segments)).sizes, PositionParts(64, 4)
    received = received_by_shape(text, 8, ("all-gather", "reduce-scatter"))
    forward, backward = forward_traffic(config, parts, 1, 4), backward_traffic(config, parts, 1, 4)
    passes = 2  # the text has the loop over layers once for each: gradient checkpointing computes layers again
    found, expected = {}, {}
    for rows, name in ((64, "selected"), (64 // config.stride, "compressed")):
        found[name] = tuple(
            sum(
                size.max()
                for (kind, dims), size in received.items()
                if (kind, dims[1:2], len(dims)) == (each, (at,), 4)
            )
            for each, at in (("all-gather", rows), ("reduce-scatter", rows // 4))
        )
        expected[name] = passes * BATCH * getattr(forward, name), BATCH * getattr(backward, name)
    for name, each in expected.items():
        assert found[name] == pytest.approx(each, rel=0.01), (found, expected, received)
