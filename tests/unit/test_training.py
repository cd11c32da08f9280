"""The parts of a training that need no devices: synthetic data, Levanter's sections, what determines a run."""

import asyncio
import dataclasses
import math

import draccus
import numpy as np
import pytest
from levanter.main.train_lm import TrainLmConfig
from levanter.trainer import TrainerConfig

from shardplan.config import parse_config
from shardplan.config.command_flags import TrainCommand
from shardplan.config.levanter_keys import DECIDED, SECTIONS, VALUES, split_arguments
from shardplan.errors import ConfigError
from shardplan.monitoring.run_folder import RunFolder
from shardplan.synthetic_data import REGULAR, STATES, MarkovSequences, SyntheticComponent
from shardplan.train.determinants import TrainingFolder
from shardplan.train.levanter_file import nested_sections
from shardplan.train.prepare import unplanned_notes, with_planned_optimizer


def read(dataset, indices):
    return [each["input_ids"] for each in asyncio.run(dataset.get_batch(indices))]


def test_a_sequence_is_a_function_of_seed_and_index():
    first, again, other = (MarkovSequences(512, 64, seed, 0, 100) for seed in (0, 0, 1))
    rows = read(first, [3, 4, 99])
    assert all(np.array_equal(*pair) for pair in zip(rows, read(again, [3, 4, 99]), strict=True))
    assert not np.array_equal(rows[0], rows[1]) and not np.array_equal(rows[0], read(other, [3])[0])
    assert rows[0].dtype == np.int32 and rows[0].shape == (64,) and rows[0].max() < 256


def test_the_chain_is_one_cycle_with_the_stated_loss():
    dataset = MarkovSequences(32, 100_000, 0, 0, 1)
    [tokens] = read(dataset, [0])
    counts = np.zeros((32, 32))
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    successors = counts.argmax(1)
    token, seen = 0, set()
    while token not in seen:
        seen.add(token)
        token = int(successors[token])
    assert seen == {*range(32)}
    frequencies = counts / counts.sum(1, keepdims=True)
    entropy = -np.sum(counts / counts.sum() * np.log(np.where(frequencies, frequencies, 1)))
    assert entropy == pytest.approx(least_loss(32), rel=0.03)
    assert least_loss(STATES) == pytest.approx(0.88, abs=0.01)


def least_loss(states):
    """The loss of a model that knows the chain, in nats per token."""
    other = (1 - REGULAR) / states
    return -(REGULAR + other) * math.log(REGULAR + other) - (states - 1) * other * math.log(other)


def test_validation_has_other_sequences():
    component = SyntheticComponent(vocab_size=64, position=16, validation_sequences=4)
    train, validation = (component.datasets[split].as_sync_dataset() for split in ("train", "validation"))
    assert len(validation) == 4
    assert not np.array_equal(train[0].tokens, validation[0].tokens)
    assert draccus.decode(type(component).__mro__[2], draccus.encode(component)) == component


def test_levanters_keys_are_those_of_its_program():
    fields = {field.name for field in dataclasses.fields(TrainLmConfig)}
    decided = {name for name in DECIDED if "." not in name}
    assert {*SECTIONS, *VALUES} | decided == fields - {"model"} and not {*SECTIONS, *VALUES} & decided
    trainer = {field.name for field in dataclasses.fields(TrainerConfig)}
    assert {name.split(".")[1] for name in DECIDED if "." in name} <= trainer


def test_levanters_arguments():
    values, others = split_arguments(["--optimizer.learning_rate=1e-3", "--hf_upload", "a/b", "--output", "x"])
    assert values == {"optimizer.learning_rate": "1e-3", "hf_upload": "a/b"}  # which Levanter's parser converts
    assert others == ["--output", "x"]
    assert nested_sections({"trainer.tracker.type": "noop", "trainer.id": "x"}) == {
        "trainer": {"tracker": {"type": "noop"}, "id": "x"}
    }


def train_config(*argv):
    return parse_config(["--config", "configs/tiny-train.yaml", *argv], TrainCommand)


def test_later_files_and_arguments_win(tmp_path, monkeypatch):
    path = tmp_path / "more.yaml"
    path.write_text("workload: {batch: 48}\ntrainer: {num_train_steps: 9, seed: 3}\n")
    config = train_config("--config", str(path), "--trainer.seed=4")
    assert config.workload.batch == 48 and config.levanter["trainer.num_train_steps"] == 9
    assert config.levanter["trainer.seed"] == 4 and config.levanter["trainer.steps_per_eval"] == 25


@pytest.mark.parametrize(
    ("argv", "optimizer", "notes"),
    [
        ((), "adamw", 0),
        (("--optimizer.type=lion",), "lion", 0),
        (("--trainer.model_averaging.type=ema",), "adamw+ema", 0),
        (("--optimizer.type=muon",), "adamw", 1),
        (("--adapter.type=lora",), "adamw", 1),
    ],
)
def test_what_a_plan_knows_of_the_optimizer(argv, optimizer, notes):
    config = with_planned_optimizer(train_config(*argv))
    assert config.workload.optimizer == optimizer and len(unplanned_notes(config)) == notes


def test_an_output_folder_belongs_to_one_training(tmp_path, raises_message):
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "plan.json").write_text("{}")  # of a dry run
    TrainingFolder(str(folder)).claim({"batch": 8, "data": "synthetic"})
    TrainingFolder(str(folder)).claim({"batch": 8, "data": "synthetic"})
    with raises_message(ConfigError):
        TrainingFolder(str(folder)).claim({"batch": 16, "data": "synthetic"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "plan.json").write_text("{}")
    with raises_message(ConfigError):
        RunFolder(str(tmp_path / "other")).claim({})
