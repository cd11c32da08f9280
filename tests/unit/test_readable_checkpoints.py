"""Checkpoints of Levanter that are damaged, or not there, end a training with one line."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from levanter import checkpoint
from levanter.main import train_lm

from shardplan.errors import CheckpointError, ConfigError
from shardplan.train.readable_checkpoints import explain_unreadable
from shardplan.train.trainer import PlannedTrainer

TREE = {"weight": jnp.arange(200_000, dtype=jnp.float32)}
GOES_ON = "; remove this folder: the run goes on from the checkpoint before it, or begins anew if there is none"


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of `TREE`."""
    path = tmp_path / "checkpoints" / "step-3"
    checkpoint.save_checkpoint(TREE, step=3, checkpoint_path=str(path), is_temporary=False)
    return path


def data_file(folder):
    """The file with the array, which is the largest."""
    return max((folder / "d").iterdir(), key=lambda path: path.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "data cut off": lambda folder: cut(data_file(folder)),
    "data missing": lambda folder: data_file(folder).unlink(),
    "manifest cut off": lambda folder: cut(folder / "manifest.ocdbt"),
    "manifest missing": lambda folder: (folder / "manifest.ocdbt").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_arrays(saved, damage):
    damage(saved)
    with explain_unreadable((str(saved.parent),)), pytest.raises(CheckpointError) as raised:
        checkpoint.load_checkpoint(TREE, str(saved))
    text = str(raised.value)
    assert text.startswith(f"checkpoint {saved} cannot be read: ") and text.endswith(GOES_ON)
    assert "\n" not in text and "source locations" not in text


def test_the_remedy_for_a_checkpoint_of_another_run(saved):
    cut(saved / "manifest.ocdbt")
    with explain_unreadable((f"{saved.parent}-of-this-run",)), pytest.raises(CheckpointError) as raised:
        train_lm.load_checkpoint(TREE, str(saved))
    assert str(raised.value).endswith("; name another one")


def test_damaged_metadata(saved, raises_message):
    cut(saved / "metadata.json")
    with explain_unreadable((str(saved.parent),)), raises_message(CheckpointError):
        checkpoint.CheckpointerConfig(base_path=str(saved.parent), append_run_id_to_base_path=False).create("run")


def test_no_checkpoint(tmp_path, raises_message):
    with explain_unreadable(()), raises_message(ConfigError):
        train_lm.latest_checkpoint_path(str(tmp_path / "none"))


def test_a_start_from_no_checkpoint(tmp_path, raises_message):
    trainer = object.__new__(PlannedTrainer)
    start = str(tmp_path / "none")
    trainer.config = SimpleNamespace(
        id="run", load_checkpoint=False, initialize_from=start, checkpoint_search_paths=lambda run_id: []
    )
    with raises_message(ConfigError):
        trainer.checkpoint_load_plan()


def test_complete_checkpoints_are_loaded(saved):
    """The latest one; a folder without metadata, of a save that was interrupted, is no checkpoint."""
    (saved.parent / "step-4").mkdir()
    with explain_unreadable((str(saved.parent),)):
        loaded = train_lm.load_checkpoint(TREE, train_lm.latest_checkpoint_path(str(saved.parent)))
    assert (loaded["weight"] == TREE["weight"]).all()
    assert checkpoint.load_checkpoint is train_lm.load_checkpoint  # Levanter's own again
