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

REFERENCE = ROOT / "tests" / "golden" / "extraction"
FAMILIES = ("llama", "gemma2", "gpt2", "mixtral", "qwen3")
STRIDES = {"tokens": 3, "characters": 17}
TOLERANCE = 2e-5
"""Nats per token."""


def extract(golden, folder, family, unit, *arguments):
    """Run the command, and return the columns of its windows and its summary."""
    checkpoint = folder / family
    if not checkpoint.exists():
        shutil.copytree(golden / family, checkpoint)
        shutil.copy(REFERENCE / "tokenizer.json", checkpoint)
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
