"""`plan --lint` and `plan diff` as a user runs them."""

import json
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, fails, run

from shardplan.hardware import GENERATIONS
from shardplan.model.huggingface.hf_config import read_config
from shardplan.plan.plan import Plan

CONFIG = "--config=configs/405b.yaml"


def test_lint_of_what_runs():
    done = run("plan", CONFIG, "--lint", "configs/levanter/405b-usual.yaml")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "fits v4-256: 13.86 of 30.75 GiB per device, 16.89 GiB free" and "a step, " in lines[1]
    assert "the best plan: peak " in done.stdout and "the smallest edit" not in done.stdout


def test_lint_of_what_does_not_run(tmp_path):
    path = tmp_path / "lint.json"
    done = run("plan", CONFIG, "--lint_seconds=600", "--lint", "configs/levanter/405b-heads-mlp.yaml", "--json", path)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "shardplan plan: configs/levanter/405b-heads-mlp.yaml cannot run as it is on v4-256: heads, memory, replicated"
    )
    lines = done.stdout.splitlines()
    assert "error heads at trainer.mesh.shared_mapping.heads" in lines
    at = lines.index("  -trainer.mesh.axes.model: 128")
    assert lines[at - 1].startswith("the smallest edit that removes all errors: 2 edits; peak ")
    assert lines[at + 1 : at + 3] == [
        "  +trainer.mesh.axes.model: 8", "  +trainer.mesh.shared_mapping.kv_head: model (instead of no entry)",
    ]  # fmt: skip
    best = yaml.safe_load(done.stdout.split("GiB per device")[-1].partition("\n")[2])
    assert best["trainer"]["mesh"]["axes"]["model"] == 8
    values = json.loads(path.read_text())
    assert [finding["kind"] for finding in values["findings"]] == ["heads", "memory", "replicated"]
    assert values["findings"][0]["where"] == ["trainer.mesh.shared_mapping.heads"]
    assert values["repair"]["trainer"]["mesh"]["shared_mapping"]["kv_head"] == "model"
    assert values["best"]["trainer"] == best["trainer"]
    assert values["predicted"]["peak"] > values["predicted"]["available"] >= values["repair"]["predicted"]["peak"]


def test_lint_reads_the_attention_backend_of_the_file(tmp_path):
    values = yaml.safe_load((ROOT / "configs" / "levanter" / "405b-q-heads.yaml").read_text())
    (tmp_path / "levanter.yaml").write_text(
        yaml.safe_dump({**values, "model": {"type": "llama", "attn_backend": "jax_flash"}})
    )
    done = run("plan", CONFIG, "--lint", tmp_path / "levanter.yaml", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert {finding["kind"] for finding in json.loads(done.stdout)["findings"]} == {"barely sharded"}


def test_lint_of_names_that_levanter_does_not_have(tmp_path):
    path = tmp_path / "levanter.yaml"
    path.write_text("trainer: {mp: bf16, qqq: 1, mesh: {axes: {model: 2}, shared_mapping: {mlp: modle}}}")
    argv = ["--model=llama-3.1-8b", "--hardware.slice=v4-16", "--workload.batch=16"]
    done = run("plan", *argv, "--lint", path)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert done.stderr.endswith(f"{path} cannot run as it is on v4-16: unknown key, unknown mesh axis\n")
    text = " ".join(done.stdout.split())
    assert "error unknown key at trainer.qqq Levanter has no key 'qqq' in trainer and does not start; " in text
    assert "maps 'mlp' to the unknown mesh axis 'modle'; did you mean 'model'?" in text
    lines = done.stdout.splitlines()
    for line in (
        "  -trainer.qqq: 1",
        "  -trainer.mesh.shared_mapping.mlp: modle",
        "  +trainer.mesh.shared_mapping.mlp: model",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "levanter.yaml cannot be read: "),
        ("trainer: [", "levanter.yaml is not YAML: "),
        ("trainer: {mp: f32, mp: bf16}", "levanter.yaml: key 'mp' is in line 1 and again in line 1; remove one of the"),
        ("model: {}", "levanter.yaml contains the sections model, but no trainer section; is it for Levanter?"),
        (
            "trainer: {mesh: {shared_mapping: {mlp: 3}}}",
            "it must map names of axes to a mesh axis, a list of them, or null",
        ),
    ],
)
def test_lint_of_unreadable_files(tmp_path, text, message):
    path = tmp_path / "levanter.yaml"
    if text is not None:
        path.write_text(text)
    fails(run("plan", CONFIG, "--lint", path), 2, message)


