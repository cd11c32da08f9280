"""Orbax restores what was written for it, and folders that hold something else, or a part, are refused or named."""

import json
import math

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import fails, run
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.checkpoint import load_checkpoint
from orbax.checkpoint.experimental import v1
from safetensors.numpy import load_file

from shardplan import Plan, load_pretrained, save_orbax
from shardplan.checkpoint import convert
from shardplan.checkpoint.saving import save_orbax as module_of_save
from shardplan.checkpoint.saving.save import save_levanter
from shardplan.checkpoint.saving.target import INCOMPLETE
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model

LAYER = ("segments", "0", "stacked", "layers", "0")
ARGUMENTS = ("--hardware.slice=cpu-8", "--workload.batch=8", "--workload.position=64", "--format=orbax")


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("replica", "data", "model"))


def tensors(folder) -> dict[str, np.ndarray]:
    """Read all tensors of a folder with the official library."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def restored(items):
    """Restore the arrays of an item as numpy arrays: key.key.key -> array."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = ocp.PyTreeCheckpointHandler().metadata(items)
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
        tree = checkpointer.restore(items, restore_args=arguments)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): array
        for path, array in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_a_mixture_of_experts_in_bfloat16(golden, tmp_path):
    """Experts are stacked by layer and expert, and the router keeps the float32 of the source."""
    done = run("checkpoint", "convert", f"--model={golden / 'mixtral'}", *ARGUMENTS, f"--to={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert f"written to {tmp_path / 'out'}: orbax, bfloat16" in done.stderr
    source = tensors(golden / "mixtral")
    arrays = restored(tmp_path / "out" / "0" / "items")
    prefix = ".".join(("params", "params", *LAYER, "mlp"))
    block = "model.layers.{}.block_sparse_moe"
    router = np.stack([source[f"{block.format(i)}.gate.weight"] for i in range(2)])
    assert arrays[f"{prefix}.router.weight"].dtype == np.float32
    np.testing.assert_array_equal(arrays[f"{prefix}.router.weight"], router)
    for name, tensor in {"gate": "w1", "down": "w2", "up": "w3"}.items():
        stacked = [[source[f"{block.format(i)}.experts.{e}.{tensor}.weight"].T for e in range(4)] for i in range(2)]
        expected = np.array(stacked).astype(jax.numpy.bfloat16)
        np.testing.assert_array_equal(arrays[f"{prefix}.experts.{name}"], expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("mixtral", "bfloat16")
    plan = Plan.load(str(tmp_path / "out" / "plan.json"))
    paths = {"params.params." + parameter.path.replace("[", ".").replace("]", "") for parameter in plan.parameters}
    assert paths == {*arrays} and not (tmp_path / "out" / INCOMPLETE).exists()
    again = run("checkpoint", "convert", f"--model={golden / 'mixtral'}", *ARGUMENTS, f"--to={tmp_path / 'out'}")
    fails(again, 2, f"{tmp_path / 'out'} holds config.json already; name another folder, or remove it")


def test_as_maxtext_reads_parameters(golden, tmp_path):
    """By the handler of `.../0/items` with a part of the tree as target, and by version 1 of Orbax from the step."""
    with jax.set_mesh(mesh_of(2, 2, 2)):
        model = load_pretrained(golden / "llama", axis_mapping={"embed": "data", "mlp": "model"})
        save_orbax(model, str(tmp_path), {})
    expected = np.asarray(dict(named_leaves(model))["transformer.norm.weight"].array)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec("x"))
    weight = jax.ShapeDtypeStruct(expected.shape, expected.dtype, sharding=sharding)
    target = {"params": {"transformer": {"norm": {"weight": weight}}}}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        arguments = {"params": ocp.checkpoint_utils.construct_restore_args(target)}
        by_handler = checkpointer.restore(
            tmp_path / "0" / "items", item={"params": target}, transforms={}, restore_args=arguments
        )
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 0
    context = v1.Context()
    context.pytree_options.loading.partial_load = True
    with context:
        by_version_1 = v1.load_checkpointables(tmp_path / "0", {"items": {"params": target}})["items"]
    for tree in (by_handler, by_version_1):
        weight = tree["params"]["params"]["transformer"]["norm"]["weight"]
        assert weight.sharding == sharding
        np.testing.assert_array_equal(np.asarray(weight), expected)


def test_a_model_of_levanters_checkpoint(golden, tmp_path):
    """A model that Levanter has opened from its own checkpoint is written with the names of its class."""
    config = read_config(str(golden / "llama" / "config.json"), None, LEVANTER)
    with jax.set_mesh(mesh_of(1, 2, 2)):
        save_levanter(load_pretrained(golden / "llama"), str(tmp_path / "levanter"), {})
    with jax.set_mesh(mesh_of(2, 2, 2)):
        template = build_model(config, 64).template
        mapping = {"embed": "data", "vocab": "model"}
        trained = load_checkpoint(template, str(tmp_path / "levanter"), subpath="model", axis_mapping=mapping)
        save_orbax(trained, str(tmp_path / "orbax"), {"model_type": "llama"})
    arrays = restored(tmp_path / "orbax" / "0" / "items")
    source = tensors(golden / "llama")
    for name in ("mlp.down_proj", "input_layernorm"):
        stacked = np.stack([source[f"model.layers.{i}.{name}.weight"] for i in range(2)])
        np.testing.assert_array_equal(arrays[f"params.params.transformer.layers.stacked.{name}.weight"], stacked)
    assert not (tmp_path / "orbax" / "plan.json").exists()


@pytest.mark.parametrize("mark", [None, '{"run": "of hf", "files": ["config.json", "model.safetensors"]}'])
@pytest.mark.parametrize("name", ["0/_CHECKPOINT_METADATA", "0/default/manifest.ocdbt", "plan.json"])
def test_a_folder_with_a_step_or_a_plan_is_refused(golden, tmp_path, monkeypatch, name, mark):
    """Before the load, also beside an interrupted run's files: what is marked as this run's, the next would remove."""
    monkeypatch.setattr(convert, "prepare", None)  # a load would fail
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    if mark:
        (tmp_path / INCOMPLETE).write_text(mark)
    done = run("checkpoint", "convert", f"--model={golden / 'llama'}", *ARGUMENTS, f"--to={tmp_path}")
    fails(done, 2, f"{tmp_path} holds {name.partition('/')[0]} already; name another folder, or remove it")
    assert file.read_text() == "mine"
    assert not mark or (tmp_path / INCOMPLETE).read_text() == mark


@pytest.mark.quick
def test_targets_that_cannot_be_written_to(golden, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "prepare", None)
    arguments = [f"--model={golden / 'llama'}", *ARGUMENTS]
    (tmp_path / "file").write_text("")
    done = run("checkpoint", "convert", *arguments, f"--to={tmp_path / 'file' / 'below'}")
    fails(done, 2, f"{tmp_path / 'file' / 'below'} cannot be written to: {tmp_path / 'file'} is a file, not a folder")
    done = run("checkpoint", "convert", *arguments, "--to=s3://bucket/folder")
    supported = "checkpoints in the format orbax are written to local folders and gs://, not s3://"
    fails(done, 2, f"s3://bucket/folder: {supported}; name a folder there, and copy it")


def test_an_interrupted_export_is_no_checkpoint(golden, tmp_path, monkeypatch):
    """Neither for Orbax nor for shardplan; the next run removes it, and what is not its own stays."""
    (tmp_path / "notes.txt").write_text("mine")

    def interrupt(*_):
        raise KeyboardInterrupt

    with jax.set_mesh(mesh_of(1, 1, 2)):
        model = load_pretrained(golden / "gpt2")
        with monkeypatch.context() as patch:
            patch.setattr(ocp.CompositeCheckpointHandler, "finalize", interrupt)
            with pytest.raises(KeyboardInterrupt):
                save_orbax(model, str(tmp_path), {})
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"notes.txt", "config.json", "0.orbax-checkpoint-tmp", INCOMPLETE}
        with ocp.CheckpointManager(tmp_path) as manager:
            assert manager.latest_step() is None
        (tmp_path / "0.orbax-checkpoint-tmp" / "other").write_text("of the first run")
        save_orbax(model, str(tmp_path), {})
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "config.json", "0"}
    assert not (tmp_path / "0" / "other").exists()


def test_a_full_disk_is_one_line(golden, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "save", fail)
    with jax.set_mesh(mesh_of(1, 1, 2)), pytest.raises(ConfigError) as error:
        save_orbax(load_pretrained(golden / "gpt2"), str(tmp_path), {})
    assert str(error.value) == f"{tmp_path} cannot be written to: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda array: array.astype("float16"), r"is \(.*'float16'\), and was written as \(.*'float32'\); write it ag"),
        (lambda array: None if array.ndim == 2 else array, r"items has no array params\.params\..*; write it again"),
    ],
)
def test_it_is_read_back(golden, tmp_path, monkeypatch, change, message):
    write = module_of_save._write_step
    monkeypatch.setattr(module_of_save, "_write_step", lambda folder, tree: write(folder, jax.tree.map(change, tree)))
    with jax.set_mesh(mesh_of(1, 2, 2)), pytest.raises(CheckpointError, match=message):
        save_orbax(load_pretrained(golden / "gpt2"), str(tmp_path), {})
    assert (tmp_path / INCOMPLETE).exists()
