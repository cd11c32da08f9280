"""Where commands write: never over what they read, also through links and into closed pipes."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, fails, run
from processes import fork_python

from shardplan.plan.plan import Plan

REPLACED = "would replace what the command reads or writes itself; name another file"


def shell(line: str):
    """A line for bash in which SHARDPLAN stands for the command."""
    return subprocess.run(
        ["bash", "-c", line.replace("SHARDPLAN", f"{sys.executable} -m shardplan")],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def evaluation(checkpoint, tmp_path_factory):
    """A configuration of an evaluation in a folder of its own, with everything that it reads."""
    folder = tmp_path_factory.mktemp("outputs")
    shutil.copytree(checkpoint, folder / "model")
    values = {
        "model": {"ref": str(folder / "model")},
        "workload": {"batch": 4, "position": 64, "compute_dtype": "float32"},
        "data": {"path": str(folder / "model" / "text.jsonl")},
        "output": str(folder / "results"),
    }
    (folder / "eval.yaml").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (["plan", "--config", "{}/eval.yaml"], "--json={}/eval.yaml"),
        (["plan", "--config", "{}/eval.yaml"], "--json={}/link.yaml"),
        (["plan", "--config", "{}/eval.yaml"], "--json={}/model/config.json"),
        (["plan", "--config", "{}/eval.yaml", "--lint", "{}/lint.yaml"], "--json={}/lint.yaml"),
        (["plan", "diff", "{}/a.json", "{}/b.json"], "--json={}/b.json"),
        (["verify", "--config", "{}/eval.yaml", "--against", "{}/lint.yaml"], "--json={}/lint.yaml"),
        (["checkpoint", "--config", "{}/eval.yaml", "--schedule"], "--json={}/eval.yaml"),
    ],
)
def test_an_input_is_not_replaced(evaluation, command, output):
    (evaluation / "lint.yaml").write_text("trainer: {}\n")
    (evaluation / "link.yaml").unlink(missing_ok=True)
    (evaluation / "link.yaml").symlink_to("eval.yaml")
    before = {path: path.read_bytes() for path in evaluation.rglob("*") if path.is_file()}
    name, *rest = [each.format(evaluation) for each in (*command, output)]
    fails(run(name, *rest), 2, REPLACED)
    assert {path: path.read_bytes() for path in evaluation.rglob("*") if path.is_file()} == before


def test_a_new_file_beside_the_inputs(evaluation):
    done = run("plan", "--config", evaluation / "eval.yaml", "--json", evaluation / "model" / "plan.json")
    assert done.returncode == 0, done.stderr
    (evaluation / "model" / "plan.json").unlink()


def test_the_work_goes_on_when_the_reader_of_the_tables_has_gone(evaluation):
    """As with `| head -1`: the results are written, and the exit code is that of the whole work."""
    results = evaluation / "piped"
    lint = ["--config", "configs/405b.yaml", "--lint", "configs/levanter/405b-heads-mlp.yaml"]
    for argv, code in ((["eval", "--config", evaluation / "eval.yaml", "--output", results], 0), (["plan", *lint], 3)):
        process = fork_python(["-m", "shardplan", *argv])
        assert process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == code and "Traceback" not in errors, errors
    assert json.loads((results / "summary.json").read_text())["total"]["tokens"] > 0


def test_closed_and_full_streams(evaluation, tmp_path):
    """Lines about progress go to stderr; a plan that was made is enough for tables, which go to stdout."""
    plan, again = tmp_path / "plan.json", tmp_path / "again.json"
    planning = f"SHARDPLAN plan --config {evaluation / 'eval.yaml'} --json {plan}"
    for line, target, code in (
        (f"{planning} 2>/dev/full", plan, 2),
        (f"{planning} 2>&-", plan, 0),
        (f"SHARDPLAN plan --plan {plan} --json {again} >&-", again, 0),
    ):
        target.unlink(missing_ok=True)
        done = shell(line)
        assert done.returncode == code and "Traceback" not in done.stderr + done.stdout, done.stderr
        assert Plan.load(str(target)).workload.batch == 4


def test_links_stay_links(evaluation):
    """Also one to a file that does not exist yet, as in a folder of results elsewhere."""
    link, target = evaluation / "plan.json", evaluation / "elsewhere.json"
    link.symlink_to(target)
    done = run("plan", "--config", evaluation / "eval.yaml", "--json", link)
    assert done.returncode == 0, done.stderr
    assert link.is_symlink() and Plan.load(str(target)).workload.batch == 4


def test_outputs_that_are_no_files(evaluation, tmp_path):
    config = evaluation / "eval.yaml"
    fails(run("eval", "--config", config, "--output=-"), 2, "output is '-'; it must be a folder")
    done = run("eval", "--config", config, f"--output={evaluation / 'model'}")
    assert done.returncode == 2 and "config.json, which is no run; name another folder" in done.stderr
    fails(run("plan", "--config", config, "--json="), 2, "json is ''; it must not be empty; leave it out")
    fails(run("plan", "--config", config, "--lint="), 2, "lint is ''; it must not be empty")
    done = run("checkpoint convert", "--config", config, f"--to={tmp_path / 'to'}", f"--json={tmp_path / 'x.json'}")
    fails(done, 2, "json is for the Plan of a --dry_run; leave it out")
