"""The gradients of the decoder are those of transformers, by parameter, under the names of the checkpoint.

`scripts/make_gradient_reference.py` computed them in float64; `own_error` is the largest relative error of
transformers' own gradients in float32.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from decoder_families import FOLDER, config_of, text_tensors
from levanter.models.lm_model import LmExample

from shardplan.decoder.config import DecoderConfig
from shardplan.plan.workload.checkpointing import CheckpointPolicy
from shardplan.steps.checkpointing import checkpoint_policy

CASES = [
    ("gpt_neox", "default+context+up_proj+attn_out"), ("gpt_neox", "default"), ("cohere2", "default"),
    ("gemma3_text", "default"), ("gemma3_text", "recompute+query_proj+key_proj+gate_proj+mlp_out"), ("olmo3", "nested"),
    ("phi", "default"), ("gemma3_text", "offload_carries+query_proj+up_proj@host+context@host"),
    ("gpt_neox", "default+context+key_proj@host"),
]  # fmt: skip


def mean_loss(model, example):
    return (
        hax.sum(model.compute_next_token_loss(example, reduction=None)).scalar() / hax.sum(example.loss_weight).scalar()
    )


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [pytest.param(*case, marks=[pytest.mark.whole] if i else []) for i, case in enumerate(CASES)],
)
def test_gradients_equal_those_of_transformers(name, checkpointing):
    """Of the loss that Levanter's trainer asks for, with gradient checkpointing; a relative error of each parameter."""
    values, reference = config_of(name), dict(np.load(FOLDER / name / "gradients.npz"))
    tolerance = 2 * float(reference.pop("own_error")) + 1e-6
    config = DecoderConfig.from_hf_config(values)
    config = dataclasses.replace(
        config, gradient_checkpointing=checkpoint_policy(CheckpointPolicy.parse(checkpointing))
    )
    vocab = hax.Axis("vocab", values["vocab_size"])
    model = config.build(vocab, key=jax.random.PRNGKey(0)).from_state_dict(text_tensors(name))
    tokens = hax.named(np.load(FOLDER / name / "golden.npz")["tokens"], ("batch", "position"))
    example = hax.vmap(LmExample.causal, "batch")(tokens)
    gradients = eqx.filter_jit(eqx.filter_grad(mean_loss))(model, example).to_state_dict()
    assert gradients.keys() == reference.keys()
    errors = {}
    for key, expected in reference.items():
        errors[key] = np.abs(gradients[key] - expected).max() / np.abs(expected).max()
    assert max(errors.values()) <= tolerance, max(errors, key=errors.get)
