"""The commands on the pages of docs run, and end with success, on a small checkpoint in place of the demo's.

The tutorial's are in `test_tutorial.py`. Left out is what needs a TPU, a network, or the results of other runs; with
--whole those run as well that compile large programs or plan for many slices.
"""

import contextlib
import io
import os
import shlex
import shutil
from pathlib import Path

import pytest
from documentation.test_docs import LAUNCH_FILE, PARSED, blocks
from processes import fork_python

from shardplan.__main__ import main
from shardplan.errors import ConfigError, InfeasibleError

ROOT = Path(__file__).parents[2]
NEEDS_MORE = (
    "Qwen/Qwen3-8B",  # the hub
    "org/model",
    "hellaswag,wikitext",
    "tests/golden/lm_eval",  # a checkpoint with a BOS token, with which tests/golden/test_lm_eval.py runs it
    "texts.jsonl",  # a slice of TPUs
    "gs://bucket/texts.jsonl",
    "results/llama-3.1-8b",  # results of earlier runs
    "--version",
)
TAKES_LONG = (
    "--verify", "--what_if", "--rank_slices", "verify", "doctor", "models", "auto", "configs/tiny-extraction.yaml",
    "configs/405b-extraction.yaml", "gemma-3-27b",
)  # fmt: skip
HAS_ERRORS = ("configs/levanter/405b-heads-mlp.yaml",)
"""What `--lint` finds errors in."""
WIDTH = "100"
"""Columns of the output that README shows."""
RUN = {
    " ".join(arguments): arguments
    for _, arguments in PARSED
    if arguments[0] == "launch" or not any(word in arguments for word in NEEDS_MORE)
}


def is_training(arguments):
    return arguments[0] == "train" and "--dry_run" not in arguments


def marked(command):
    takes_long = is_training(RUN[command]) or any(word in RUN[command] for word in TAKES_LONG)
    marks = [pytest.mark.whole] if takes_long else []
    return pytest.param(RUN[command], marks=marks, id=command)


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """A folder with the files that the pages name, and a checkpoint in place of the demo's."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "docs").symlink_to(ROOT / "docs")
    demo = folder / "build" / "demo"
    shutil.copytree(checkpoint, demo)
    shutil.copy(demo / "text.jsonl", demo / "heldout.jsonl")
    (demo / "text.jsonl").unlink()
    with contextlib.chdir(folder):
        arguments = ["--model", "llama-3.1-8b", "--hardware.slice", "v5e-8", "--json", "plan.json"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert main("plan", arguments) == 0
        shutil.copy("docs/gallery/verdicts/mixtral.json", "verdicts.json")
        Path("layouts").mkdir()
        shutil.copy("configs/levanter/405b-usual.yaml", "layouts/levanter.yaml")
        for copy in ("before.json", "after.json", "layouts/plan.json", "new.json"):
            shutil.copy("plan.json", copy)
        Path("launch.yaml").write_text(LAUNCH_FILE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [marked(command) for command in RUN])
def test_it_runs(arguments, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "cpu")
    if is_training(arguments):  # which changes Levanter
        process = fork_python(["-m", "shardplan", *arguments], folder)
        error = process.communicate()[1]
        assert process.returncode == 0, error
        return
    code = main(None, arguments)
    printed = capsys.readouterr()
    if arguments[-1] in HAS_ERRORS:
        assert code == InfeasibleError.exit_code
    else:  # what is wrong with the host of a test is a finding of doctor, too
        assert code == 0 or (code == ConfigError.exit_code and arguments[0] == "doctor"), printed.err


@pytest.mark.slow
def test_the_front_page_shows_what_plan_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", WIDTH)
    (shown,) = [text for text in blocks("README.md", "") if text.startswith("$ shardplan plan ")]
    command, *lines = shown.splitlines()
    assert main(None, shlex.split(command)[2:]) == 0
    assert len(lines) == 7 and capsys.readouterr().out.splitlines()[:7] == lines
