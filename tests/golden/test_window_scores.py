"""Extraction from the command line, against windows that transformers scored one by one in float64.

The references are made by scripts/make_extraction_reference.py, which shares no code with shardplan.
"""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT

from shardplan.__main__ import main

pytestmark = pytest.mark.usefixtures("without_pictures")

REFERENCE = ROOT / "tests" / "golden" / "extraction"
FAMILIES = ("llama", "gemma2", "gpt2", "mixtral", "qwen3")
STRIDES = {"tokens": 3, "characters": 17}
TOLERANCE = 2e-5
"""Nats per token."""


def extract(golden, folder, family, unit, *arguments, tokenizer=REFERENCE / "tokenizer.json"):
    """Run the command, and return the columns of its windows and its summary."""
    checkpoint = folder / family
    if not checkpoint.exists():
        shutil.copytree(golden / family, checkpoint)
        shutil.copy(tokenizer, checkpoint)
    output = folder / "results"
    code = main(
        "eval",
        [
            f"--model.ref={checkpoint}", f"--data.path={REFERENCE / 'texts'}", f"--output={output}",
            "--task.kind=extraction", "--task.prefix=10", "--task.suffix=6", f"--task.stride={STRIDES[unit]}",
            f"--task.stride_unit={unit}", "--task.shard=64", "--hardware.slice=cpu-8", "--workload.batch=16",
            "--workload.param_dtype=float32", "--workload.compute_dtype=float32", *arguments,
        ],
    )  # fmt: skip
    assert code == 0
    table = pq.read_table(output / "windows.parquet")
    columns = {name: np.array(table[name].to_pylist()) for name in table.column_names}
    return columns, json.loads((output / "summary.json").read_text())


@pytest.mark.parametrize(
    ("family", "unit", "arguments"),
    [
        pytest.param(family, unit, arguments, marks=[] if i % 2 == 0 and j == k == i // 2 % 2 else [pytest.mark.whole])
        for i, family in enumerate(FAMILIES)
        for j, unit in enumerate(STRIDES)
        for k, arguments in enumerate([(), ("--workload.position=50",)])
    ],
    ids=str,
)
def test_windows_equal_those_of_transformers(golden, tmp_path, family, unit, arguments):
    """Log-probabilities, ranks, the probability of the top 40 and coverage; windows by themselves, and packed."""
    columns, summary = extract(golden, tmp_path, family, unit, *arguments)
    expected = np.load(REFERENCE / f"{family}.npz")
    for name in ("text", "start", "end"):
        np.testing.assert_array_equal(columns[name], expected[f"{unit} {name}"])
    for name in ("log_prob", "top_log_prob"):
        np.testing.assert_allclose(columns[name], expected[f"{unit} {name}"], atol=TOLERANCE)
    # float32 exchanges the ranks of tokens whose log-probabilities are as close as that
    differs = columns["rank"] != expected[f"{unit} rank"]
    assert differs.mean() <= 0.002 and np.abs(columns["rank"] - expected[f"{unit} rank"]).max() <= 1
    coverage = json.loads((REFERENCE / f"{family}.json").read_text())
    for text, each in summary["texts"].items():
        assert each["coverage"] == pytest.approx(coverage[f"{unit} {text}"], abs=1e-9)
    assert summary["run"]["programs"] == 1


@pytest.mark.parametrize(
    ("family", "temperature", "has_bos", "arguments"),
    [
        ("llama", 0.7, True, ()),
        ("gemma2", 2.0, False, ("--workload.position=50",)),
        *(
            pytest.param(family, temperature, has_bos, (), marks=pytest.mark.whole)
            for family in ("llama", "gemma2")
            for temperature in (0.7, 1.0, 2.0)
            for has_bos in (False, True)
        ),
    ],
)
def test_windows_at_a_temperature_and_with_bos_in_the_prefix(golden, tmp_path, family, temperature, has_bos, arguments):
    """Of a tokenizer that adds a BOS token; BOS counts as the first of the 10 tokens of the prefix."""
    settings = ["--task.stride=29", f"--task.temperature={temperature:g}", *arguments]
    if has_bos:
        settings.append("--task.bos_in_prefix=true")
    tokenizer = ROOT / "tests" / "golden" / "lm_eval" / "llama" / "tokenizer.json"
    columns, summary = extract(golden, tmp_path, family, "tokens", *settings, tokenizer=tokenizer)
    references = np.load(REFERENCE / "settings" / f"{family}.npz")
    expected = {
        name: references[f"{temperature} {has_bos} {name}"]
        for name in columns
        if name not in ("window", "suffix_start")
    }
    for name in ("text", "start", "end"):
        np.testing.assert_array_equal(columns[name], expected[name])
    for name in ("log_prob", "top_log_prob"):
        np.testing.assert_allclose(columns[name], expected[name], atol=TOLERANCE / temperature)
    differs = columns["rank"] != expected["rank"]
    assert differs.mean() <= 0.002 and np.abs(columns["rank"] - expected["rank"]).max() <= 1
    assert summary["plan"]["workload"]["temperature"] == temperature
    assert summary["plan"]["workload"]["position"] == (50 if arguments else 16)
