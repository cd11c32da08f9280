"""Requests of lm_eval: windows in rows, sums of their scores, and the configuration that arguments describe."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.errors import ConfigError
from shardplan.eval.harness.requests import Request, pack_requests
from shardplan.eval.harness.scorer import sum_scores
from shardplan.eval.harness.settings import read_settings

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@given(st.lists(st.builds(Request, IDS, IDS), min_size=1, max_size=20), st.integers(9, 12), st.integers(1, 9))
def test_scores_of_a_request_are_those_of_its_continuation(requests, max_length, extra):
    """Every token is given the score of the tokens before it in its window, by a function of these."""

    def score(before):
        return float(hash(tuple(before)) % 1000)

    position, rows_at_a_time = max_length + extra, 3
    packed = pack_requests(requests, max_length, position)
    log_prob, rank = [], []
    for first in range(0, packed.rows, rows_at_a_time):
        tokens, starts = packed.fill(first, rows_at_a_time)
        for row, begin in zip(tokens.tolist(), starts.tolist(), strict=True):
            after = row[1:] + row[:1]
            log_prob.append([score([*row[begin[i] : i + 1], after[i]]) for i in range(position)])
            rank.append([after[i] for i in range(position)])
    sums, is_greedy = sum_scores(np.array(log_prob), np.array(rank), packed.start, packed.end)
    for request, own_sum, own_greedy in zip(requests, sums, is_greedy, strict=True):
        # as the hf model has it
        window = (request.context + request.continuation)[-(max_length + 1) :]
        first = len(window) - len(request.continuation)
        assert own_sum == sum(score(window[: i + 1]) for i in range(first, len(window)))
        assert own_greedy == (not any(request.continuation))


def test_a_window_that_another_begins_with_is_computed_once():
    requests = [Request([1, 2], [3]), Request([1], [2, 3, 4]), Request([1, 2], [3]), Request([1, 2], [4])]
    packed = pack_requests(requests, 9, 10)
    assert sorted(each.tolist() for each in packed.tokens) == [[1, 2, 3, 4], [1, 2, 4]]


def test_a_score_that_is_not_finite_stays_in_its_request():
    log_prob = np.array([[np.nan, -1.0, -2.0, -np.inf]])
    sums, _ = sum_scores(log_prob, np.zeros((1, 4), int), np.array([0, 1, 3]), np.array([1, 3, 4]))
    np.testing.assert_array_equal(sums, [np.nan, -3.0, -np.inf])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], [1]), "a context has no tokens"),
        (Request([1], []), "a continuation has no tokens"),
        (Request([1], [1] * 10), "a continuation has 10 tokens, and max_length is 9; raise workload.position"),
    ],
)
def test_requests_that_cannot_be_scored(request_, message):
    with pytest.raises(ConfigError, match=message):
        pack_requests([request_], 9, 10)


MODEL = {"model.config": "llama-3.1-8b"}


def test_the_workload_of_requests(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("workload: {param_dtype: float32}\nmesh: {model: 2}\ndata: {path: texts.jsonl}\n")
    settings, plan = read_settings(str(file), 2047, {**MODEL, "mesh": {"model": 4}, "pin": ["mlp=model"]})
    work = settings.workload
    assert plan is None and (settings.mesh.model, settings.pin) == (4, ("mlp=model",))
    assert (work.kind, work.batch, work.position, work.top_k, work.param_dtype) == ("score", -1, 2048, 0, "float32")
    # on TPUs, rows are whole blocks of the attention kernel
    assert read_settings(None, 2048, {**MODEL, "hardware.slice": "v4-8"})[0].workload.position == 2560
    assert read_settings(None, None, {**MODEL, "workload.batch": 3})[0].workload.batch == 3


@pytest.mark.parametrize(
    ("arguments", "max_length", "message"),
    [
        ({"mesh.modle": 2}, None, "model_args: unknown key 'mesh.modle'; did you mean 'mesh.model'?"),
        ({"max_lenght": 2}, None, "did you mean 'max_length'?"),
        ({"data.path": "x"}, None, "model_args: unknown key 'data.path'"),
        ({"mesh.model": "x"}, None, "model_args: mesh.model is 'x'; it must be an integer or null"),
        ({"workload.kind": "eval"}, None, "workload.kind is eval, lm_eval needs score; leave it out"),
        (
            {"workload.kind": "score", "workload.window": 5},
            None,
            "workload.window is 5, lm_eval needs 2048",
        ),
        ({"workload.position": 64}, 64, "max_length is 64, and workload.position 64; it must be 1 to 63"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, max_length, message):
    with pytest.raises(ConfigError) as error:
        read_settings(None, max_length, {**MODEL, **arguments})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_plan_that_is_not_for_requests(tmp_path, raises_message):
    from shardplan.__main__ import main

    path = tmp_path / "plan.json"
    argv = ["--model=llama-3.1-8b", "--hardware.slice=v4-8", f"--json={path}"]
    assert main("plan", argv) == 0
    with raises_message(ConfigError):
        read_settings(None, None, {"plan": str(path)})
    assert main("plan", [*argv, "--workload.kind=score", "--workload.window=2048"]) == 0
    assert read_settings(None, None, {"plan": str(path)})[1] is not None
    assert json.loads(path.read_text())["workload"]["window"] == 2048
