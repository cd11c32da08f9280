"""`--report` as a user runs it: the page of the run, the same one later from files, and bad targets."""

import json

import pytest
from conftest import fails, run
from test_plan_command import CONFIG

ARGUMENTS = ("--model=llama-3.1-8b", "--hardware.slice=v5e-8", "--workload.batch=8", "--workload.position=1024")


def test_a_page_from_files_is_that_of_the_run(tmp_path):
    """With what other settings change, which is planned once and kept in the Plan file."""
    done = run("plan", *ARGUMENTS, "--what_if", "--json", tmp_path / "plan.json", "--report", tmp_path / "plan.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "plan.html").read_text()
    assert "workload.batch 16" in page and "were not planned" not in page
    done = run("plan", "--plan", tmp_path / "plan.json", "--report", tmp_path / "later.html")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "later.html").read_text() == page
    settings = json.loads((tmp_path / "plan.json").read_text())["details"]["settings"]
    assert {"workload.batch 4", "workload.param_dtype float32"} <= {each["change"] for each in settings}


def test_the_page_of_an_evaluation(checkpoint, tmp_path):
    arguments = {
        "model.ref": checkpoint,
        "data.path": checkpoint / "text.jsonl",
        "workload.batch": 8,
        "workload.position": 64,
        "output": tmp_path / "results",
        "json": tmp_path / "plan.json",
        "report": tmp_path / "plan.html",
    }
    done = run("eval", *(f"--{key}={value}" for key, value in arguments.items()))
    assert done.returncode == 0, done.stderr
    done = run("plan", "--plan", tmp_path / "plan.json", "--report", tmp_path / "later.html")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "later.html").read_text() == (tmp_path / "plan.html").read_text()


def test_a_dry_run_of_eval(tmp_path):
    done = run("eval", "--dry_run", *ARGUMENTS, "--report", tmp_path / "plan.html", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert "No verdict of the TPU compiler" in (tmp_path / "plan.html").read_text()
    assert json.loads(done.stdout)["details"]["tasks"]


def test_the_page_of_a_layout_that_fails(tmp_path):
    """Its findings and its repair, and the panels of what can be predicted: of the file, or of the repair."""
    layout, page = tmp_path / "layout.yaml", tmp_path / "layout.html"
    for axes, shown, exit_code in (
        ("{mlp: model, heads: model}", "the file as it is", 3),
        ("{mlp: model, kv_head: model, head_size: model, heads: null}", "the smallest edit without errors", 3),
    ):
        mesh = f"{{axes: {{model: 8}}, shared_mapping: {axes}}}"
        layout.write_text(f"trainer: {{train_batch_size: 8, mp: bf16, mesh: {mesh}}}")
        done = run("plan", *ARGUMENTS, "--lint", layout, "--report", page)
        text = page.read_text()
        assert f"The other panels show {shown}." in text and "Remedy:" in text and "best plan" in text
        assert done.returncode == exit_code, done.stderr
    assert "duplicate" in text and "nothing can be predicted before its errors are removed" in text
    assert '<span class="bad">-trainer.mesh.shared_mapping.head_size: model' in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "-"], "report is '-'; it must be a file that ends in .html"),
        (
            ["--verdicts", "v.json"],
            "verdicts are shown in a report; name its file with --report, or leave verdicts out",
        ),
        (["--report", "a.html", "--list_slices"], "list_slices plans nothing; leave report out"),
        (["--report", "a.html", "--rank_slices", "v4"], "rank_slices plans for many slices; leave out --report"),
        (["--report", "/proc/none/a.html"], "report '/proc/none/a.html' cannot be written"),
    ],
)
def test_bad_input(arguments, message):
    fails(run("plan", CONFIG, *arguments), 2, message)


def test_verdicts_that_are_none(tmp_path):
    path = tmp_path / "verdicts.json"
    path.write_text("[]")
    done = run("plan", *ARGUMENTS, "--report", tmp_path / "plan.html", "--verdicts", path)
    fails(done, 2, "has no verdicts; name a file that verify --json wrote")
