"""The loss of texts from the command line, against transformers in float64 with its own recipe of windows.

The references are made by scripts/make_loss_reference.py, which shares no code with shardplan.
"""

import json
import shutil

import pytest
from conftest import ROOT
from tokenizers import Tokenizer, processors

from shardplan.__main__ import main

TEXTS = ROOT / "tests" / "golden" / "extraction"
REFERENCE = json.loads((ROOT / "tests" / "golden" / "loss.json").read_text())
TOLERANCE = 2e-5
"""Nats per token."""


@pytest.mark.parametrize(
    ("family", "case", "arguments"),
    [
        ("llama", 0, ("--mesh.model=2",)),
        ("gpt2", 1, ("--mesh.data=8",)),
        *(
            pytest.param(family, case, (), marks=pytest.mark.whole)
            for family in REFERENCE["families"]
            for case in (0, 1)
        ),
    ],
)
def test_losses_equal_those_of_transformers(golden, tmp_path, family, case, arguments):
    """Long texts, whose windows overlap, and short ones, several of which share a sequence."""
    reference = REFERENCE["families"][family][case]
    model, data, output = tmp_path / "model", tmp_path / "data", tmp_path / "results"
    shutil.copytree(golden / family, model)
    tokenizer = Tokenizer.from_file(str(TEXTS / "tokenizer.json"))
    if reference["with_first"]:
        tokenizer.post_processor = processors.TemplateProcessing(single="? $A", special_tokens=[("?", 0)])
    tokenizer.save(str(model / "tokenizer.json"))
    shutil.copytree(TEXTS / "texts", data)
    lines = [{"id": f"line {i}", "text": line} for i, line in enumerate(REFERENCE["lines"])]
    (data / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = main(
        "eval",
        [
            f"--model.ref={model}", f"--data.path={data}", f"--output={output}", "--hardware.slice=cpu-8",
            "--workload.batch=16", f"--workload.position={reference['position']}", "--task.shard=40",
            f"--task.stride={reference['stride']}", "--workload.param_dtype=float32",
            "--workload.compute_dtype=float32", *arguments,
        ],
    )  # fmt: skip
    assert code == 0
    summary = json.loads((output / "summary.json").read_text())
    assert summary["texts"].keys() == reference["texts"].keys()
    for name, expected in reference["texts"].items():
        each = summary["texts"][name]
        assert (each["tokens"], each["bytes"]) == (expected["tokens"], expected["bytes"]), name
        if each["tokens"]:
            assert each["loss_per_token"] == pytest.approx(expected["loss"] / expected["tokens"], abs=TOLERANCE), name
    total = sum(each["loss"] for each in reference["texts"].values())
    tokens = sum(each["tokens"] for each in reference["texts"].values())
    assert summary["total"]["loss_per_token"] == pytest.approx(total / tokens, abs=TOLERANCE)
    run = summary["run"]
    assert (run["programs"], run["tokens"]) == (1, tokens)
    # short texts share sequences: fewer rows than windows
    assert run["steps"] * summary["plan"]["workload"]["batch"] < run["windows"]
