"""The review of a Levanter file: its smallest edit, the best plan, and what is printed and drawn of both."""

import dataclasses
import io
import math

import pytest
import yaml
from lint_trainers import LLAMA, seconds_per_sequence

from shardplan import config as configuration
from shardplan.errors import ConfigError
from shardplan.levanter_config.trainer_section import parse_trainer_section
from shardplan.lint.repair import review
from shardplan.report.console import console
from shardplan.report.page.page import plan_page
from shardplan.report.page.panels.repair import AS_IT_IS, repair_panel
from shardplan.report.plan.lint import print_review, review_json
from shardplan.search.make_plan import make_plan


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """Results must not depend on how busy the machine is."""
    monkeypatch.setattr("shardplan.lint.repair.SEARCH_SECONDS", math.inf)


@pytest.mark.slow
def test_repair_tries_microbatches(tmp_path):
    """The file does not require the configuration's default of one microbatch; an explicit one is kept."""
    path = tmp_path / "levanter.yaml"
    path.write_text(
        "{trainer: {train_batch_size: 128, mp: 'p=f32,c=bf16'}, model: {type: llama, gradient_checkpointing: false}}"
    )
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v5p-16", "--workload.kind=train"]
    reviewed = review(str(path), configuration.parse_config(argv))
    assert [error.kind for error in reviewed.lint.errors] == ["memory"] and reviewed.best is not None
    assert reviewed.repair is not None and reviewed.repair.lines == ["+trainer.per_device_parallelism: 2"]
    explicit = review(str(path), configuration.parse_config([*argv, "--workload.microbatches=1"]))
    assert explicit.best is None and explicit.why_no_best.startswith("no plan fits")
    assert review_json(explicit)["why_no_best"] == explicit.why_no_best
    plan, panel = repair_panel(explicit)
    page = plan_page(plan, [], panel)
    assert explicit.why_no_best[1:] in page and 'id="yaml"' not in page and "#yaml" not in page


def test_the_page_of_a_file_shows_its_memory_and_the_section_of_the_best_plan(tmp_path):
    """Its memory fits, though it cannot run: no verdict stands over it. The compiler options are the best plan's."""
    path = tmp_path / "levanter.yaml"
    path.write_text(
        "{trainer: {mp: bf16, train_batch_size: 16,"
        " mesh: {axes: {model: 8}, shared_mapping: {mlp: model, heads: model}}}}"
    )
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.batch=16"]
    reviewed = review(str(path), configuration.parse_config(argv))
    plan, panel = repair_panel(reviewed)
    assert reviewed.lint.errors and plan.memory.fits and panel.shown == AS_IT_IS
    assert plan.details is not None and plan.details.live and plan.details.tasks  # of which the page draws its charts
    assert panel.compiler_options == reviewed.best.compiler_options
    panel = dataclasses.replace(panel, compiler_options={"xla_of_the_best_plan": "true"})
    page = plan_page(plan, [], panel)
    assert "cannot run (heads)" in page and f"<h2>Memory of {AS_IT_IS}: " in page and "Fits: " not in page
    assert "xla_of_the_best_plan=true" in page and f"{next(iter(plan.compiler_options))}=" not in page


@pytest.mark.slow
def test_best_plan_is_never_slower_than_the_smallest_edit(tmp_path):
    """No plan shards the file's batch of 17 evenly; the smallest edit makes it 16."""
    path = tmp_path / "levanter.yaml"
    path.write_text("{trainer: {mp: bf16, train_batch_size: 17, mesh: {shared_mapping: {heads: null}}}}")
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16"]
    reviewed = review(str(path), configuration.parse_config(argv))
    assert reviewed.repair is not None and reviewed.best is not None
    assert reviewed.repair.lines == ["-trainer.train_batch_size: 17", "+trainer.train_batch_size: 16"]
    per_sequence = reviewed.best.cost.step_seconds / reviewed.best.workload.batch
    assert reviewed.best.workload.batch == 16 and per_sequence <= seconds_per_sequence(reviewed.repair.lint)
    as_it_is = make_plan(configuration.parse_config([*argv, "--workload.batch=17"]), own_attention=True)
    assert per_sequence < as_it_is.cost.step_seconds / 17
    stream = io.StringIO()
    print_review(reviewed, console(stream))
    best = " ".join(stream.getvalue().split()).split("the best plan: peak ")[1]
    assert " GiB per device, batch 16, " in best.split("trainer:")[0]
    assert review_json(reviewed)["best"]["batch"] == 16


