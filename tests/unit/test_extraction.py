"""Windows are numbered once each, and what their probabilities say equals hand counts and brute force."""

import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shardplan.config import parse_config
from shardplan.config.command_flags import EvalCommand
from shardplan.config.sections import EvaluationKind, StrideUnit, TaskConfig
from shardplan.errors import ConfigError
from shardplan.eval.evaluate import with_windows
from shardplan.eval.extraction.character_runs import RunStream
from shardplan.eval.extraction.precision import compare_precision
from shardplan.eval.extraction.probabilities import (
    CURVE_LOG_THRESHOLDS,
    THRESHOLDS,
    Coverage,
    TextSummary,
    suffix_log_probs,
    top_k_log_probs,
    total_of,
)
from shardplan.eval.extraction.task import ExtractionTask
from shardplan.eval.extraction.windows import Protocol, divide_texts, result_schema
from shardplan.eval.loop.shards import Shards
from shardplan.eval.run_results.folder import ResultsFolder, read_windows
from shardplan.eval.texts.reader import TextReader, make_source, special_tokens
from shardplan.eval.texts.store import open_texts
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import build_model
from shardplan.plan.workload.workload import Workload
from shardplan.program.step_trace import plan_step

SCHEMA = pa.schema([("window", pa.int64())])


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5),
    st.integers(1, 3), st.integers(5, 17), st.integers(1, 40),
)  # fmt: skip
def test_every_window_is_in_one_lane_of_one_shard(sizes, stride, lanes, lane_sequences, steps, position, limit):
    protocol = Protocol(3, 2, stride, StrideUnit.TOKENS)
    expected = [(t, i) for t, size in enumerate(sizes) for i in range(size) if i * stride + 5 <= size]
    arguments = (protocol, (), [*map(str, sizes)], [np.array([size]) for size in sizes], sizes, position)
    if not expected:
        with pytest.raises(ConfigError, match="no text of 5 tokens"):
            divide_texts(*arguments)
        return
    windows = divide_texts(*arguments)
    assert windows.sequences == -(-len(expected) // (position // 5)) and windows.total == len(expected)
    shards = Shards(windows.sequences, lanes, lane_sequences, steps)
    ranges = [shards.lane_range(shard, lane) for shard in range(shards.count) for lane in range(lanes)]
    assert all(end - first == shards.steps_of(i // lanes) * lane_sequences for i, (first, end) in enumerate(ranges))
    sequences = [s for first, end in ranges for s in range(first, end) if s < windows.sequences]
    assert sequences == list(range(windows.sequences))
    in_steps = [
        s for shard in range(shards.count) for step in range(shards.steps_of(shard))
        for first, end in shards.step_ranges(shard, step) for s in range(first, end)
    ]  # fmt: skip
    assert sorted(in_steps) == sequences
    # only the last step has padding
    assert sum(end - first for first, end in ranges) - windows.sequences < lanes * lane_sequences
    located = [(text, i) for each in ranges for text, numbers in windows.job(*each).parts for i in numbers]
    assert located == expected
    sample = divide_texts(*arguments, limit)
    assert sample.total <= limit
    located = [
        (text, i) for first in range(sample.total) for text, numbers in sample.locate(first, first + 1) for i in numbers
    ]
    assert located == expected[:: -(-len(expected) // limit)]


def test_top_k_probability():
    log_prob, top = np.log([[0.5, 0.25], [0.5, 0.01]]), np.log([[0.8, 0.5], [0.8, 0.5]])
    rank = np.array([[0, 1], [0, 7]])
    np.testing.assert_allclose(suffix_log_probs(log_prob), np.log([0.125, 0.005]))
    np.testing.assert_allclose(top_k_log_probs(log_prob, rank, top, 5), [np.log(0.5 / 0.8 * 0.25 / 0.5), -np.inf])


def test_probabilities_below_those_of_float32():
    log_prob = np.full((1, 50), -40.0, np.float32)
    assert suffix_log_probs(log_prob) == [-2000.0]


def brute_force(characters, windows):
    """The largest log p of each character."""
    largest = np.full(characters, -np.inf)
    for start, length, log_p in windows:
        largest[start : start + length] = np.maximum(largest[start : start + length], log_p)
    return largest


WINDOWS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 90), st.floats(-9, 0) | st.sampled_from([-2000.0, -1.0, 0.0])),
    max_size=40,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=200)
@given(WINDOWS, st.integers(1, 50))
def test_coverage_equals_brute_force(windows, together):
    characters = 400
    windows = sorted(windows)
    largest = brute_force(characters, windows)
    coverage = Coverage(characters)
    for i in range(0, len(windows), together):
        start, length, log_p = (np.array(each) for each in zip(*windows[i : i + together], strict=True))
        coverage.add(start, start + length, log_p)
    assert coverage.finish() == {f"{t:g}": (largest >= np.log(t)).sum() / characters for t in THRESHOLDS}
    expected = (largest[:, None] >= CURVE_LOG_THRESHOLDS).sum(axis=0)
    np.testing.assert_array_equal(coverage.curve_counts(), expected)
    np.testing.assert_array_equal(coverage.strip, largest)  # as many parts as characters


@settings(max_examples=100)
@given(WINDOWS, st.integers(1, 50))
def test_runs_follow_each_other_and_have_no_equal_neighbours(windows, together):
    windows = sorted(windows)
    stream, runs = RunStream(), []
    for i in range(0, len(windows), together):
        start, length, log_p = (np.array(each) for each in zip(*windows[i : i + together], strict=True))
        runs.append(stream.add(start, start + length, log_p, int(start[-1])))
        assert (np.diff(runs[-1].values) != 0).all()  # also where both are minus infinity, whose difference is nan
    runs.append(stream.finish(400))
    bounds = np.concatenate([[0], *(each.bounds[1:] for each in runs)])
    values = np.concatenate([each.values for each in runs])
    np.testing.assert_array_equal(np.repeat(values, np.diff(bounds)), brute_force(400, windows))


def test_windows_far_apart_need_no_memory_between_them():
    starts = np.arange(1000, dtype=np.int64) * 10**9
    runs = RunStream().add(starts, starts + 100, np.zeros(1000), int(starts[-1]))
    assert len(runs.values) == 2 * 999 and runs.bounds[-1] == starts[-1]


def test_suffixes_that_start_earlier_than_that_of_the_window_before():
    """With a stride in characters, each window is encoded by itself."""
    coverage = Coverage(40)
    coverage.add(np.array([20]), np.array([30]), np.array([-1.0]), final=0)
    coverage.add(np.array([15]), np.array([22]), np.array([-0.1]), final=5)
    assert coverage.finish()["0.1"] == 15 / 40


def test_summary():
    """Two windows of three tokens: one is certain, one hopeless."""
    rows = {
        "window": [0, 1], "text": ["a", "a"], "start": [0, 10], "suffix_start": [5, 15], "end": [10, 20],
        "log_prob": [[np.log(0.9)] * 3, [-50.0] * 3], "rank": [[0, 0, 0], [0, 90, 0]],
        "top_log_prob": [[np.log(0.99)] * 3, [-0.1] * 3],
    }  # fmt: skip
    summary = TextSummary(40, 40)
    summary.add(pa.table(rows, result_schema(3)))
    result = summary.finish()
    assert (result["windows"], result["greedy"]) == (2, 1)
    assert result["windows_at"] == {"0.001": 1, "0.01": 1, "0.1": 1, "0.5": 1, "0.75": 0}
    assert result["windows_at_top_k"]["0.75"] == 1  # 0.751
    assert result["coverage"]["0.5"] == 0.25 and result["suffix_coverage"]["0.5"] == 0.125
    assert result["max_log_p"] == pytest.approx(3 * np.log(0.9), rel=1e-6)
    assert np.flatnonzero(summary.histogram).tolist() == [0, 150]
    total = total_of([result, {**TextSummary(40, 40).finish()}])
    assert (total["characters"], total["windows"], total["coverage"]["0.5"]) == (80, 2, 0.125)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "blocks"), [(None, 1), (16, 1), (16, 4)])
