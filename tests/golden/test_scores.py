"""Scores of tokens that devices compute, against the logits of transformers in float64."""

import haliax as hax
import jax
import numpy as np
import pytest
from conftest import MODEL_TYPES, program_of
from test_logits import MESHES, SHARDED_POSITIONS, TOLERANCE, run

from shardplan.plan.attention_plan import AttentionPlan


def score(module, model, plan, mesh, tokens):
    """(tokens, log_prob, rank, top_log_prob) of int32[batch, position] `tokens`."""
    program = program_of("score", model, plan, mesh)
    like = program.arguments[1]
    array = jax.make_array_from_callback(tokens.shape, like.array.sharding, lambda index: tokens[index])
    scores = program.compile(plan.compiler_options)(module, hax.named(array, like.axes))
    return tokens, *(np.asarray(each.rearrange(like.axes).array) for each in scores)


def reference_scores(logits, tokens, k):
    """(log_prob, top_log_prob) float64, and logits of every next token, by sorting."""
    logits = logits[:, :-1].astype(np.float64)
    targets = tokens[:, 1:, None]
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    ordered = np.sort(logits, -1)[..., ::-1]
    top = np.log(np.exp(ordered[..., :k] - ordered[..., :1]).sum(-1)) + ordered[..., 0]
    return np.take_along_axis(logits, targets, -1)[..., 0] - total, top - total, ordered


def check(result, logits, k):
    """Compare scores with the reference; a rank is that of a token whose logit is as large to within the tolerance."""
    tokens, log_prob, rank, top_log_prob = result
    expected, expected_top, ordered = reference_scores(logits, tokens, k)
    np.testing.assert_allclose(log_prob[:, :-1], expected, atol=TOLERANCE)
    np.testing.assert_allclose(top_log_prob[:, :-1], expected_top, atol=TOLERANCE)
    at_rank = np.take_along_axis(ordered, rank[:, :-1, None], -1)[..., 0]
    of_token = np.take_along_axis(logits[:, :-1].astype(np.float64), tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(at_rank, of_token, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "mesh", "k", "blocks"),
    [
        (name, MESHES[i % len(MESHES)], (40, 1, 5)[i % 3], (1, 4)[i % 2])
        for i, name in enumerate(MODEL_TYPES)
    ],
)  # fmt: skip
def test_scores_equal_those_of_transformers(golden, make_config, name, mesh, k, blocks):
    workload = {"workload_kind": "score", "workload_top_k": k, "workload_logit_blocks": blocks}
    check(*run(golden, make_config, name, mesh, score, **workload), k)


@pytest.mark.parametrize(("name", "temperature", "blocks"), [("gemma2", 0.7, 4), ("llama", 2.0, 1)])
def test_scores_at_a_temperature(golden, make_config, name, temperature, blocks):
    """Those of the logits of transformers, divided in float64; after the soft cap of Gemma 2."""
    workload = {
        "workload_kind": "score", "workload_logit_blocks": blocks, "workload_temperature": temperature,
    }  # fmt: skip
    change = {"vocab": ["model"], "batch": ["replica"]}
    result, logits = run(golden, make_config, name, (1, 4, 2), score, change_plan=change, **workload)
    check(result, logits.astype(np.float64) / temperature, 40)


@pytest.mark.parametrize("mesh_axes", [["model"], ["data", "model"], []])
def test_scores_with_sharded_vocab(golden, make_config, mesh_axes):
    """Each device has fewer tokens of the vocabulary than k, or all."""
    workload = {"workload_kind": "score", "workload_logit_blocks": 2}
    change = {"vocab": mesh_axes, "batch": ["replica"]}
    check(*run(golden, make_config, "gemma2", (1, 4, 2), score, change_plan=change, **workload), 40)


def losses(module, model, plan, mesh, tokens):
    """(tokens, losses) of int32[batch, position] `tokens`, of which every second one is predicted."""
    program = program_of("eval", model, plan, mesh)
    predicted = np.arange(tokens.shape[1]) % 2 == np.zeros((len(tokens), 1), int)
    arrays = [
        hax.named(jax.make_array_from_callback(array.shape, like.array.sharding, lambda i, a=array: a[i]), like.axes)
        for array, like in zip((tokens, predicted), program.arguments[1:], strict=True)
    ]
    result = program.compile(plan.compiler_options)(module, *arrays)
    return tokens, predicted, np.asarray(result.rearrange(program.arguments[1].axes).array)