def test_lint_of_a_file_for_an_older_levanter(tmp_path):
    """It is an error, and the converted section is one that Levanter starts with."""
    path = tmp_path / "levanter.yaml"
    path.write_text("{trainer: {mp: bf16, model_axis_size: 8, axis_resources: {mlp: model, kv_head: model}}}")
    argv = ["--model=llama-3.1-8b", "--hardware.slice=v4-16", "--workload.batch=16"]
    done = run("plan", *argv, "--lint", path)
    assert done.returncode == 3 and done.stderr.endswith(f"{path} cannot run as it is on v4-16: schema\n")
    converted = done.stdout.split("the same for the installed Levanter:\n")[1].split("\n\n")[0]
    path.write_text(converted)
    again = run("plan", *argv, "--lint", path)
    assert again.returncode == 0, again.stdout
    assert "mesh replica 1 x data 1 x model 8" in " ".join(again.stdout.split())


@pytest.mark.parametrize("other", ["--verify", "--plan=plan.json", "--why=mlp="])
def test_lint_goes_alone(other):
    message = f"lint checks the file as it is, and plans by itself; leave out {other.split('=')[0]}"
    fails(run("plan", CONFIG, "--lint", "configs/levanter/405b-usual.yaml", other), 2, message)


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Two plans of one model, for meshes that differ."""
    folder = tmp_path_factory.mktemp("plans")
    for model in (2, 4):
        done = run("plan", "--config=configs/8b.yaml", f"--mesh.model={model}", "--json", folder / f"{model}.json")
        assert done.returncode == 0, done.stderr
    return folder / "2.json", folder / "4.json"


def test_diff(plans):
    done = run("plan", "diff", *plans)
    assert done.returncode == 0, done.stderr
    assert "Mesh" in done.stdout and "Memory, GiB per device" in done.stdout and "Estimated seconds" in done.stdout
    assert run("plan", "diff", plans[0], plans[0]).stdout == "the plans are the same\n"
    console_script = subprocess.run(
        [sys.executable, "-m", "shardplan", "plan", "diff", *plans, "--json", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert console_script.returncode == 0, console_script.stderr
    values = json.loads(console_script.stdout)
    before, after = (Plan.load(str(path)) for path in plans)
    assert {"name": "model", "before": before.mesh["model"], "after": after.mesh["model"]} in values["mesh"]


@pytest.mark.quick
def test_diff_to_a_file(plans, tmp_path):
    done = run("plan", "diff", *plans, f"--json={tmp_path / 'diff.json'}")
    assert done.returncode == 0 and "Mesh" in done.stdout
    assert json.loads((tmp_path / "diff.json").read_text())["mesh"]


def test_diff_of_what_is_no_plan(plans, tmp_path):
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**json.loads(plans[0].read_text()), "schema_version": 0}))
    fails(
        run("plan", "diff", plans[0], old), 2, f"{old}: plan has schema_version 0; this shardplan reads 1; plan again"
    )
    fails(run("plan", "diff", plans[0], tmp_path / "no.json"), 2, "no.json cannot be read: No such file or directory")
    fails(run("plan", "diff", plans[0]), 2, "command line: the following arguments are required: after")
    fails(run("plan", "diff", *plans, "--jsn", "-"), 2, "command line: unrecognized arguments: --jsn -")
    fails(run("plan", "diff", *plans, "--json", tmp_path), 2, f"json '{tmp_path}' cannot be written: Is a directory")


def test_why_and_what_if():
    done = run("plan", "--config=configs/8b.yaml", "--hardware.slice=v4-16", "--why", "position=", "--what_if")
    assert done.returncode == 0, done.stderr
    assert "why not position=?" in done.stdout and "· compute " in done.stdout
    assert "What if" in done.stdout and "hardware.slice v4-32" in done.stdout


def test_questions_about_a_given_plan_are_answered_alone(tmp_path):
    """The plan itself is known, and is not printed once more."""
    path = tmp_path / "plan.json"
    planned = run("plan", "--config=configs/8b.yaml", "--hardware.slice=v5e-8", "--json", path)
    assert planned.returncode == 0 and "compute mapping" in planned.stdout
    done = run("plan", "--plan", path, "--why", "position=model")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("\nwhy not position=model?\n") and "compute mapping" not in done.stdout


@pytest.mark.whole
def test_what_if_is_printed_where_nothing_fits():
    done = run("plan", "--config=configs/70b.yaml", "--hardware.slice=v5e-4", "--what_if", "--json=-")
    assert done.returncode == 3 and done.stdout == ""
    assert "as it is: no plan fits v5e-4" in done.stderr and "no plan fits v5e-4" in done.stderr.splitlines()[-1]


@pytest.mark.quick
@pytest.mark.parametrize("columns", [80, 120])
def test_list_of_slices(monkeypatch, columns):
    """One line each, which fits the terminal; no model is named."""
    monkeypatch.setenv("COLUMNS", str(columns))
    done = run("plan", "--list_slices")
    assert done.returncode == 0 and done.stderr == ""
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["v4-256", "v4", "4x4x8", "128", "128", "30.75"] in rows
    assert ["tpu7x-12288", "tpu7x", "16x16x24", "6144", "12288", "94.75"] in rows
    for generation in GENERATIONS.values():
        assert sum(row[1:2] == [generation.name] for row in rows) == len(generation.sizes)
    assert max(map(len, done.stdout.splitlines())) <= columns
    slices = json.loads(run("plan", "--list_slices", "--json", "-").stdout)["slices"]
    expected = {"slice": "v4-256", "generation": "v4", "torus": [4, 4, 8], "chips": 128, "devices": 128}
    assert expected.items() <= next(each for each in slices if each["slice"] == "v4-256").items()


def test_pins_that_cannot_be_read():
    fails(run("plan", "--config=configs/8b.yaml", "--pin", "mpl=model"), 2, "the model has no axis 'mpl'; did you mean")


@pytest.mark.whole
def test_the_best_of_several_by_the_compiler(tmp_path):
    """Two small plans are compiled; what is printed and written is the one that ranks first."""
    config = read_config("llama-3.1-8b", None)
    small = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    small.write_text(json.dumps({**config, **sizes, "num_attention_heads": 8, "num_key_value_heads": 4}))
    arguments = [f"--model.config={small}", "--hardware.slice=v4-8", "--workload.batch=4", "--workload.position=256"]
    target = tmp_path / "plan.json"
    done = run("plan", *arguments, "--verify", "2", f"--json={target}", "--compiler.cache=null")
    assert done.returncode == 0, done.stderr
    assert "Ranking" in done.stdout and "fastest of 2 compiled plans (plan " in done.stdout
    assert "by the TPU compiler" in json.loads(target.read_text())["search"]["reasons"][0]
    fails(run("eval", "--verify", "2", f"--plan={target}"), 2, "verify is 2; it must be true or false")


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_a_plan_fits_the_screen(name, checkpoint, monkeypatch):
    """It is printed on at most 25 lines of 80 columns, for every shipped configuration."""
    monkeypatch.setenv("COLUMNS", "80")
    # the demo's checkpoint is not part of the repository
    other = [f"--model.ref={checkpoint}"] if name in ("tiny.yaml", "tiny-extraction.yaml") else []
    done = run("plan", f"--config=configs/{name}", *other)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 80


def test_what_is_long_comes_with_parameters():
    short, long = (
        run("plan", "--config=configs/8b.yaml", "--hardware.slice=v4-16", *more) for more in ([], ["--parameters"])
    )
    assert short.returncode == long.returncode == 0, short.stderr
    assert "P(None" not in short.stdout and "P(None" in long.stdout and "\ntrainer:\n" in long.stdout
    assert all(line in long.stdout.splitlines() for line in short.stdout.splitlines())