def test_nothing_of_a_scoring_step_is_unnamed_or_unpriced(golden, window, blocks):
    model = build_model(read_config(str(golden / "mixtral" / "config.json"), None), 64)
    work = Workload(kind="score", batch=8, position=64, window=window, logit_blocks=blocks)
    step = plan_step(model, work)
    assert not step.unnamed and not step.unpriced
    assert "vocab" not in step.resized_axes  # each device finds the top k of its own tokens


def test_logit_blocks_keep_logits_within_their_limit():
    work = Workload(kind="score", batch=128, position=512)
    blocks = work.with_logit_blocks(128256, 16).logit_blocks
    assert 128 * 512 * 128256 * 4 / 16 / blocks <= 256 * 2**20 < 128 * 512 * 128256 * 4 / 16 / (blocks // 2)
    assert Workload(kind="prefill").with_logit_blocks(128256, 1).logit_blocks is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 5}, "workload.window is for workload.kind score, and the kind is eval"),
        ({"kind": "train", "logit_blocks": 2}, "workload.logit_blocks is for workload.kind eval and score, not train"),
        (
            {"kind": "score", "window": 99, "position": 64},
            "workload.window is 99; it must be 2 to workload.position, 64",
        ),
        ({"kind": "score", "logit_blocks": 3, "position": 64}, "workload.logit_blocks 3 does not divide"),
        ({"kind": "score", "top_k": -1}, "workload.top_k is -1"),
        ({"kind": "score", "temperature": 0.0}, "workload.temperature is 0; it must be 0.01 to 100 (ranks say what"),
        ({"kind": "score", "temperature": math.nan}, "workload.temperature is nan; it must be 0.01 to 100"),
        ({"temperature": 0.7}, "workload.temperature is for workload.kind score, and the kind is eval; leave it out"),
    ],
)
def test_settings_of_scores_that_no_step_can_have(values, message):
    assert any(message in problem for problem in Workload(**values).problems())


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"temperature": 1e-9}, "task.temperature is 1e-09; it must be 0.01 to 100"),
        ({"temperature": 0.7, "kind": "loss"}, "task.temperature is for task.kind extraction, and the kind is loss;"),
        ({"bos_in_prefix": True, "kind": "loss"}, "task.bos_in_prefix is for task.kind extraction, and the kind is"),
        (
            {"bos_in_prefix": True, "special_tokens": False},
            "task.bos_in_prefix is true, and task.special_tokens false;",
        ),
        ({"temperature": "warm"}, "task.temperature is 'warm'"),
    ],
)
def test_settings_of_an_extraction_that_cannot_be_used(task, message):
    argv = [f"--task.{key}={value}" for key, value in {"kind": "extraction", **task}.items()]
    with pytest.raises(ConfigError) as error:
        parse_config([*argv, "--model=llama-3.1-8b"], EvalCommand)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_workload_of_an_extraction_at_a_temperature(raises_message):
    def work_of(**task):
        argv = [f"--task.{key}={value}" for key, value in {"kind": "extraction", **task}.items()]
        return with_windows(parse_config([*argv, "--model=llama-3.1-8b"], EvalCommand)).workload

    assert (work_of(temperature=0.7).temperature, work_of().temperature) == (0.7, 1.0)
    # BOS precedes the window of 100 tokens, or is one of them
    positions = [work_of(**task).position for task in ({"special_tokens": "true"}, {"bos_in_prefix": "true"}, {})]
    assert positions == [101, 100, 100]
    both = work_of(special_tokens="true", bos_in_prefix="true", prefix=10)
    assert both.position == 60
    with raises_message(ConfigError):
        with_windows(
            parse_config(
                ["--task.kind=extraction", "--model=llama-3.1-8b", "--workload.temperature=2", "--workload.kind=score"],
                EvalCommand,
            )
        )
    task = ExtractionTask(TaskConfig(kind=EvaluationKind.EXTRACTION, temperature=0.7))
    with raises_message(ConfigError):
        task.check_workload(Workload(kind="score", window=100, position=512))


