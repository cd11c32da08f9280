"""The smallest edit: fewer are not enough, its result has no error, and its lines show every changed key."""

import dataclasses
import io
import itertools
import math

import pytest
import yaml
from test_lint import EXPECTED_ERRORS, LLAMA, ROOT, USUAL, trainer_of

from shardplan import config as configuration
from shardplan.errors import ConfigError
from shardplan.levanter_config.trainer_section import parse_trainer_section
from shardplan.lint.edits import Edit, candidate_edits, diff_trainers, explain_lines
from shardplan.lint.lint import lint_trainer, target_of
from shardplan.lint.repair import NEAR_BEST, find_smallest_edit, review
from shardplan.lint.smallest_edit import SearchLimit, _new_warnings
from shardplan.report.console import console
from shardplan.report.page.page import plan_page
from shardplan.report.page.panels.repair import AS_IT_IS, repair_panel
from shardplan.report.plan.lint import print_review, review_json
from shardplan.search.make_plan import make_plan


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """Results must not depend on how busy the machine is."""
    monkeypatch.setattr("shardplan.lint.repair.SEARCH_SECONDS", math.inf)


@pytest.fixture(scope="module")
def target():
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.batch=16"]
    return target_of(configuration.parse_config(argv))


def seconds_per_sequence(result):
    return result.plan.cost.step_seconds / result.plan.workload.batch