@pytest.mark.parametrize(
    ("name", "mesh", "mapping", "method"),
    [
        ("gemma2", (1, 4, 2), {"vocab": ["model"], "batch": ["data"]}, None),
        ("llama", (1, 2, 4), SHARDED_POSITIONS, AttentionPlan("ring", 1, 4, "zigzag")),
    ],
)
def test_losses_in_blocks_equal_those_of_transformers(golden, make_config, name, mesh, mapping, method):
    workload = {"workload_kind": "eval", "workload_logit_blocks": 4}
    result, logits = run(
        golden,
        make_config,
        name,
        mesh,
        losses,
        change_plan=mapping,
        **({"attention": method} if method else {}),
        **workload,
    )
    tokens, predicted, actual = result
    expected = -reference_scores(logits, tokens, 1)[0] * predicted[:, :-1]
    np.testing.assert_allclose(actual[:, :-1], expected, atol=TOLERANCE)
    assert not actual[:, -1].any()


def test_scores_with_sharded_positions(golden, make_config):
    workload = {"workload_kind": "score", "workload_logit_blocks": 4}
    method = AttentionPlan("ring", 1, 4, "zigzag")
    result = run(
        golden, make_config, "llama", (1, 2, 4), score, change_plan=SHARDED_POSITIONS, attention=method, **workload
    )
    check(*result, 40)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("gpt2", "gemma2", "mixtral") else [pytest.mark.whole])
        for name in MODEL_TYPES
    ],
)
def test_packed_windows_have_the_scores_of_windows_by_themselves(golden, make_config, name):
    """Windows of 5 tokens, of which sequences hold several and a rest."""

    def packed(module, model, plan, mesh, tokens):
        return score(module, model, plan, mesh, tokens), model

    settings = {"workload_kind": "score", "workload_window": 5}
    (result, _), _ = run(golden, make_config, name, (1, 4, 2), packed, **settings)
    tokens, log_prob, rank, top = result
    count = tokens.shape[1] // 5
    alone = np.load(golden / name / "golden.npz")["logits"]
    # causal: the first window of every sequence has the logits that transformers computes for the whole sequence
    expected, expected_top, _ = reference_scores(np.tile(alone, (4, 1, 1)), tokens, 40)
    np.testing.assert_allclose(log_prob[:, :4], expected[:, :4], atol=TOLERANCE)
    np.testing.assert_allclose(top[:, :4], expected_top[:, :4], atol=TOLERANCE)
    # another window has the scores that it has as the first of a sequence
    rolled = np.roll(tokens, -5 * (count - 1), 1)

    def moved(module, model, plan, mesh, _):
        return score(module, model, plan, mesh, np.ascontiguousarray(rolled))

    (_, other_log_prob, other_rank, _), _ = run(golden, make_config, name, (1, 4, 2), moved, **settings)
    last = slice(5 * (count - 1), 5 * (count - 1) + 4)
    np.testing.assert_allclose(log_prob[:, last], other_log_prob[:, :4], atol=TOLERANCE)
    np.testing.assert_array_equal(rank[:, last], other_rank[:, :4])


@pytest.mark.parametrize("kind", ["score", "eval"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("gpt2", "gemma2") else [pytest.mark.whole])
        for name in MODEL_TYPES
    ],
)  # fmt: skip
def test_packed_windows_of_several_lengths_have_the_scores_of_windows_by_themselves(golden, make_config, name, kind):
    """Every window is the beginning of a sequence that transformers has the logits of."""

    def packed(module, model, plan, mesh, tokens):
        length, draw = tokens.shape[1], np.random.default_rng(0)
        rows, starts, sources = np.zeros_like(tokens), np.zeros_like(tokens), []
        for row in range(len(tokens)):
            at = 0
            while at < length:
                size = min(int(draw.integers(2, 9)), length - at)
                source = int(draw.integers(len(tokens)))
                rows[row, at : at + size], starts[row, at : at + size] = tokens[source, :size], at
                sources.append((row, at, size, source))
                at += size
        program = program_of(kind, model, plan, mesh, is_packed=True)
        inputs = (rows, starts) if kind == "score" else (rows, np.ones(rows.shape, bool), starts)
        arrays = [
            hax.named(jax.make_array_from_callback(rows.shape, like.array.sharding, each.__getitem__), like.axes)
            for each, like in zip(inputs, program.arguments[1:], strict=True)
        ]
        result = program.compile(plan.compiler_options)(module, *arrays)
        log_prob = result.log_prob if kind == "score" else -result
        values = np.asarray(log_prob.rearrange(arrays[0].axes).array)
        return (tokens, sources, values), model

    (tokens, sources, values), _ = run(golden, make_config, name, (1, 4, 2), packed, workload_kind=kind)[0]
    alone = np.load(golden / name / "golden.npz")["logits"]
    expected = reference_scores(np.tile(alone, (len(tokens) // len(alone), 1, 1)), tokens, 40)[0]
    for row, at, size, source in sources:
        np.testing.assert_allclose(
            values[row, at : at + size - 1], expected[source, : size - 1], atol=TOLERANCE, err_msg=f"{row}, {at}"
        )
