"""A model of one's own shards positions if its attention is Levanter's `Attention`."""

import json

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample
from own_attention_model import OwnAttentionConfig, OwnAttentionModel

from shardplan import load_config, make_plan
from shardplan.attention import Method, SequenceLayout, restore_order, shard_sequence, with_sequence_parallel
from shardplan.attention.sequence import sequence_activations
from shardplan.plan.attention_plan import Strategy

LENGTH = 64


def test_a_plan_shards_its_positions(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own_attention", "vocab_size": 40, "positions": LENGTH, "width": 32, "depth": 2})
    )
    plan = make_plan(
        load_config(
            model={"config": str(tmp_path / "config.json"), "levanter_class": "own_attention_model:OwnAttentionConfig"},
            hardware={"slice": "cpu-4"},
            workload={"batch": 1, "position": LENGTH},
            pin=["position=data"],
            mesh={"data": 4},
        )
    )
    assert plan.attention.strategy != Strategy.NONE


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_logits_are_those_of_the_unsharded_model(kind):
    model = OwnAttentionModel.init(hax.Axis("vocab", 40), OwnAttentionConfig(LENGTH), key=jax.random.PRNGKey(0))
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
