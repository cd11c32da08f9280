"""Levanter, run on eight devices, fails exactly for the mappings that the lint reports as errors."""

import draccus
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from levanter.layers.attention import AttentionMask
from levanter.trainer import TrainerConfig

from shardplan.lint.lint import lint_trainer, target_of
from shardplan.model.levanter_compat import IS_MARIN

BATCH = 8


@pytest.mark.parametrize(
    ("mapping", "error"),
    [
        ({"axis_resources": {"mlp": "model", "kv_head": "model", "heads": "model"}}, None),
        # only the results of linear layers are sharded: an input may have batch and heads on one mesh axis
        ({"model_axis_size": 4, "axis_resources": {"heads": "data"}, "fsdp_axis": "kv_head"}, None),
        # Levanter ignores unknown axes silently
        ({"axis_resources": {"kv_heads": "model", "layers": "model"}}, None),
        pytest.param({"fsdp_axis": "mlp", "axis_resources": {"mlp": "model"}}, None, marks=pytest.mark.whole),
        ({"axis_resources": {"kv_head": "model", "head_size": "model"}}, "DuplicateSpecError"),
        ({"axis_resources": {"kv_head": "data"}, "fsdp_axis": None}, "DuplicateSpecError"),
        ({"parameter_axis_resources": {"mlp": "data"}}, "DuplicateSpecError"),
        (
            {"parameter_axis_resources": {"mlp": ["model", "data"]}, "fsdp_axis": None},
            None if IS_MARIN else "ValueError",
        ),
        ({"model_axis_size": 8, "axis_resources": {"kv_head": "model"}}, "IndivisibleError"),
    ],
    ids=str,
)
def test_levanter_fails_where_the_lint_reports_errors(golden, make_config, mapping, error):
    trainer = {"model_axis_size": 2, "train_batch_size": BATCH, **mapping}
    if IS_MARIN:
        trainer = in_mesh_schema(trainer)
    config = make_config(model_ref=golden / "llama", hardware_slice="cpu-8", workload_batch=BATCH, workload_position=8)
    target = target_of(config)
    assert bool(lint_trainer(trainer, target).errors) == (error is not None)
    raised = None
    try:
        _forward(draccus.decode(TrainerConfig, trainer), target.model)
    except Exception as caught:
        raised = type(caught).__name__
    assert raised == error


def in_mesh_schema(flat):
    """The same mesh and mappings as in the flat section `flat`."""
    fsdp = flat.get("fsdp_axis", "embed")
    return {
        "train_batch_size": flat["train_batch_size"],
        "mesh": {
            "axes": {"model": flat["model_axis_size"]},
            "shared_mapping": {"mlp": None, "heads": None, **flat.get("axis_resources", {})},
            "param_mapping": {**flat.get("parameter_axis_resources", {}), **({fsdp: "data"} if fsdp else {})},
        },
    }


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
