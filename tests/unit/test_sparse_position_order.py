"""Plans in zigzag order for Native Sparse Attention, outside of `shardplan train` and `shardplan eval`."""

import json
from dataclasses import replace

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from levanter.models.lm_model import LmExample
from test_planned_sparse_attention import CONFIG, model_of, plan_of

from shardplan import load_pretrained
from shardplan.attention import SequenceLayout, shard_sequence
from shardplan.attention.sequence import sequence_activations
from shardplan.errors import CheckpointError, ConfigError
from shardplan.execution import specialize
from shardplan.levanter_config.writer import trainer_yaml
from shardplan.positions.sequence_order import SequenceOrder

POSITIONS = 2048


@pytest.fixture(scope="module")
def zigzag():
    """A plan in zigzag order."""
    workload = {"batch": 1, "position": POSITIONS}
    plan = plan_of(workload=workload, slice="cpu-8", pin=["position=data", "mesh.data=8"])
    return replace(plan, attention=replace(plan.attention, layout=SequenceOrder.ZIGZAG))


@pytest.fixture(scope="module")
def contiguous(zigzag):
    return replace(zigzag, attention=replace(zigzag.attention, layout=SequenceOrder.CONTIGUOUS))


def comments(plan):
    """The comments of the trainer section as one line."""
    return " ".join(line.removeprefix("# ") for line in trainer_yaml(plan).splitlines() if line.startswith("#"))


@pytest.mark.parametrize("slice_name", ["cpu-8", "v5p-16"])
def test_a_trainer_section_names_the_order(zigzag, contiguous, slice_name):
    """On TPUs and on CPUs; and the method of the selected branch, which the section of the model has to name."""
    zigzag, contiguous = (
        replace(plan, hardware=replace(plan.hardware, slice=slice_name)) for plan in (zigzag, contiguous)
    )
    assert comments(zigzag).endswith(
        "model.selected_method must be dense_mask, as planned. Positions are planned in zigzag order, and Levanter's "
        "programs have them in the order of the sequence: run shardplan eval instead, or plan with --pin position="
    )
    assert comments(contiguous).endswith("model.selected_method must be dense_mask, as planned.")


def test_loaded_models_have_the_order_of_the_plan(zigzag, contiguous, tmp_path, raises_message):
    """Refused before any weight is read; a model that is made for the plan is accepted, and lacks its weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with raises_message(ConfigError):
        load_pretrained(str(tmp_path), plan=zigzag)
    for plan, config in ((contiguous, None), (zigzag, specialize(model_of(POSITIONS), zigzag).config)):
        with pytest.raises(CheckpointError, match="safetensors"):
            load_pretrained(str(tmp_path), plan=plan, config=config)


def test_a_sequence_in_another_order_is_refused(zigzag, raises_message):
    """A model that is made without the plan would take neighbours in the array for neighbours in the sequence."""
    layout = SequenceLayout(POSITIONS, 8, kind="zigzag")
    tokens = hax.zeros((hax.Axis("batch", 1), hax.Axis("position", POSITIONS)), jnp.int32)
    sequence = shard_sequence(LmExample.causal(tokens["batch", 0]), layout)
    with raises_message(ConfigError):
        sequence_activations(model_of(POSITIONS).template, sequence)
    template = specialize(model_of(POSITIONS), zigzag).template
    shape = jax.eval_shape(lambda module: sequence_activations(module, sequence), template)
    assert shape.resolve_axis("position").size == POSITIONS
