"""Findings about a file as a whole: its keys, its mesh, its model section, and the files of the repository."""

import dataclasses

import pytest
from levanter.trainer import TrainerConfig
from lint_trainers import EXPECTED_ERRORS, LLAMA, ROOT, lint_8b, only, trainer_of

from shardplan import config
from shardplan.errors import ConfigError
from shardplan.levanter_config.model_section import parse_model_section
from shardplan.levanter_config.trainer_section import TRAINER_KEYS
from shardplan.lint.lint import assumptions, lint_trainer, target_of


def test_a_model_section_of_another_model(tmp_path, raises_message):
    from shardplan.levanter_config.model_section import parse_model_section

    target = config.parse_config([f"--model.config={LLAMA}", "--hardware.slice=v4-16"])
    same = parse_model_section({"model": {"type": "llama", "hidden_dim": 4096, "num_kv_heads": 8}})
    assert target_of(target, same).model_section == same
    other = parse_model_section({"model": {"hidden_dim": 4096, "num_layers": 16}})
    with raises_message(ConfigError):
        target_of(target, other)


@pytest.mark.parametrize(
    ("trainer", "nearest", "mesh"),
    [
        ("{mesh: {axes: {model: 48}}}", 32, {"replica": 1, "data": 1, "model": 32}),
        ("{mesh: {axes: {model: 64, replica: 3}}}", 1, {"replica": 1, "data": 1, "model": 32}),
        ("{mesh: {axes: {data: 4, model: 4}}}", 8, {"replica": 1, "data": 8, "model": 4}),
        ("{mesh: {dcn_axes: {replica_dcn: 2}}}", 1, {"replica": 1, "data": 32, "model": 1}),
    ],
)
def test_lint_of_a_wrong_mesh_goes_on_with_the_nearest_size(trainer, nearest, mesh):
    result = lint_8b(trainer, "v4-64")
    replaced = [finding for finding in result.findings if finding.kind == "mesh size"]
    assert replaced[-1].severity == "error" and replaced[-1].remedy == f"the other findings assume {nearest}"
    assert result.subject.section.mesh == mesh


def test_message_of_a_wrong_mesh():
    finding = only(lint_8b("{mesh: {axes: {model: 12}}}", "v4-64").findings, "mesh size")
    assert finding.where == ("trainer.mesh.axes.model",)
    assert finding.text == "trainer.mesh.axes.model 12 does not divide the 32 devices; did you mean 8 or 16?"


@pytest.mark.parametrize(
    ("trainer", "where", "remedy", "corrected"),
    [
        ("{mehs: {axes: {model: 8}}}", "trainer.mehs", "did you mean 'mesh'?", {"mesh": {"axes": {"model": 8}}}),
        (
            "{mesh: {}, train_batchsize: 8}",
            "trainer.train_batchsize",
            "did you mean 'train_batch_size'?",
            {"mesh": {}, "train_batch_size": 8},
        ),
        ("{mesh: {axs: {data: 8}}}", "trainer.mesh.axs", "did you mean 'axes'?", {"mesh": {"axes": {"data": 8}}}),
        ("{qqq: 8}", "trainer.qqq", "remove it", {}),
        # keys of levanter 1.2, which a file is converted from before, are not suggested
        ("{model_axis_sise: 8}", "trainer.model_axis_sise", "remove it", {}),
        ("{1: 8}", "trainer.1", "remove it", {}),
        # not similar enough to rename it
        ("{per_device: 2}", "trainer.per_device", "remove it, or did you mean 'per_device_parallelism'?", {}),
        # a value of the wrong type, and a key that is there already
        ("{train_batchsize: big}", "trainer.train_batchsize", "remove it, or did you mean 'train_batch_size'?", {}),
        (
            "{train_batch_size: 16, train_batchsize: 8}",
            "trainer.train_batchsize",
            "remove it, or did you mean 'train_batch_size'?",
            {"train_batch_size": 16},
        ),
    ],
)
def test_levanter_does_not_start_with_an_unknown_key(trainer, where, remedy, corrected):
    result = lint_8b(trainer)
    finding = only(result.findings, "unknown key")
    assert (finding.severity, finding.where, finding.remedy) == ("error", (where,), remedy)
    assert result.subject.trainer == {"mp": "bf16", **corrected} and result.plan is not None
    section, _, key = where.rpartition(".")
    assert finding.text.startswith(f"Levanter has no key {1 if key == '1' else repr(key)} in {section} and does not st")


def test_every_key_of_levanter_is_known():
    assert {item.name for item in dataclasses.fields(TrainerConfig)} == {*TRAINER_KEYS}


@pytest.mark.parametrize("trainer", ["{mesh: {batch_axis_name: 3}}", "null", "{mesh: {axes: {expert: 2}}}"])
def test_an_unreadable_section_raises(trainer):
    with pytest.raises(ConfigError):
        lint_8b(trainer)


@pytest.mark.slow
def test_prediction_uses_the_file_and_levanters_default_types():
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-16", "--workload.kind=train", "--workload.batch=16"]
    base = config.parse_config(argv)
    target = target_of(base, parse_model_section({"model": {"gradient_checkpointing": "offload", "max_seq_len": 1024}}))
    result = lint_trainer({"train_batch_size": 32}, target)
    assert result.plan is not None
    work = result.plan.workload
    assert (work.batch, work.position, work.gradient_checkpointing) == (32, 1024, "offload")
    assert (work.param_dtype, work.compute_dtype) == ("float32", "float32")
    assert assumptions(result, target) == []

    target = target_of(base)
    assert assumptions(lint_trainer({}, target), target) == [
        "batch 16 (Levanter's default is 512)",
        "2048 tokens per sequence",
        "gradient checkpointing default (default in Levanter)",
    ]
    given = target_of(config.parse_config([*argv, "--workload.optimizer=lion"]))
    assert assumptions(lint_trainer({}, given), given)[-1] == "optimizer lion, whatever the section optimizer says"


@pytest.fixture(scope="module")
def target_405b():
    return target_of(config.parse_config(["--config", str(ROOT / "configs" / "405b.yaml")]))


@pytest.mark.parametrize("name", EXPECTED_ERRORS)
def test_configurations_of_the_repository(target_405b, name):
    """Each has exactly the errors it was kept for."""
    result = lint_trainer(trainer_of(name), target_405b)
    assert {finding.kind for finding in result.errors} == EXPECTED_ERRORS[name]


def test_heads_finding_of_the_405b_configuration(target_405b):
    """126 layers x 16384 x 16384 x 4 bytes: the stacked projection that is replicated on every device."""
    replicated = only(lint_trainer(trainer_of("405b-heads-mlp"), target_405b).findings, "heads").parameters
    assert replicated["transformer.layers.stacked.self_attn.q_proj.weight"] == 135_291_469_824
