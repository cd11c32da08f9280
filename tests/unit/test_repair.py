"""The smallest edit: fewer are not enough, its result has no error, and its lines show every changed key."""

import itertools
import math

import pytest
import yaml
from lint_trainers import EXPECTED_ERRORS, LLAMA, ROOT, USUAL, seconds_per_sequence, target_8b, trainer_of

from shardplan import config as configuration
from shardplan.levanter_config.trainer_section import parse_trainer_section
from shardplan.lint.edits import candidate_edits, diff_trainers
from shardplan.lint.lint import lint_trainer, target_of
from shardplan.lint.repair import review
from shardplan.lint.smallest_edit import SearchLimit, _new_warnings, find_smallest_edit


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """Results must not depend on how busy the machine is."""
    monkeypatch.setattr("shardplan.lint.repair.SEARCH_SECONDS", math.inf)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_no_single_edit_is_missed(name):
    """Compared with every candidate edit, also those of axes that the first error does not concern."""
    target = target_8b()
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


def test_two_edits_if_one_is_not_enough():
    """Only one of the three axes of queries can stay; compared with every pair of candidate edits."""
    target = target_8b()
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


def test_no_edit_if_nothing_fits():
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v5e-1", "--workload.batch=16"]
    small = target_of(configuration.parse_config(argv))
    start = lint_trainer({"mp": "f32"}, small)
    assert start.errors[0].kind == "memory"
    assert find_smallest_edit(start, small) is None


@pytest.fixture(scope="module")
def config_405b():
    return configuration.parse_config(["--config", str(ROOT / "configs" / "405b.yaml")])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED_ERRORS)
def test_repaired_configurations_parse_without_errors(config_405b, name):
    target, reviewed = target_of(config_405b), review(str(ROOT / "configs" / "levanter" / f"{name}.yaml"), config_405b)
    assert reviewed.best is not None and (reviewed.repair is not None) == bool(EXPECTED_ERRORS[name])
    if reviewed.repair is None:
        return
    trainer = reviewed.repair.lint.trainer
    again = lint_trainer(trainer, target)
    assert not again.errors
    assert again.plan is not None and again.plan.memory.peak <= again.plan.memory.available
    section = parse_trainer_section(yaml.safe_load(yaml.safe_dump(trainer)), target.hardware.devices)
    assert again.plan.compute_mapping == section.compute_mapping
    assert reviewed.repair.lines == diff_trainers(trainer_of(name), trainer)


@pytest.mark.slow
def test_a_file_without_errors_needs_no_repair(tmp_path):
    path = tmp_path / "levanter.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"mp": "bf16", **yaml.safe_load(USUAL)}}))
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.batch=16"]
    reviewed = review(str(path), configuration.parse_config(argv))
    assert reviewed.lint.errors == [] and reviewed.repair is None
    assert reviewed.best is not None and not reviewed.converted


@pytest.mark.slow
def test_repair_of_heads_on_a_model_axis_of_all_devices(config_405b):
    """Known by hand: as many devices on model as there are key heads, and the key heads mapped to model."""
    start = lint_trainer(trainer_of("405b-heads-mlp"), target_of(config_405b))
    repair = find_smallest_edit(start, target_of(config_405b))
    assert repair is not None and repair.lines == [
        "-trainer.mesh.axes.model: 128",
        "+trainer.mesh.axes.model: 8",
        "+trainer.mesh.shared_mapping.kv_head: model",
    ]


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_search_that_is_stopped_says_so():
    """The second number of edits is not tried."""
    target = target_8b()
    trainer = yaml.safe_load(
        "{mp: bf16, mesh: {axes: {model: 8}, shared_mapping:"
        " {mlp: null, heads: null, kv_head: model, q_heads_per_group: model, head_size: model}}}"
    )
    start, limit = lint_trainer(trainer, target), SearchLimit(0.0)
    assert start.errors and find_smallest_edit(start, target, limit=limit) is None and limit.has_stopped
    unlimited = SearchLimit()
    assert find_smallest_edit(start, target, limit=unlimited) is not None and not unlimited.has_stopped
