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
from levanter.tracker.tracker import NoopTracker
from levanter.trainer import Trainer
from test_levanter_yaml import decode_trainer, given_plan, mean_loss

from shardplan.search.make_plan import model_from_config

FAMILIES = ROOT / "tests" / "golden" / "families"
MAPPINGS = {"batch": ["replica", "data"], "mlp": ["model"]}, {"mlp": ["model"], "embed": ["data"]}
POSITIONS, BATCH, STEPS = 32, 8, 10


@pytest.fixture
def train(make_config, tmp_path):
    """Train a family with Levanter's Trainer and a planned sharding; returns step -> loss."""

    def run(family, name, steps, mappings=MAPPINGS, loss_function=mean_loss, tracker=None, **changes):
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
        model_config = dataclasses.replace(model.config, **changes)
        settings = decode_trainer(given_plan(config, (2, 2, 2), *mappings))
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
            levanter.tracker.current_tracker(tracker or settings.tracker.init(name)),
            Trainer(settings, optax.adam(1e-3), loss_function) as trainer,
        ):
            trainer.add_hook(lambda info: losses.update({int(info.step): float(info.loss)}), every=1)
            key = jax.random.PRNGKey(0)
            state = trainer.initial_state(key, model_init=lambda: model_config.build(model.vocab, key=key))
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


class RecordingTracker(NoopTracker):
    """Keeps what it receives, by step."""

    def __init__(self):
        self.steps = {}

    def log(self, metrics, *, step, commit=None):
        self.steps.setdefault(int(step), {}).update(metrics)


@pytest.mark.whole
def test_statistics_of_experts_reach_the_tracker(train):
    """At every step, of all microbatches, from the loss of Levanter's programs; and checkpoints have the experts."""

    def program_loss(model, example, *, key=None):
        return model.compute_next_token_loss(example, key=key)

    mappings = {"batch": ["replica", "data"], "experts": ["data"]}, {"experts": ["data"], "embed": ["model"]}
    tracker = RecordingTracker()
    changes = {"loss_function": program_loss, "expert_statistics": True}
    losses = train("qwen3_moe", "recorded", 2, mappings=mappings, tracker=tracker, **changes)
    assert [*losses] == [*tracker.steps] == [0, 1]
    for metrics in tracker.steps.values():
        for layer in range(3):
            prefix = f"train/moe/layer_{layer:02d}"
            loads = np.array([metrics[f"{prefix}/expert_{expert:03d}_load"] for expert in range(8)])
            assert loads.sum() == pytest.approx(1)
            # a mean of two microbatches, of which each has a busiest expert
            assert 1 <= loads.max() * 8 <= metrics[f"{prefix}/load_max_over_mean"] * (1 + 1e-6)
            assert 0 < metrics[f"{prefix}/router_entropy"] <= np.log(8) + 1e-6
            assert metrics[f"{prefix}/overflow_rows"] == 0