BROKEN = {
    "misspelt": "{mesh: {axes: {model: 8}, shared_mapping: {kv_heads: model}, param_mapping: {}}}",
    "duplicate": "{mesh: {axes: {model: 4}, shared_mapping: {heads: null, kv_head: model, head_size: model}}}",
    "mesh size": "{mesh: {axes: {model: 3}, shared_mapping: {heads: null, kv_head: model}}}",
    "batch": "{train_batch_size: 4, mesh: {shared_mapping: {heads: null}}}",
    "more devices than there are": "{mesh: {axes: {model: 16}, shared_mapping: {kv_head: model}}}",
    "empty list": "{mesh: {axes: {model: 2}, shared_mapping: {kv_head: model}, param_mapping: {mlp: []}}}",
    "stored on one axis twice": "{mesh: {axes: {model: 2}, param_mapping: {embed: data, mlp: [model, data]}}}",
    "mesh axis": "{mesh: {axes: {model: 4}, shared_mapping: {mlp: modle, heads: null, kv_head: model}}}",
    "loss": "{mesh: {axes: {model: 2}, shared_mapping: {kv_head: model, vocab: model}}}",
    "attention": "{mesh: {axes: {model: 2}, shared_mapping: {heads: null, q_heads_per_group: model}}}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_no_single_edit_is_missed(target, name):
    """Compared with every candidate edit, also those of axes that the first error does not concern."""
    start = lint_trainer({"mp": "bf16", **yaml.safe_load(BROKEN[name])}, target)
    assert start.errors
    repair = find_smallest_edit(start, target)
    assert repair is not None and not repair.lint.errors
    repaired = [
        child
        for edit in candidate_edits(start.trainer, start.subject)
        if not (child := lint_trainer(edit.apply(start.trainer), target)).errors
    ]
    assert (repair.edits == 1) == bool(repaired)
    if repaired:
        fewest = min(_new_warnings(start, child) for child in repaired)
        repaired = [child for child in repaired if _new_warnings(start, child) == fewest]
        fastest = min(seconds_per_sequence(child) for child in repaired)
        assert seconds_per_sequence(repair.lint) <= 1.05 * fastest


def test_two_edits_if_one_is_not_enough(target):
    """Only one of the three axes of queries can stay; compared with every pair of candidate edits."""
    trainer = yaml.safe_load(
        "{mp: bf16, mesh: {axes: {model: 8},"
        " shared_mapping: {heads: null, kv_head: model, q_heads_per_group: model, head_size: model},"
        " param_mapping: {embed: data, vocab: model}}}"
    )
    start = lint_trainer(trainer, target)
    reported: list[str] = []
    repair = find_smallest_edit(start, target, report=reported.append)
    assert repair is not None and repair.edits == 2
    assert reported[0] == "looking for an edit that removes all errors: number of edits 1, layouts checked 1"
    assert len(reported) == 2 and ": number of edits 2, layouts checked " in reported[1]
    assert set(repair.lines) >= {"-trainer.mesh.shared_mapping.q_heads_per_group: model"}
    best = min(
        child.plan.cost.step_seconds
        for first, second in itertools.combinations(candidate_edits(trainer, start.subject), 2)
        if not {*first.values, *first.removed} & {*second.values, *second.removed}
        if not (child := lint_trainer(second.apply(first.apply(trainer)), target)).errors
    )
    assert repair.lint.plan is not None and repair.lint.plan.cost.step_seconds <= 1.05 * best


def test_no_edit_if_nothing_fits(target):
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v5e-1", "--workload.batch=16"]
    small = target_of(configuration.parse_config(argv))
    start = lint_trainer({"mp": "f32"}, small)
    assert start.errors[0].kind == "memory"
    assert find_smallest_edit(start, small) is None


@pytest.fixture(scope="module")
def config_405b():
    return configuration.parse_config(["--config", str(ROOT / "configs" / "405b.yaml")])


@pytest.mark.parametrize(
    "name",
    [
        # without errors, like the small file of the next test, and the search for a faster layout takes longest
        pytest.param(each, marks=[pytest.mark.whole] if each == "405b-sequence-share" else [])
        for each in EXPECTED_ERRORS
    ],
)
def test_repaired_configurations_parse_without_errors(config_405b, name):
    reviewed = review(str(ROOT / "configs" / "levanter" / f"{name}.yaml"), config_405b)
    assert (reviewed.repair is not None) == bool(EXPECTED_ERRORS[name])
    check_edits(reviewed, trainer_of(name), target_of(config_405b))


def test_a_slow_file_without_errors_is_made_faster(target, tmp_path):
    path = tmp_path / "levanter.yaml"
    content = "{trainer: {mp: bf16, train_batch_size: 16, mesh: {axes: {model: 8}, shared_mapping: {heads: null}}}}"
    path.write_text(content)
    reviewed = review(str(path), target.config)
    assert reviewed.lint.errors == [] and reviewed.repair is None and reviewed.faster is not None
    check_edits(reviewed, yaml.safe_load(content)["trainer"], target)


def check_edits(reviewed, trainer, target):
    """Edits leave no error, fit, and have lines for all that they change; the last is nearly as fast as the best."""
    assert reviewed.best is not None
    for repair in filter(None, (reviewed.repair, reviewed.faster)):
        again = lint_trainer(repair.lint.trainer, target)
        assert not again.errors
        assert again.plan is not None and again.plan.memory.peak <= again.plan.memory.available
        section = parse_trainer_section(yaml.safe_load(yaml.safe_dump(repair.lint.trainer)), target.hardware.devices)
        assert again.plan.compute_mapping == section.compute_mapping
        assert repair.lines == diff_trainers(trainer, repair.lint.trainer)
    last = reviewed.faster or reviewed.repair
    if last is not None and last.lint.plan is not None:
        assert (
            seconds_per_sequence(last.lint)
            <= NEAR_BEST * reviewed.best.cost.step_seconds / reviewed.best.workload.batch
        )


def test_a_file_without_errors_needs_no_repair(tmp_path):
    path = tmp_path / "levanter.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"mp": "bf16", **yaml.safe_load(USUAL)}}))
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.batch=16"]
    reviewed = review(str(path), configuration.parse_config(argv))
    assert reviewed.lint.errors == [] and reviewed.repair is None
    assert reviewed.best is not None and not reviewed.converted


def test_repair_of_heads_on_a_model_axis_of_all_devices(config_405b):
    """Known by hand: as many devices on model as there are key heads, and the key heads mapped to model."""
    start = lint_trainer(trainer_of("405b-heads-mlp"), target_of(config_405b))
    repair = find_smallest_edit(start, target_of(config_405b))
    assert repair is not None and repair.lines == [
        "-trainer.mesh.axes.model: 128",
        "+trainer.mesh.axes.model: 8",
        "+trainer.mesh.shared_mapping.kv_head: model",
    ]


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        pytest.param(
            "train_batch_size: 16, per_device_parallelism: 3",
            "+trainer.per_device_parallelism: -1",
            marks=pytest.mark.whole,
        ),
        ("train_batch_size: 4096, per_device_parallelism: 100", "+trainer.per_device_parallelism: 32"),
        pytest.param("train_batch_size: 12", "+trainer.train_batch_size: 16", marks=pytest.mark.whole),
        ("train_batch_size: 9, per_device_parallelism: 1", "+trainer.train_batch_size: 16"),
        ("per_device_parallelism: 7, train_batch_size: 64", "+trainer.per_device_parallelism: -1"),
    ],
)
def test_one_edit_repairs_an_indivisible_batch(trainer, line):
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.kind=train", "--workload.position=512"]
    target = target_of(configuration.parse_config(argv))
    mesh = "mesh: {shared_mapping: {mlp: model, heads: null}}"
    start = lint_trainer(yaml.safe_load(f"{{mp: 'p=f32,c=bf16', {trainer}, {mesh}}}"), target)
    assert [error.kind for error in start.errors] == ["batch"]
    repair = find_smallest_edit(start, target)
    assert repair is not None and repair.edits == 1 and repair.lines[-1] == line
    assert "unused mesh axis" not in {finding.kind for finding in repair.lint.findings}


