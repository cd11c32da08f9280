"""What is recorded of routed experts, on several devices, against a Qwen3 MoE in NumPy."""

import dataclasses
import itertools
import math

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import numpy_qwen3_moe
import pytest
from conftest import transformers_losses
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample
from test_logits import SHARDED_POSITIONS, UNSHARDED, run

from shardplan.decoder import model as decoder_model
from shardplan.decoder.layers.expert_layers import expert_layers, records_by_layer
from shardplan.decoder.parts.mlp import router
from shardplan.execution import step_program
from shardplan.execution.layout_forward import LayoutForward
from shardplan.execution.recorded_program import with_expert_records
from shardplan.experts import block, local_rounds, tiles
from shardplan.experts.method import ExpertMethod, ExpertStrategy
from shardplan.experts.statistics.layer_record import LayerRecord, add_records, layer_figures
from shardplan.experts.strategies import exchange_tokens
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.search.make_plan import model_from_config

GATHER, EXCHANGE, WEIGHTS = ExpertStrategy
FAMILY, EXPERTS, PER_TOKEN = "qwen3_moe", 8, 2
TILE, OVERFLOW = 8, 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Buffers of few rows, so that small checkpoints overflow."""
    monkeypatch.setattr(tiles, "BUFFER_MULTIPLE", TILE)
    monkeypatch.setattr(local_rounds, "OVERFLOW_ROWS", OVERFLOW)


@pytest.fixture(scope="module")
def routing(golden):
    """Of each layer the probabilities [batch, position, expert] and the chosen experts, of eight sequences."""
    folder = golden.parent / "families" / FAMILY
    reference = np.load(folder / "golden.npz")
    results = [numpy_qwen3_moe.run(folder, tokens) for tokens in reference["tokens"]]
    logits = np.stack([logits for logits, _ in results])
    assert np.abs(logits - reference["logits_float64"]).max() < 1e-8  # so its routing is that of transformers
    layers = zip(*(routing for _, routing in results), strict=True)
    return [tuple(np.tile(np.stack(each), (4, 1, 1)) for each in zip(*layer, strict=True)) for layer in layers]


def is_token_of(shape):
    """Which tokens count: sequences of several lengths, and one that is padding alone."""
    rows, positions = shape
    lengths = np.array([positions, 5, 0, 17, positions, 1, 33, 9])[:rows]
    return np.arange(positions) < lengths[:, None]


def recorded(module, model, plan, mesh, tokens):
    """Layer -> what the step of a loss records."""
    program = with_expert_records(step_program(model, plan, mesh), plan)
    values = (tokens, np.ones(tokens.shape, bool), is_token_of(tokens.shape))
    arrays = []
    for like, each in zip(program.arguments[1:], values, strict=True):
        array = jax.make_array_from_callback(each.shape, like.array.sharding, lambda index, each=each: each[index])
        arrays.append(hax.named(array, like.axes))
    results = program.compile(plan.compiler_options)(module, *arrays)
    return records_by_layer(model.config.segments, jax.tree.map(np.asarray, results.records))


CASES = {
    # every device has one expert, and the tokens of all
    "gathered": ((1, 4, 2), {**UNSHARDED, "batch": ["data"], "experts": ["data", "model"]}, GATHER),
    "exchanged": ((1, 8, 1), {**UNSHARDED, "batch": ["data"], "experts": ["data"]}, EXCHANGE),
    "weights": ((1, 8, 1), {**UNSHARDED, "batch": ["data"], "experts": ["data"]}, WEIGHTS),
    # every device has two experts, and the tokens of half of the sequences
    "positions": ((1, 2, 4), {**SHARDED_POSITIONS, "experts": ["model"]}, GATHER),
}


def device_rows(case, chosen):
    """Rows of each device in each of its buffers, int[part, device]."""
    count = chosen.size
    if case == "gathered":  # the two sequences of each device, one after the other
        parts = [numpy_qwen3_moe.loads(chosen[start::2], EXPERTS) for start in (0, 1)]
    elif case == "exchanged":
        parts = [numpy_qwen3_moe.loads(chosen, EXPERTS)]
    elif case == "weights":
        parts = [np.full(8, count // 8)]
    else:  # four sequences, each over four devices; a device's tokens are taken in two parts, of two sequences each
        rows = [
            [numpy_qwen3_moe.loads(chosen[first : first + 2], EXPERTS).reshape(4, 2).sum(1) for first in half]
            for half in ((0, 4), (2, 6))
        ]
        parts = [np.concatenate(each) for each in rows]
    return np.stack(parts)


@pytest.mark.parametrize(
    ("case", "factor"),
    # buffers of gathered weights have all rows that there can be
    [(case, factor) for case in CASES for factor in (0.25, 4.0) if (case, factor) != ("weights", 0.25)],
)
def test_what_is_recorded(golden, make_config, routing, case, factor):
    """Loads and entropies of tokens without padding; rows and overflow of devices with it."""
    mesh, mapping, strategy = CASES[case]
    attention = AttentionPlan("ring", 1, 4) if case == "positions" else None
    layers, _ = run(
        golden.parent / "families", make_config, FAMILY, mesh, recorded,
        experts=ExpertMethod(strategy, factor), change_plan=mapping, attention=attention,
    )  # fmt: skip
    assert [*layers] == [0, 1, 2]
    for record, (probabilities, chosen) in zip(layers.values(), routing, strict=True):
        counted = is_token_of(chosen.shape[:2])
        np.testing.assert_array_equal(record.load, numpy_qwen3_moe.loads(chosen[counted], EXPERTS))
        assert record.tokens == counted.sum()
        assert record.entropy == pytest.approx(numpy_qwen3_moe.entropies(probabilities)[counted].sum(), rel=1e-5)
        rows = device_rows(case, chosen)
        balanced = chosen.size // len(rows) // len(jax.devices())
        size = math.ceil(balanced * factor / TILE) * TILE
        assert record.largest_rows == rows.sum(0).max()
        assert record.mean_rows == pytest.approx(rows.sum(0).mean())
        if case == "weights":
            assert (record.buffer_use, record.overflow_rows, record.further_rounds) == (1, 0, 0)
            continue
        over = np.maximum(rows - size, 0)
        assert record.buffer_use == pytest.approx(rows.max() / size)
        assert record.overflow_rows == over.sum()
        assert (over.sum() > 0) == (factor < 1)
        if strategy is EXCHANGE:  # all devices take part in all rounds, which have as many rows as the first
            assert record.further_rounds == -(-rows.max() // size) - 1
        else:
            assert record.further_rounds == (-(-over // OVERFLOW)).sum(0).max()


def test_padding_follows_positions_in_another_order(golden, make_config, routing):
    """That a plan gives to the layers."""
    mapping, attention = {**SHARDED_POSITIONS, "experts": ["model"]}, AttentionPlan("ring", 1, 4, "zigzag")
    layers, _ = run(
        golden.parent / "families", make_config, FAMILY, (1, 2, 4), recorded, change_plan=mapping, attention=attention
    )
    for record, (probabilities, chosen) in zip(layers.values(), routing, strict=True):
        counted = is_token_of(chosen.shape[:2])
        np.testing.assert_array_equal(record.load, numpy_qwen3_moe.loads(chosen[counted], EXPERTS))
        assert record.entropy == pytest.approx(numpy_qwen3_moe.entropies(probabilities)[counted].sum(), rel=1e-5)


def test_off_adds_nothing_to_a_program(golden, make_config, monkeypatch):
    """The program is that of code without the hooks, also after another one was recorded."""

    def lower(module, model, plan, mesh, tokens):
        return step_program(model, plan, mesh).lower().as_text()

    arguments = golden.parent / "families", make_config, FAMILY, (1, 8, 1)
    changes = {"change_plan": CASES["exchanged"][1], "experts": ExpertMethod(EXCHANGE)}
    run(*arguments, recorded, **changes)
    off, _ = run(*arguments, lower, **changes)
    monkeypatch.setattr(decoder_model, "fold_layers", lambda layers, x, *rest: layers.fold(x, *rest))
    for module, hook in (
        (router, "is_recording"), (block, "is_recording"), (local_rounds, "records_rounds"),
        (exchange_tokens, "records_rounds"),
    ):  # fmt: skip
        monkeypatch.setattr(module, hook, lambda: False)
    without, _ = run(*arguments, lower, **changes)
    assert off == without


def test_metrics_of_a_loss_with_gradients(golden, make_config, routing):
    """As Levanter's Trainer takes them: beside the loss, of a model whose layers are recomputed for gradients."""

    def compute(module, model, plan, mesh, tokens):
        settings = dataclasses.replace(module.settings, expert_statistics=True)
        module = dataclasses.replace(module, settings=settings)
        axes = hax.Axis("batch", tokens.shape[0]), hax.Axis("position", tokens.shape[1])

        def loss(module, tokens):
            example = LmExample(tokens, hax.ones(axes), AttentionMask.causal())
            mean, metrics = module.compute_next_token_loss(example)
            return mean.scalar(), metrics

        def unreduced(module, tokens):
            example = LmExample(tokens, hax.ones(axes), AttentionMask.causal())
            return module.compute_next_token_loss(example, reduction=None, reduction_axis=())

        with jax.set_mesh(mesh), hax.axis_mapping({"batch": "data", "experts": "data"}):
            named = hax.named(jnp.asarray(tokens), axes)
            (value, metrics), gradients = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(module, named)
            losses = eqx.filter_eval_shape(unreduced, module, named)  # as evaluations of Levanter call it
        assert losses.array.shape == tokens.shape
        assert float(value) == pytest.approx(transformers_losses(golden.parent / "families" / FAMILY).mean(), rel=1e-5)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
        return {name: float(metric) for name, metric in metrics.items()}

    metrics, _ = run(golden.parent / "families", make_config, FAMILY, (1, 8, 1), compute)
    for number, (probabilities, chosen) in enumerate(routing):
        prefix, load = f"moe/layer_{number:02d}", numpy_qwen3_moe.loads(chosen, EXPERTS)
        assert metrics[f"{prefix}/load_max_over_mean"] == pytest.approx(load.max() / load.mean())
        assert metrics[f"{prefix}/load_spread"] == pytest.approx(load.std() / load.mean())
        assert metrics[f"{prefix}/router_entropy"] == pytest.approx(
            numpy_qwen3_moe.entropies(probabilities).mean(), rel=1e-5
        )
        assert metrics[f"{prefix}/device_rows_max_over_mean"] == pytest.approx(load.max() / load.mean())
        assert metrics[f"{prefix}/expert_003_load"] == pytest.approx(load[3] / load.sum())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_moe_mixed", [1]),  # every second one, without the last
        ("deepseek_v3", [*range(1, 3)]),  # all after the first
        ("qwen3_moe", [0, 1, 2]),
    ],
)
def test_layers_have_their_numbers(golden, make_config, name, expected):
    """Whatever blocks of layers the program repeats."""
    model = model_from_config(make_config(model_ref=golden.parent / "families" / name))
    numbers = itertools.chain.from_iterable(itertools.chain.from_iterable(expert_layers(model.config.segments)))
    assert sorted(numbers) == expected


