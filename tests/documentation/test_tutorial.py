"""The commands and the Python of the tutorial run in order, on the files that they make."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from shardplan.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKES_THE_CHECKPOINT = "python scripts/make_demo_checkpoint.py --output build/demo"


@pytest.mark.slow
def test_its_steps_work_one_after_the_other(checkpoint, tmp_path, monkeypatch, capsys):
    demo = tmp_path / "build" / "demo"
    shutil.copytree(checkpoint, demo)
    shutil.move(demo / "text.jsonl", demo / "heldout.jsonl")
    monkeypatch.chdir(tmp_path)
    for language, text in blocks("tutorial/own-model.md"):
        match language:
            case "":
                for line in text.splitlines():
                    run_command(line, capsys)
            case "yaml":
                (tmp_path / "build" / "first.yaml").write_text(text)
            case "python":
                run_python(text)
    for name in ("first", "float32"):
        assert (tmp_path / "results" / name / "summary.json").is_file()
    assert "Axis(name='embed'" in capsys.readouterr().out  # by the Python of step 6
    (snippet,) = (text for language, text in blocks("howto/convert.md") if language == "python")
    run_python(snippet)  # which begins with the tutorial's files
    run_command("shardplan eval --model build/from-python --workload.position 256 --dry_run", capsys)
    _, snippet = (text for language, text in blocks("howto/orbax.md") if language == "python")
    run_python(snippet)
    assert (tmp_path / "build" / "trained" / "0" / "items").is_dir()


def blocks(page):
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def run_python(text):
    exec(compile(text, "snippet", "exec"), {})


def run_command(line, capsys):
    if line == MAKES_THE_CHECKPOINT:
        return
    words = shlex.split(line)
    assert words[0] == "shardplan"
    code = main(None, words[1:])
    assert code == 0, f"{line}: {capsys.readouterr().err}"
    capsys.readouterr()