@pytest.mark.parametrize(
    "trainer",
    [
        "{mesh: {axes: {model: 2}, shared_mapping: {layers: data, layer: null}}}",
        "{mesh: {axes: {model: 2}, param_mapping: {layer: data}}}",
        "{mesh: {axes: {model: 2}, shared_mapping: {layer: replica}}}",
    ],
)
def test_no_edit_maps_the_axis_along_which_layers_are_stacked(target, trainer):
    start = lint_trainer(yaml.safe_load(trainer), target)
    for edit in candidate_edits(start.trainer, start.subject):
        mapped = {key: value for key, value in edit.values.items() if value is not None}
        assert "layer" not in mapped.values() and not any(key.endswith(".layer") for key in mapped)


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


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (
            "{trainer: {mp: bf16, qqq: 1, train_batchsize: 16,"
            " mesh: {axes: {model: 2}, shared_mapping: {mlp: modle, heads: null, kv_head: model}}}}",
            [
                "-trainer.qqq: 1",
                "-trainer.train_batchsize: 16",
                "-trainer.mesh.shared_mapping.mlp: modle",
                "+trainer.mesh.shared_mapping.mlp: model",
                "+trainer.train_batch_size: 16",
            ],
        ),
        (
            "{trainer: {mp: bf16, qqq: 1}, model: {type: llama, attn_backend: jax_flsh}}",
            ["-model.attn_backend: jax_flsh", "+model.attn_backend: jax_flash", "-trainer.qqq: 1"],
        ),
        # more keys than the search tries edits
        (
            f"{{trainer: {{mp: bf16, {', '.join(f'qq{i}: 1' for i in range(12))}}}}}",
            [f"-trainer.qq{i}: 1" for i in range(12)],
        ),
    ],
)
def test_smallest_edit_leaves_nothing_that_levanter_rejects(tmp_path, content, lines):
    path = tmp_path / "levanter.yaml"
    path.write_text(content)
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.batch=16"]
    repair = review(str(path), configuration.parse_config(argv)).repair
    assert repair is not None and repair.lines == lines and not repair.lint.errors
    assert repair.edits == len({line[1:].split(": ")[0].replace("batchsize", "batch_size") for line in lines})


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