def test_padding_of_a_layout_does_not_count():
    """Where devices get equally many positions, of a sequence that their number does not divide."""
    layout = AttentionPlan("ring", 1, 4, "zigzag").sequence_layout(45)
    is_token = np.arange(45) % 3 != 0
    ordered = LayoutForward(layout).in_layer_order(hax.named(jnp.asarray(is_token[None]), ("batch", "position")))
    order = layout.positions()
    assert len(order) > 45 and ordered.array.shape == (1, len(order))
    expected = [position < 45 and position % 3 != 0 and position >= 0 for position in order.tolist()]
    np.testing.assert_array_equal(ordered.array[0], expected)


@pytest.mark.quick
def test_figures_of_several_steps_follow_from_their_sums():
    def record(load, entropy, largest, mean, use):
        return LayerRecord(*map(np.asarray, (load, sum(load) // 2, entropy, largest, mean, use, 3, 1)))

    total = add_records(record([6, 2, 0, 0], 2.0, 8, 2.0, 0.5), record([0, 2, 4, 10], 4.0, 8, 6.0, 1.5))
    figures = layer_figures(total)
    assert [figures[f"load_{name}_over_mean"] for name in ("max", "min")] == pytest.approx([10 / 6, 4 / 6])
    assert figures["router_entropy"] == pytest.approx(6 / 12)
    assert figures["device_rows_max_over_mean"] == 2.0
    assert (figures["buffer_use"], figures["overflow_rows"], figures["further_rounds"]) == (1.5, 6, 2)
    empty = layer_figures(record([0, 0, 0, 0], 0.0, 8, 2.0, 0.5))  # of a step of padding
    assert all(np.isfinite(value) for value in empty.values())
    assert (empty["load_max_over_mean"], empty["router_entropy"]) == (0, 0)