def test_new_settings_are_determinants_where_they_are_set():
    """So that a folder of a version that did not have them is gone on with, and one with another setting is not."""

    def determinants(temperature=1.0, **task):
        plan = SimpleNamespace(workload=Workload(kind="score", temperature=temperature))
        config = TaskConfig(kind=EvaluationKind.EXTRACTION, temperature=temperature, **task)
        return ExtractionTask(config).determinants(plan)

    protocol = {"prefix": 50, "suffix": 50, "stride": 5, "unit": "tokens", "special_tokens": False}
    assert determinants() == {"task": "extraction", "protocol": protocol, "top_k": 40}
    assert determinants(temperature=0.7) == {**determinants(), "temperature": 0.7}
    with_bos = {**protocol, "special_tokens": True, "bos_in_prefix": True}
    assert determinants(bos_in_prefix=True) == {**determinants(), "protocol": with_bos}


@pytest.mark.parametrize("unit", ["characters", "tokens"])
@pytest.mark.parametrize("prefix", [10, 1])
def test_bos_counts_as_a_token_of_the_prefix(tmp_path, unit, prefix):
    """As the authors have it: the first tokens of the encoded characters, of which the tokenizer's BOS is one."""
    folder, text = ROOT / "tests" / "golden", (ROOT / "LICENSE").read_text()[:1500]
    data = (folder / "lm_eval" / "llama" / "tokenizer.json").read_bytes()
    (tmp_path / "a.txt").write_text(text)
    store = open_texts(str(tmp_path / "a.txt"))
    source = make_source(store, data, "tokenizer")
    reader, tokenizer = TextReader(source), Tokenizer.from_str(data.decode())
    length, stride = prefix + 6, 17
    protocol = Protocol(prefix, 6, stride, StrideUnit(unit), bos_in_prefix=True)
    pieces = source.by_text(reader.count_tokens(source.all_pieces)[0])
    special = special_tokens(reader.tokenizer).before
    windows = divide_texts(protocol, special, ["a"], pieces, [len(text)], length)
    rows = windows.job(0, windows.sequences).make(reader)
    kept = rows.windows["is_valid"]
    expected, starts, suffix_starts = [], [], []
    if unit == "characters":
        for start in range(0, len(text), stride):
            encoding = tokenizer.encode(text[start : start + 20 * length])
            if len(encoding.ids) >= length:
                expected.append(encoding.ids[:length])
                starts.append(start)
                suffix_starts.append(start + len(tokenizer.decode(encoding.ids[1:prefix], skip_special_tokens=False)))
    else:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        for first in range(0, len(encoding.ids) - length + 2, stride):
            expected.append([*special, *encoding.ids[first : first + length - 1]])
            starts.append(encoding.offsets[first][0])
            suffix_starts.append(encoding.offsets[first + prefix - 1][0])
    np.testing.assert_array_equal(rows.inputs[0][kept], expected)
    np.testing.assert_array_equal(rows.windows["start"][kept], starts)
    np.testing.assert_array_equal(rows.windows["suffix_start"][kept], suffix_starts)
    assert len(expected) > 20 and expected[0][0] == tokenizer.token_to_id("<s>")