def test_an_edit_does_not_change_its_input():
    before = {"mesh": {"batch_axis_name": None, "shared_mapping": {"mlp": "model", "kv_heads": "model"}}, "seed": 3}
    edit = Edit(
        {"trainer.mesh.shared_mapping.kv_head": "model", "trainer.mesh.param_mapping.embed": ["model", "data"]},
        ("trainer.mesh.shared_mapping.kv_heads", "trainer.mesh.batch_axis_name"),
    )
    after = edit.apply(before)
    assert before["mesh"] == {"batch_axis_name": None, "shared_mapping": {"mlp": "model", "kv_heads": "model"}}
    assert after == {
        "mesh": {
            "shared_mapping": {"mlp": "model", "kv_head": "model"},
            "param_mapping": {"embed": ["model", "data"]},
        },
        "seed": 3,
    }
    assert diff_trainers(before, after) == [
        "-trainer.mesh.batch_axis_name: null",
        "-trainer.mesh.shared_mapping.kv_heads: model",
        "+trainer.mesh.shared_mapping.kv_head: model",
        "+trainer.mesh.param_mapping.embed: [model, data]",
    ]


def test_lines_say_what_replaces_what():
    """Where only one of the two lines is there, it says what holds instead."""
    lines = [
        "-trainer.mesh.axes.model: 3", "+trainer.mesh.axes.model: 2", "+trainer.per_device_parallelism: 2",
        "-trainer.mesh.param_mapping.embed: model", "+trainer.mesh.shared_mapping.kv_head: model",
        "-trainer.mesh.shared_mapping.vocab: model", "-trainer.qqq: 1",
        "+train_config.trainer.mesh.axes.model: 4",
    ]  # fmt: skip
    assert explain_lines(lines) == [
        "-trainer.mesh.axes.model: 3",
        "+trainer.mesh.axes.model: 2",
        "+trainer.per_device_parallelism: 2 (instead of Levanter's default, -1)",
        "-trainer.mesh.param_mapping.embed: model (then it is Levanter's default, data)",
        "+trainer.mesh.shared_mapping.kv_head: model (instead of no entry)",
        "-trainer.mesh.shared_mapping.vocab: model",
        "-trainer.qqq: 1",
        "+train_config.trainer.mesh.axes.model: 4 (instead of Levanter's default, 1)",
    ]


def test_a_search_that_is_stopped_says_so(target):
    """The second number of edits is not tried."""
    trainer = yaml.safe_load(
        "{mp: bf16, mesh: {axes: {model: 8}, shared_mapping:"
        " {mlp: null, heads: null, kv_head: model, q_heads_per_group: model, head_size: model}}}"
    )
    start, limit = lint_trainer(trainer, target), SearchLimit(0.0)
    assert start.errors and find_smallest_edit(start, target, limit=limit) is None and limit.has_stopped
    unlimited = SearchLimit()
    assert find_smallest_edit(start, target, limit=unlimited) is not None and not unlimited.has_stopped


def test_repairs_keep_a_schedule():
    """128 and 1024 sequences, on 64 batch shards with 4 sequences each."""
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-128", "--workload.kind=train", "--workload.position=512"]
    target = target_of(configuration.parse_config(argv))
    schedule = [{"start": 0, "value": 128}, {"start": 1000, "value": 1024}]
    start = lint_trainer({"mp": "p=f32,c=bf16", "per_device_parallelism": 4, "train_batch_size": schedule}, target)
    assert [error.kind for error in start.errors] == ["batch"]
    edits = [
        edit for edit in candidate_edits(start.trainer, start.subject)
        if {"trainer.train_batch_size", "trainer.per_device_parallelism"} & edit.values.keys()
    ]  # fmt: skip
    schedules = [edit.values["trainer.train_batch_size"] for edit in edits if "trainer.train_batch_size" in edit.values]
    assert [{"start": 0, "value": 256}, schedule[1]] in schedules
    assert all([step["start"] for step in each] == [0, 1000] for each in schedules)
    per_device = {edit.values.get("trainer.per_device_parallelism") for edit in edits}
    assert {-1, 1, 2} <= per_device and 8 not in per_device
    assert diff_trainers({"train_batch_size": schedule}, {"train_batch_size": schedules[0]})[0] == (
        "-trainer.train_batch_size: [{start: 0, value: 128}, {start: 1000, value: 1024}]"
    )
