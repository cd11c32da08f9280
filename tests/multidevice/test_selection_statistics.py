"""Statistics of selected blocks in a training: closed form, counted once under any sharding, and none when off."""

import dataclasses

import haliax as hax
import jax
import numpy as np
import pytest
from levanter.models.lm_model import LmExample

from shardplan.decoder.config import DecoderConfig
from shardplan.decoder.layers.sparse_layers import sparse_attentions, with_selected_method
from shardplan.decoder.parts.attention.sparse.branches import selected_branch
from shardplan.decoder.parts.attention.sparse.statistics import closed_form

LAYERS, BATCH, POSITIONS, GROUPS, BLOCKS = 2, 8, 64, 2, 8
CONFIG = {
    "model_type": "llama_nsa", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": GROUPS,
    "max_position_embeddings": POSITIONS,
    "native_sparse_attention": {"block": 8, "stride": 4, "selection_block": 8, "selected": 4, "window": 24},
}  # fmt: skip
ROWS = BATCH * POSITIONS * GROUPS
STORED = {"embed": "data", "phi_k_hidden": "data", "phi_v_hidden": "data"}
ONE_DEVICE, DDP = ((1, 1, 1), {}, {}), ((1, 8, 1), {"batch": "data"}, {})
FSDP = ((1, 8, 1), {"batch": "data"}, STORED)
SHARDINGS = {
    "one device": ONE_DEVICE,
    "DDP": DDP,
    "FSDP": FSDP,
    "batch on half of the devices": ((2, 4, 1), {"batch": "data"}, STORED),
    "groups": ((1, 4, 2), {"batch": "data", "kv_head": "model"}, STORED),
    "positions": ((1, 4, 2), {"batch": "model", "position": "data"}, STORED),
}
"""Sizes of the axes replica, data and model; mappings of computations, and of stored parameters."""
CASES = [(name, True) for name in SHARDINGS] + [("one device", False), ("FSDP", False), ("groups", False)]


def model_config(**changes):
    return dataclasses.replace(DecoderConfig.from_hf_config(CONFIG), **{"selection_statistics": True, **changes})


def example():
    shape = (hax.Axis("batch", BATCH), hax.Axis("position", POSITIONS))
    tokens = hax.random.randint(jax.random.PRNGKey(1), shape, 0, 64)
    one = LmExample.causal(tokens["batch", 0])
    return dataclasses.replace(one, tokens=tokens, loss_weight=one.loss_weight.broadcast_axis(shape[0]))


def build(config):
    made = config.build(hax.Axis("vocab", 64), key=jax.random.PRNGKey(0))
    return jax.tree.map(lambda array: array * 10 if array.std() > 0 else array, made)  # attention is not flat


def loss_and_gradients(config, mesh=(1, 1, 1), compute=None, params=None):
    """The loss, its metrics and its gradients, computed as Levanter's Trainer does."""
    devices = np.array(jax.devices()[: np.prod(mesh)]).reshape(mesh)
    with jax.set_mesh(jax.sharding.Mesh(devices, ("replica", "data", "model"))):

        def loss_of(model, example):
            loss, metrics = model.compute_next_token_loss(example)
            return loss.scalar(), metrics

        def step(model, example):
            with hax.axis_mapping(compute or {}):
                return jax.value_and_grad(loss_of, has_aux=True)(model, example)

        run = hax.named_jit(step, axis_resources=params or {}, out_axis_resources=params or {})
        result = run(build(config), example())
    return jax.tree.map(np.asarray, result)


@pytest.fixture(scope="module")
def expected():
    (loss, metrics), gradients = loss_and_gradients(model_config())
    return loss, {name: float(metric.value()) for name, metric in metrics.items()}, gradients


@pytest.mark.parametrize(("sharding", "checkpointing"), CASES)
def test_a_training_has_the_closed_form(sharding, checkpointing, expected):
    """The figures of a step on 8 devices equal the closed form, and everything else those of one device.

    Blocks of layers that are computed again for gradients are counted once.
    """
    config = model_config(gradient_checkpointing=checkpointing)
    (loss, metrics), _ = loss_and_gradients(config, *SHARDINGS[sharding])
    values = {name: float(metric.value()) for name, metric in metrics.items()}
    form = closed_form(next(sparse_attentions(config.segments)).sizes, POSITIONS)
    for prefix, rows in [("nsa", LAYERS * ROWS), ("nsa/layer_00", ROWS), ("nsa/layer_01", ROWS)]:
        assert values[f"{prefix}/rows"] == rows
        assert {name: values[f"{prefix}/{name}"] for name in form} == form
    loads = [values[f"nsa/layer_01/block_{block:03d}_load"] for block in range(BLOCKS)]
    # as many blocks as a query selects: up to 4 of those that have begun
    assert sum(loads) == pytest.approx(np.minimum(np.arange(POSITIONS) // 8 + 1, 4).mean(), rel=1e-6)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert values == pytest.approx(expected[1], rel=1e-4)


def test_statistics_change_neither_the_loss_nor_gradients(expected):
    loss, gradients = loss_and_gradients_without()
    assert loss == pytest.approx(expected[0], rel=1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[2]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def loss_and_gradients_without():
    def step(model, example):
        return jax.value_and_grad(lambda m: m.compute_next_token_loss(example).scalar())(model)

    config = model_config(selection_statistics=False)
    return jax.tree.map(np.asarray, hax.named_jit(step)(build(config), example()))


def test_nothing_is_traced_without_statistics(monkeypatch):
    """The program is then the one that it was before there were any."""

    def fail(*_):
        raise AssertionError("statistics were traced")

    monkeypatch.setattr("shardplan.decoder.parts.attention.sparse.device_branches.selection_sums", fail)
    loss_and_gradients_without()
    with pytest.raises(AssertionError, match="statistics were traced"):
        loss_and_gradients(model_config())


@pytest.mark.parametrize(
    ("method", "others"),
    [("dense_mask", "_attend_to_gathered_blocks"), ("gathered_blocks", "_attend_with_dense_mask")],
)
def test_layers_compute_with_their_method(method, others, monkeypatch):
    """No layer falls back to another method."""

    def fail(*_):
        raise AssertionError(f"a layer fell back to {others}")

    monkeypatch.setattr(selected_branch, others, fail)
    segments = with_selected_method(model_config().segments, selected_branch.SelectedMethod(method))
    loss_and_gradients(model_config(segments=segments), *FSDP)


def test_microbatches_are_joined(expected):
    """Rows of microbatches are added, as Levanter's Trainer joins metrics; means of equal parts are means of all."""
    from levanter.metrics import fold

    (_, metrics), _ = loss_and_gradients(model_config())
    both = {name: float(fold(metric, metric).value()) for name, metric in metrics.items()}
    assert both["nsa/rows"] == 2 * expected[1]["nsa/rows"]
    assert both["nsa/k_mean"] == expected[1]["nsa/k_mean"] and both["nsa/k_max"] == expected[1]["nsa/k_max"]