A, B = "a" * 64, "b" * 64
"""Digests of texts."""


def test_results_folders(tmp_path, raises_message):
    """A folder with anything else, of another run, or that cannot be written is refused, and nothing in it changes."""
    (tmp_path / "notes.txt").write_text("mine")
    with raises_message(ConfigError):
        ResultsFolder(str(tmp_path), SCHEMA).claim({"stride": 5})
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    folder = tmp_path / "results"
    ResultsFolder(str(folder), SCHEMA).claim({"stride": 5})
    (folder / "parts").mkdir()
    (folder / "parts" / "000000000000-000000000004.parquet.partial").write_text("half")
    ResultsFolder(str(folder), SCHEMA).claim({"stride": 5})
    assert sorted(path.name for path in folder.rglob("*")) == ["parts", "run.json"]
    with raises_message(ConfigError):
        ResultsFolder(str(folder), SCHEMA).claim({"stride": 10})
    # a setting that only one of the runs names
    with raises_message(ConfigError):
        ResultsFolder(str(folder), SCHEMA).claim({"stride": 5, "temperature": 0.7})
    ResultsFolder(str(tmp_path / "sampled"), SCHEMA).claim({"stride": 5, "temperature": 0.7})
    with raises_message(ConfigError):
        ResultsFolder(str(tmp_path / "sampled"), SCHEMA).claim({"stride": 5})
    for name, known, wanted, message in (
        ("texts", {"a.txt": A, "b.txt": A, "c.txt": A}, {"a.txt": B, "c.txt": A}, "texts differ: a.txt, b.txt"),
        (
            "checkpoint",
            {"one.safetensors": "v1"},
            {"one.safetensors": "v2"},
            "files of the checkpoint differ: one.safetensors",
        ),
        ("tokenizer", A, B, "its tokenizer differs from this run's"),
        ("texts", {f"{i}.txt": A for i in range(7)}, {}, "texts differ: 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 2 more"),
    ):
        other = tmp_path / f"{name} {len(known)}"
        ResultsFolder(str(other), SCHEMA).claim({name: known})
        with pytest.raises(ConfigError) as error:
            ResultsFolder(str(other), SCHEMA).claim({name: wanted})
        expected = f"output {other} holds the results of another run: {message}; name another folder, or remove it"
        assert str(error.value) == expected
    with raises_message(ConfigError):
        ResultsFolder(str(tmp_path / "notes.txt" / "x"), SCHEMA).claim({"stride": 5})


