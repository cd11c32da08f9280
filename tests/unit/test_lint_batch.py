"""Findings about the batch: what the mesh does not divide, and what Levanter refuses."""

from types import SimpleNamespace

import draccus
import pytest
from levanter.data.loader import DataLoader
from levanter.schedule import BatchSchedule
from levanter.trainer import TrainerConfig
from lint_trainers import LLAMA, lint_8b, only, schedule_of

from shardplan import config
from shardplan.lint.lint import lint_trainer, target_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "text", "remedy"),
    [
        (
            "{train_batch_size: 12}",
            "12 sequences are not divisible by the 8 batch shards of replica 1 x data 8",
            "use 8 or 16 sequences, or a larger model axis",
        ),
        (
            "{train_batch_size: 6, mesh: {axes: {replica: 2}, compute_mapping: {batch: data}}}",
            "6 sequences are not divisible by the 4 batch shards of data 4",
            "use 4 or 8 sequences, or a larger model axis",
        ),
        (
            "{train_batch_size: 4, mesh: {axes: {replica: 2}}}",
            "4 sequences are not divisible by the 8 batch shards of replica 2 x data 4",
            "use 8 sequences, or a larger model axis",
        ),
    ],
)
def test_indivisible_batch(trainer, text, remedy):
    result = lint_8b(trainer)
    finding = only(result.findings, "batch")
    assert (finding.severity, finding.text, finding.remedy) == ("error", text, remedy)
    assert finding.where == ("trainer.train_batch_size", result.subject.size_key("model"))


def test_replicated_batch():
    finding = only(lint_8b("{mesh: {shared_mapping: {batch: model}}}").findings, "batch")
    assert (finding.severity, finding.where) == ("warning", ("trainer.mesh.shared_mapping.batch",))
    assert finding.text == "'batch' is replicated: every device computes all 16 sequences"


@pytest.mark.parametrize(
    ("trainer", "key"),
    [
        ("{mesh: {batch_axis_name: null}}", "trainer.mesh.batch_axis_name"),
        ("{mesh: {compute_mapping: {batch: null}}}", "trainer.mesh.compute_mapping.batch"),
    ],
)
def test_levanter_needs_a_mesh_axis_for_the_batch(trainer, key):
    """Its data loader divides by the number of devices along the batch, which Haliax says is None."""
    finding = only(lint_8b(trainer).findings, "batch")
    assert finding.severity == "error" and key in finding.where
    assert finding.text == "'batch' is mapped to no mesh axis, and Levanter's data loader fails"


def test_a_batch_on_an_axis_of_one_device_is_mapped():
    """As plans are printed that do not shard it."""
    trainer = "{mesh: {axes: {model: 8}, dcn_axes: {replica_dcn: 1}, compute_mapping: {batch: replica_dcn}}}"
    assert "batch" not in {finding.kind for finding in lint_8b(trainer).findings}


SCHEDULES = [
    {"train_batch_size": schedule_of(128, 1024), "per_device_parallelism": 4},
    {"train_batch_size": schedule_of(256, 1024), "per_device_parallelism": 4},
    {"train_batch_size": schedule_of(64, 96)},
    {"train_batch_size": schedule_of(64, 128)},
    {"train_batch_size": schedule_of(64, 96), "allow_nondivisible_batch_size": True},
    {"train_batch_size": schedule_of(64, 96), "allow_nondivisible_batch_size": True, "per_device_parallelism": 1},
    {"train_batch_size": 96, "allow_nondivisible_batch_size": True},
    {"train_batch_size": 128, "per_device_parallelism": 2},
    {"train_batch_size": 128, "per_device_parallelism": 4},
]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", SCHEDULES, ids=str)
def test_levanter_refuses_the_batches_that_are_errors(trainer, monkeypatch):
    """Its trainer, and then its data loader, on 64 devices."""

    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-128", "--workload.kind=train", "--workload.position=512"]
    result = lint_trainer({"mp": "p=f32,c=bf16", **trainer}, target_of(config.parse_config(argv)))
    monkeypatch.setattr("jax.device_count", lambda: 64)
    levanter = draccus.decode(TrainerConfig, trainer)
    levanter.__dict__["num_slices"] = 1
    shards = levanter.data_axis_size
    loader = SimpleNamespace(_data_axis_size=shards, scheduler=BatchSchedule(levanter.train_batch_size))
    try:
        levanter._validate_and_set_defaults()
        if not levanter.allow_nondivisible_batch_size:
            DataLoader._check_batch_size_divisibility(loader)
        is_refused = False
    except ValueError:
        is_refused = True
    assert shards == 64 and is_refused == bool([each for each in result.errors if each.kind == "batch"])


@pytest.mark.slow
def test_schedule_that_levanter_refuses():
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v5p-128", "--workload.kind=train"]
    target = target_of(config.parse_config(argv))
    trainer = {"per_device_parallelism": 4, "train_batch_size": schedule_of(128, 1024)}
    finding = only(lint_trainer(trainer, target).findings, "batch")
    assert finding.where[:2] == ("trainer.train_batch_size", "trainer.per_device_parallelism")
    assert finding.text == (
        "the 128 sequences from step 0 on are not divisible by 256 (per_device_parallelism 4 x 64 batch shards), and "
        "Levanter stops before the first step"
    )
    assert finding.remedy == "use multiples of 256 (256), or a smaller per_device_parallelism"
    unsorted = {"train_batch_size": [{"start": 10, "value": 64}, {"start": 5, "value": 128}]}
    finding = only(lint_trainer(unsorted, target).findings, "batch")
    assert (finding.severity, finding.remedy) == ("warning", "sort the stages, and start the first one at step 0")


def test_an_evaluation_has_the_batch_that_the_file_gives_per_device():
    """eval_lm takes per_device_eval_parallelism, or else per_device_parallelism, on each of 8 batch shards."""
    assert lint_8b("{train_batch_size: 64, per_device_eval_parallelism: 3}").subject.workload.batch == 24
    assert lint_8b("{train_batch_size: 64, per_device_parallelism: 2}").subject.workload.batch == 16
    assert lint_8b("{train_batch_size: 64}").subject.workload.batch == 64