def printed(reviewed):
    stream = io.StringIO()
    print_review(reviewed, console(stream))
    return stream.getvalue()


@pytest.mark.slow
def test_the_section_of_the_best_plan_is_printed(tmp_path):
    path = tmp_path / "levanter.yaml"
    path.write_text("trainer: {mesh: {axes: {model: 16}}}")
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.batch=16"]
    reviewed = review(str(path), configuration.parse_config(argv))
    assert reviewed.best is not None and not reviewed.converted
    best = review_json(reviewed)["best"]["trainer"]
    assert parse_trainer_section(best, 8).mesh == reviewed.best.mesh
    text = printed(reviewed)
    assert yaml.safe_load(text[text.index("\ntrainer:") :])["trainer"] == best
    assert "trainer.mesh.shared_mapping.heads (Levanter's default)" in " ".join(text.split())
    assert (
        "assumed, not in the file: evaluation (workload.kind); batch 16 (Levanter's default is 512); "
        "2048 tokens per sequence"
    ) in " ".join(text.split())


@pytest.mark.slow
def test_a_file_of_levanter_12_is_an_error_and_its_converted_section_is_reviewed(tmp_path):
    path = tmp_path / "levanter.yaml"
    path.write_text(
        "{model: {type: llama, seq_len: 4096}, trainer: {mp: bf16, model_axis_sise: 8, fsdp_axis: null,"
        " axis_resources: {mlp: model, heads: model, kv_heads: model}}}"
    )
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.batch=16"]
    reviewed = review(str(path), configuration.parse_config(argv))
    (schema,) = [finding for finding in reviewed.lint.errors if finding.kind == "schema"]
    assert set(schema.where) == {
        "trainer.model_axis_size", "trainer.fsdp_axis", "trainer.axis_resources", "model.seq_len"
    }  # fmt: skip
    assert schema.text.endswith(
        " are of levanter 1.2: Levanter does not start; the other findings are about the converted section"
    )
    assert reviewed.converted == {
        "model": {"type": "llama", "max_seq_len": 4096},
        "trainer": {
            "mp": "bf16",
            "mesh": {
                "axes": {"replica": 1, "data": 1, "model": 8},
                "shared_mapping": {"mlp": "model", "heads": "model", "kv_heads": "model"},
                "compute_mapping": {"batch": ["replica", "data"]},
                "param_mapping": {},
            },
        },
    }
    (unknown,) = [finding for finding in reviewed.lint.errors if finding.kind == "unknown axis"]
    assert unknown.where == ("trainer.mesh.shared_mapping.kv_heads",)
    (key,) = [finding for finding in reviewed.lint.errors if finding.kind == "unknown key"]
    assert key.remedy == "did you mean 'model_axis_size'?"
    assert reviewed.repair is not None and reviewed.repair.lines == [
        "-trainer.mesh.shared_mapping.kv_heads: model",
        "+trainer.mesh.shared_mapping.kv_head: model",
    ]
    assert reviewed.best is not None
    best = review_json(reviewed)["best"]["trainer"]
    assert parse_trainer_section(best, 8).mesh == reviewed.best.mesh


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("trainer: [", "is not YAML"),
        ("trainer: 3", "levanter.yaml: trainer is 3; it"),
    ],
)
def test_file_errors_are_raised_before_the_model_is_built(tmp_path, content, message):
    path = tmp_path / "levanter.yaml"
    if content is not None:
        path.write_text(content)
    nothing = configuration.parse_config([f"--model.config={tmp_path / 'no-model.json'}"])
    with pytest.raises(ConfigError, match=message):
        review(str(path), nothing)
