"""Levanter, run on eight devices, fails exactly for the mappings that the lint reports as errors."""

import draccus
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from levanter.layers.attention import AttentionMask
from levanter.trainer import TrainerConfig

from shardplan.lint.lint import lint_trainer, target_of

BATCH = 8


@pytest.mark.parametrize(
    ("mapping", "error"),
    [
        ({"shared": {"mlp": "model", "kv_head": "model", "heads": "model"}}, None),
        # only the results of linear layers are sharded: an input may have batch and heads on one mesh axis
        ({"model": 4, "shared": {"heads": "data"}, "stored": {"kv_head": "data"}}, None),
        # Levanter ignores unknown axes silently
        ({"shared": {"kv_heads": "model", "layers": "model"}}, None),
        pytest.param({"shared": {"mlp": "model"}, "stored": {"mlp": "data"}}, None, marks=pytest.mark.whole),
        ({"shared": {"kv_head": "model", "head_size": "model"}}, "DuplicateSpecError"),
        ({"shared": {"kv_head": "data"}, "stored": {}}, "DuplicateSpecError"),
        ({"stored": {"mlp": "data", "embed": "data"}}, "DuplicateSpecError"),
        ({"stored": {"mlp": ["model", "data"]}}, None),
        ({"model": 8, "shared": {"kv_head": "model"}}, "IndivisibleError"),
        ({"family": "mixtral", "shared": {"experts": "model"}}, "ValueError"),
        ({"family": "mixtral", "shared": {"mlp": "model"}, "stored": {"experts": "data"}}, None),
    ],
    ids=str,
)
def test_levanter_fails_where_the_lint_reports_errors(golden, make_config, mapping, error):
    mesh = {
        "axes": {"model": mapping.get("model", 2)},
        "shared_mapping": {"mlp": None, "heads": None, **mapping.get("shared", {})},
        "param_mapping": mapping.get("stored", {"embed": "data"}),
    }
    trainer = {"train_batch_size": BATCH, "mesh": mesh}
    config = make_config(
        model_ref=golden / mapping.get("family", "llama"),
        hardware_slice="cpu-8",
        workload_batch=BATCH,
        workload_position=8,
    )
    target = target_of(config)
    assert bool(lint_trainer(trainer, target).errors) == (error is not None)
    raised = None
    try:
        _forward(draccus.decode(TrainerConfig, trainer), target.model)
    except Exception as caught:
        raised = type(caught).__name__
    assert raised == error


def _forward(trainer, model):
    """Compute logits with the trainer's mesh and mappings, as Levanter's evaluation does."""
    trainer._validate_and_set_defaults()
    with trainer.use_device_mesh():
        params, compute = trainer.parameter_axis_mapping, trainer.compute_axis_mapping

        @hax.named_jit(axis_resources=params)
        def init():
            module = model.config.model_type.init(model.vocab, model.config, key=jax.random.PRNGKey(0))
            return hax.shard(module, params)

        @hax.named_jit(axis_resources=compute)
        def logits(module, tokens):
            return module(hax.shard(tokens), attn_mask=AttentionMask.causal())

        tokens = hax.zeros((hax.Axis("batch", BATCH), model.template.Pos.resize(8)), dtype=jnp.int32)
        return logits(init(), tokens)
