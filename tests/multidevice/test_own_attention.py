"""Models of one's own as plans say, with Levanter's `Attention`, or with `attend_to_blocks`."""

import json

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample
from own_attention_model import OwnAttentionConfig
from own_block_model import OwnBlockConfig
from own_model import OwnModel

from shardplan import load_config, make_plan
from shardplan.attention import Method, SequenceLayout, restore_order, shard_sequence, with_sequence_parallel
from shardplan.attention.sequence import sequence_activations
from shardplan.errors import InfeasibleError
from shardplan.execution.device_mesh import make_mesh
from shardplan.execution.specialize import specialize
from shardplan.execution.step_program import step_program
from shardplan.plan.attention_plan import Strategy
from shardplan.search.make_plan import model_from_config

LENGTH = 64


def expected_losses(model, tokens):
    """float64[sequence, token]: nats of every next token, on one device."""
    batch = hax.named(jnp.asarray(tokens), ("batch", "position"))
    logits = model.head(model.activations(batch, AttentionMask.causal())).rearrange(("batch", "position", "vocab"))
    shifted = np.asarray(logits.array).astype(np.float64)[:, :-1]
    normalised = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(normalised, tokens[:, 1:, None], -1)[..., 0]


def config_of(folder, own_class, length, setting, **sections):
    sizes = {"positions": length, "width": 32, "depth": 2, **setting}
    (folder / "config.json").write_text(json.dumps({"model_type": "own_model", "vocab_size": 40, **sizes}))
    return load_config(
        model={
            "config": str(folder / "config.json"),
            "levanter_class": f"{own_class.__module__}:{own_class.__name__}",
        },
        hardware={"slice": "cpu-8"},
        workload={"batch": 2, "position": length, "param_dtype": "float32", "compute_dtype": "float32"},
        **sections,
    )


POSITIONS = ["position=data"], {"data": 4, "replica": 2}
HEADS = ["kv_head=model"], {"model": 2, "data": 2, "replica": 2}


@pytest.mark.parametrize(
    ("own_class", "setting", "pins", "mesh"),
    [
        (OwnAttentionConfig, {"has_sinks": False}, *POSITIONS),
        # a module that does more than Levanter's Attention: then the function that it calls is replaced
        (OwnAttentionConfig, {"has_sinks": True}, *POSITIONS),
        (OwnBlockConfig, {"method": "gathered_blocks"}, *POSITIONS),
        (OwnBlockConfig, {"method": "kernel"}, *HEADS),
    ],
)
def test_sharded_as_planned(tmp_path, own_class, setting, pins, mesh):
    """Attention to blocks follows the mapping of the plan, and needs no strategy."""
    config = config_of(tmp_path, own_class, LENGTH, setting, pin=pins, mesh=mesh)
    plan = make_plan(config)
    assert (plan.attention.strategy != Strategy.NONE) == (own_class is OwnAttentionConfig)
    planned = specialize(model_from_config(config), plan)
    plain = planned.config.model_type.init(hax.Axis("vocab", 40), planned.config, key=jax.random.PRNGKey(1))
    program = step_program(planned, plan, make_mesh(plan))
    abstract = eqx.filter(program.arguments[0], lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    leaves = zip(jax.tree.leaves(eqx.filter(plain, eqx.is_array)), jax.tree.leaves(abstract), strict=True)
    arrays = [jax.device_put(array, like.sharding) for array, like in leaves]
    module = jax.tree.unflatten(jax.tree.structure(abstract), arrays)
    tokens = np.random.default_rng(0).integers(0, 40, (2, LENGTH)).astype(np.int32)
    like = program.arguments[1]
    inputs = [
        hax.named(jax.device_put(values, like.array.sharding), like.axes)
        for values in (tokens, np.ones(tokens.shape, bool))
    ]
    losses = np.asarray(program.compile({})(module, *inputs).array)
    np.testing.assert_allclose(losses[:, :-1], expected_losses(plain, tokens), rtol=2e-5)


def test_no_plan_divides_a_block(tmp_path, raises_message):
    """Four blocks of eight tokens, which eight devices cannot share."""
    pins, mesh = ["position=data"], {"data": 8}
    with raises_message(InfeasibleError):
        make_plan(config_of(tmp_path, OwnBlockConfig, 32, {"method": "dense_mask"}, pin=pins, mesh=mesh))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_logits_are_those_of_the_unsharded_model(kind):
    model = OwnModel.init(hax.Axis("vocab", 40), OwnAttentionConfig(LENGTH), key=jax.random.PRNGKey(0))
    tokens = hax.named(np.random.default_rng(0).integers(0, 40, (2, LENGTH)), ("batch", "position")).astype(jnp.int32)
    expected = model.head(model.activations(tokens, AttentionMask.causal())).rearrange(("batch", "position", "vocab"))
    layout = SequenceLayout(LENGTH, 2, 2, kind)
    parallel = with_sequence_parallel(model, Method("hybrid", ulysses=2, layout=layout))
    sequence = shard_sequence(LmExample(tokens, hax.ones(tokens.axes), AttentionMask.causal()), layout)

    @hax.named_jit
    def logits(model, sequence):
        return restore_order(model.head(sequence_activations(model, sequence)), sequence)

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), hax.axis_mapping({"position": "model"}):
        actual = logits(parallel, sequence).rearrange(("batch", "position", "vocab"))
    np.testing.assert_allclose(actual.array, expected.array, atol=1e-5)
