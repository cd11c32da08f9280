"""Levanter's Trainer trains a decoder on eight devices, and goes on from its checkpoint as if it had not stopped."""

import dataclasses

import haliax as hax
import jax
import levanter.tracker
import numpy as np
import optax
import pytest
from conftest import ROOT
from levanter.data.dataset import ListAsyncDataset
from levanter.models.lm_model import LmExample
from levanter.trainer import Trainer
from test_levanter_yaml import decode_trainer, given_plan, mean_loss

from shardplan.search.make_plan import model_from_config

FAMILIES = ROOT / "tests" / "golden" / "families"
MAPPINGS = {"batch": ["replica", "data"], "mlp": ["model"]}, {"mlp": ["model"], "embed": ["data"]}
POSITIONS, BATCH, STEPS = 32, 8, 10


@pytest.fixture
def train(make_config, tmp_path):
    """Train a family with Levanter's Trainer and a planned sharding; returns step -> loss."""

    def run(family, name, steps):
        config = make_config(
            model_ref=FAMILIES / family,
            workload_kind="train",
            workload_batch=BATCH,
            workload_microbatches=2,
            workload_position=POSITIONS,
            workload_param_dtype="float32",
            workload_compute_dtype="float32",
        )
        model = model_from_config(config)
        settings = decode_trainer(given_plan(config, (2, 2, 2), *MAPPINGS))
        settings.tracker, settings.id = levanter.tracker.NoopConfig(), name
        settings.num_train_steps, settings.log_jaxprs, settings.log_xla_hlo = steps, False, False
        settings.checkpointer = dataclasses.replace(
            settings.checkpointer, base_path=str(tmp_path), keep=[{"every": STEPS // 2}]
        )
        position = hax.Axis("position", POSITIONS)
        rows = [(np.arange(POSITIONS, dtype=np.int32) + row) % model.vocab.size for row in range(STEPS * BATCH)]
        examples = ListAsyncDataset([LmExample.causal(hax.named(row, position)) for row in rows])
        losses = {}
        with (
            levanter.tracker.current_tracker(settings.tracker.init(name)),
            Trainer(settings, optax.adam(1e-3), mean_loss) as trainer,
        ):
            trainer.add_hook(lambda info: losses.update({int(info.step): float(info.loss)}), every=1)
            key = jax.random.PRNGKey(0)
            state = trainer.initial_state(key, model_init=lambda: model.config.build(model.vocab, key=key))
            trainer.train(state, trainer.data_loader(examples).iter_from_step(int(state.step)))
        return losses

    return run


@pytest.mark.whole
@pytest.mark.parametrize("family", ["gpt_neox", "gemma3_text"])
def test_a_training_that_was_stopped_has_the_same_losses(train, family):
    """Bit by bit."""
    expected = train(family, "uninterrupted", STEPS)
    before = train(family, "stopped", STEPS // 2)
    after = train(family, "stopped", STEPS)
    assert [*expected] == [*range(STEPS)] and expected[STEPS - 1] < expected[0]
    assert before.keys() | after.keys() == expected.keys() and min(after) == STEPS // 2
    assert before | after == expected