def test_parts_of_runs_with_other_lanes(tmp_path, raises_message):
    """A shard is finished if parts have all of its windows, whatever lanes wrote them; no part is removed."""
    folder = ResultsFolder(str(tmp_path / "results"), SCHEMA)
    folder.claim({})

    def write(first, last):
        folder.write_part(first, last, [pa.table({"window": range(first, last)}, SCHEMA)])

    for first, last in ((0, 4), (4, 10), (8, 12), (16, 18), (18, 22)):
        write(first, last)
    assert folder.finished([(0, 8), (8, 16), (16, 22)]) == [0, 2]
    assert folder.finished([(0, 5), (5, 12), (12, 15), (15, 17), (17, 22)]) == [0, 1, 4]
    with raises_message(ConfigError):
        folder.merge(22)
    assert not (tmp_path / "results" / "windows.parquet").exists()
    write(11, 17)
    folder.merge(22)
    windows = [w for table in read_windows(folder.ref) for w in table["window"].to_pylist()]
    assert windows == [*range(22)] and len([*(tmp_path / "results" / "parts").iterdir()]) == 6


def test_precision_study():
    """Of two windows one is extracted in float32 alone."""
    low = {"log_prob": [[-0.6, -0.2], [-1.0, -9.0]], "rank": [[0, 0], [1, 5]]}
    high = {"log_prob": [[-0.5, -0.1], [-1.0, -8.5]], "rank": [[0, 0], [1, 6]]}
    tables = [
        pa.table({
            name: pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(values).astype("f4" if "p" in name else "i4")), 2)
            for name, values in rows.items()
        })
        for rows in (low, high)
    ]  # fmt: skip
    study = compare_precision([tables[0]], [tables[1]])
    assert (study["windows"], study["ranks_differ"]) == (2, 0.25)
    assert study["log_p"]["mean"] == pytest.approx(-0.35) and study["log_p"]["q100"] == pytest.approx(0.5)
    assert study["token"]["mean_absolute"] == pytest.approx(0.175)
    assert study["thresholds"]["0.5"] == {"bfloat16": 0, "float32": 1, "just_one": 1}
    assert study["greedy"] == {"bfloat16": 1, "float32": 1, "just_one": 0}
