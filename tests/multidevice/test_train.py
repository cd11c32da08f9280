"""The train step on several devices, against optax on the unsharded model."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from levanter.models.lm_model import LmExample

from shardplan.checkpoint.load import stream_checkpoint
from shardplan.execution import specialize, step_program
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import model_from_config
from shardplan.steps.optimizer import make_optimizer
from shardplan.storage import open_folder

BATCH, POSITION, LEARNING_RATE = 8, 16, 1e-5
KEPT = "default+query_proj+key_proj+value_proj+context+attn_out+gate_proj+up_proj+mlp_out"
POLICIES = (
    "recompute", "nested", "save_all", "default+context", "default+up_proj", KEPT.replace("default", "recompute"),
    "offload_carries", f"{KEPT}@host", "offload_carries+gate_proj@host+context",
)  # fmt: skip


@pytest.mark.parametrize(
    ("microbatches", "name", "policy"),
    [(1, "adamw", "default"), (4, "adamw", KEPT)]
    + [pytest.param(1, name, "default", marks=pytest.mark.whole) for name in ("adafactor", "adamw+mu_bfloat16")]
    + [pytest.param(1, "adamw", policy, marks=pytest.mark.whole) for policy in POLICIES],
)
def test_train_step(make_config, golden, microbatches, name, policy):
    """One step updates parameters and state; Adafactor's state has fewer dimensions than its parameters.

    AdamW's state has the gradients, which are the same whatever becomes of activations.
    """
    config = make_config(
        model_ref=golden / "llama",
        workload_kind="train",
        workload_batch=BATCH,
        workload_position=POSITION,
        workload_microbatches=microbatches,
        workload_optimizer=name,
        workload_gradient_checkpointing=policy,
        workload_param_dtype="float32",
        workload_compute_dtype="float32",
    )
    model = model_from_config(config)
    mapping = {"batch": ["replica", "data"][: 2 if microbatches == 1 else 1], "mlp": ["model"]}
    plan = plan_given_mappings(
        config, model, {"replica": 2, "data": 2, "model": 2}, mapping, {**mapping, "embed": ["data"]}
    )
    as_planned = specialize(model, plan)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(plan.mesh))
    folder = open_folder(str(golden / "llama"))
    module, _ = stream_checkpoint(as_planned.template, folder, mesh, plan.param_mapping, "float32")
    rows = np.random.default_rng(0).integers(0, 200, (BATCH, POSITION), dtype=np.int32)
    predicted = np.ones_like(rows, bool)
    predicted[:, -1] = predicted[0] = False  # microbatches predict different numbers of tokens

    by_levanter = jax.tree.unflatten(jax.tree.structure(model.template), map(np.asarray, jax.tree.leaves(module)))
    expected_loss, expected_state, expected = reference(name, by_levanter, rows, predicted)

    program = step_program(as_planned, plan, mesh)
    abstract = program.arguments[2:]
    tokens, mask = (
        hax.NamedArray(jax.device_put(array.reshape(a.array.shape), a.array.sharding), a.axes)
        for array, a in zip((rows, predicted), abstract, strict=True)
    )
    assert len(tokens.axes) == (2 if microbatches == 1 else 3)
    state = jax.jit(make_optimizer(name).init)(eqx.filter(module, eqx.is_inexact_array))
    state = jax.tree.map(lambda array, a: jax.device_put(array, a.sharding), state, program.arguments[1])
    trained, state, loss = program.compile({})(module, state, tokens, mask)

    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    # gradients agree to 1e-6 of the largest, and their squares, which the state contains too, to twice that
    for actual, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        assert actual.dtype == wanted.dtype
        rounding = jnp.finfo(wanted.dtype).eps if wanted.dtype == jnp.bfloat16 else 0.0
        actual, wanted = np.asarray(actual, np.float32), np.asarray(wanted, np.float32)
        np.testing.assert_allclose(actual, wanted, rtol=rounding, atol=2e-6 * np.abs(wanted).max())
    # the sign of a gradient close to 0, which decides the update, is noise
    for actual, wanted in zip(jax.tree.leaves(trained), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(actual), wanted, rtol=0, atol=LEARNING_RATE)
        assert np.mean(np.abs(actual - wanted) < 0.01 * LEARNING_RATE) > 0.99


def reference(name, module, rows, predicted):
    """Return loss, optimizer state and parameters after one step on one device, without microbatches."""

    def loss_of(module):
        axes = (hax.Axis("batch", BATCH), module.Pos.resize(POSITION))
        logits = module(hax.named(rows, axes), attn_mask=LmExample.causal(hax.named(rows[0], axes[1:])).attn_mask)
        log_probabilities = jax.nn.log_softmax(
            logits.rearrange((*axes, module.Vocab)).array[:, :-1].astype(jnp.float32)
        )
        nats = -jnp.take_along_axis(log_probabilities, rows[:, 1:, None], -1)[..., 0]
        return (nats * predicted[:, :-1]).sum() / predicted.sum()

    loss, gradients = eqx.filter_value_and_grad(loss_of)(module)
    name, _, moments = name.partition("+mu_")
    transformation = getattr(optax, name)(LEARNING_RATE, **({"mu_dtype": moments} if moments else {}))
    arrays = eqx.filter(module, eqx.is_inexact_array)
    updates, state = transformation.update(gradients, transformation.init(arrays), arrays)
    return float(loss), state, eqx.apply_updates(module, updates)
