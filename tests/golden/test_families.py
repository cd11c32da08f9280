"""Families of the decoder have the logits of transformers with any planned sharding, and are saved alike."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from types import ModuleType

import haliax as hax
import jax
import numpy as np
import pytest
from conftest import run
from decoder_families import (
    BUFFERS,
    CONSTANTS,
    FAMILIES,
    FOLDER,
    ON_ONE_DEVICE,
    config_of,
    saved_tensors,
    text_tensors,
    tolerance,
)
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file, save_file
from test_logits import MESHES, SHARDED_POSITIONS, TOLERANCE, deviation

from shardplan import load_pretrained
from shardplan.checkpoint.format.index import read_tensor_index
from shardplan.checkpoint.load import stream_checkpoint
from shardplan.checkpoint.mapping.state_dict_program import expected_tensors
from shardplan.checkpoint.match import match_checkpoint
from shardplan.checkpoint.saving.save import save_pretrained
from shardplan.decoder import families
from shardplan.decoder.config import DecoderConfig
from shardplan.decoder.model import Decoder
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import abstract_module
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.storage import open_folder

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "add-a-family.md"
QUICKLY_SAVED = ("apertus", "cohere_plus", "glm", "gptj", "olmo3")
"""A family with constants, some whose halves of heads are moved, and one with segments of two layers."""
METHODS = itertools.cycle(
    [
        AttentionPlan("ring", 1, 4, "zigzag"), AttentionPlan("all_gather", 1, 4),
        AttentionPlan("hybrid", 2, 2, "zigzag"), AttentionPlan("ulysses", 4),
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[pytest.mark.whole] if (i + j) % 4 else [])
        for (i, name), (j, mesh) in itertools.product(enumerate(FAMILIES), enumerate(MESHES))
    ],
)
def test_logits_equal_transformers(make_config, name, mesh):
    assert deviation(FOLDER, make_config, name, mesh) <= tolerance(name)


@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(name, next(METHODS), marks=[pytest.mark.whole] if i % 3 else []) for i, name in enumerate(FAMILIES)],
    ids=str,
)
def test_logits_with_sharded_positions(make_config, name, method):
    """Attention is the project's own, for positions in any order."""
    changes = {"change_plan": SHARDED_POSITIONS, "attention": method}
    assert deviation(FOLDER, make_config, name, (1, 2, 4), **changes) <= tolerance(name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.whole] if i % 3 else [])
        for i, name in enumerate([*FAMILIES, *ON_ONE_DEVICE])
    ],
)
def test_levanter_reads_and_writes_its_tensors(name):
    """By the methods of Levanter's own converter; what transformers computes anew is left out."""
    stored, values = text_tensors(name), config_of(name)
    config = DecoderConfig.from_hf_config(values)
    model = config.build(hax.Axis("vocab", values["vocab_size"]), key=jax.random.PRNGKey(0)).from_state_dict(stored)
    written = model.to_state_dict()
    assert all(np.array_equal(stored[key], value) for key, value in written.items())
    assert written.keys() == saved_tensors(name).keys()
    if name in ON_ONE_DEVICE:  # the logits of all others are those of the tests above
        reference = np.load(FOLDER / name / "golden.npz")
        tokens = hax.named(reference["tokens"], ("batch", "position"))
        difference = model(tokens).rearrange((..., "vocab")).array - reference["logits_float64"]
        assert np.abs(difference).max() <= tolerance(name)


def assert_same_files(folder, name):
    """Names, shapes, types and bytes of all tensors are those of the checkpoint that was loaded."""
    saved, expected = load_file(folder / "model.safetensors"), saved_tensors(name)
    assert saved.keys() == expected.keys()
    for key, value in expected.items():
        assert (saved[key].dtype, saved[key].shape) == (value.dtype, value.shape), key
        assert saved[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[] if name in QUICKLY_SAVED and j == 1 else [pytest.mark.whole])
        for name, (j, mesh) in itertools.product([*FAMILIES, *ON_ONE_DEVICE], enumerate(MESHES))
    ],
)
def test_what_was_streamed_is_saved(tmp_path, name, mesh):
    """Shards are gathered to the bytes of the files, whichever axes of an array are sharded."""
    with jax.set_mesh(Mesh(np.array(jax.devices()).reshape(mesh), ("replica", "data", "model"))):
        model = load_pretrained(FOLDER / name)
        save_pretrained(model, str(tmp_path), config_of(name))
    assert_same_files(tmp_path, name)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "glm4" else [pytest.mark.whole]) for name in FAMILIES]
)
def test_what_is_converted_is_saved(tmp_path, name):
    """By the command, with a planned sharding; the configuration makes the same model."""
    positions = np.load(FOLDER / name / "golden.npz")["tokens"].shape[1]
    arguments = (f"--model={FOLDER / name}", "--hardware.slice=cpu-8", f"--workload.position={positions}")
    done = run("checkpoint", "convert", *arguments, "--workload.param_dtype=float32", f"--to={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert_same_files(tmp_path, name)
    saved = DecoderConfig.from_hf_config(read_config(None, open_folder(str(tmp_path))))
    expected = DecoderConfig.from_hf_config(config_of(name))
    assert dataclasses.replace(saved, hf_config=expected.hf_config) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_expected_tensors_are_those_of_the_released_files(name):
    """Names and shapes follow from the rules, without a trace."""
    values = config_of(name)
    template = abstract_module(DecoderConfig.from_hf_config(values), hax.Axis("vocab", values["vocab_size"]))
    stored = {key: tensor.shape for key, tensor in text_tensors(name).items() if "multi_modal_projector" not in key}
    expected = expected_tensors(template)
    left_out = {key for key in stored if key not in expected}
    assert all(key.endswith(BUFFERS + CONSTANTS) for key in left_out)
    assert expected == {key: shape for key, shape in stored.items() if key not in left_out}


def test_the_family_of_the_page_on_families(tmp_path, monkeypatch, golden, raises_message):
    """Its module, as the page has it, reads the golden Llama under the names of the page."""
    source = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lucid = ModuleType("lucid")
    exec(source[1], vars(lucid))
    monkeypatch.setitem(families.FAMILIES, "lucid", lucid.FAMILY)
    llama = json.loads((golden / "llama" / "config.json").read_text())
    unread = ("attention_bias", "mlp_bias", "rope_scaling")
    values = {key: value for key, value in llama.items() if key not in unread}
    values |= {"model_type": "lucid", "sliding_window": 256, "attention_multiplier": llama["head_dim"] ** -0.5}
    stored = {}
    for path in (golden / "llama").glob("*.safetensors"):
        stored |= load_file(path)
    for i in range(llama["num_hidden_layers"]):
        at = f"model.layers.{i}.self_attn"
        stored[f"{at}.qkv_proj.weight"] = np.concatenate([stored.pop(f"{at}.{each}_proj.weight") for each in "qkv"])
    save_file(stored, tmp_path / "model.safetensors")
    config = DecoderConfig.from_hf_config(values)
    template = abstract_module(config, hax.Axis("vocab", values["vocab_size"]))
    assert expected_tensors(template) == {key: value.shape for key, value in stored.items()}
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(AxisType.Auto,))
    model, _ = stream_checkpoint(template, open_folder(str(tmp_path)), mesh, {"kv_head": "model"}, "float32")
    reference = np.load(golden / "llama" / "golden.npz")
    with jax.set_mesh(mesh):
        logits = hax.named_jit(lambda model, tokens: model(tokens))(
            model, hax.named(reference["tokens"], ("batch", "position"))
        )
    assert np.abs(logits.rearrange((..., "vocab")).array - reference["logits"]).max() <= TOLERANCE
    with raises_message(ConfigError):
        DecoderConfig.from_hf_config({**values, "rope_interleaved": True})


@pytest.mark.parametrize("name", ["gpt_neox", "opt", "seed_oss"])
def test_a_checkpoint_saved_from_the_base_model(tmp_path, name, raises_message):
    """Its names lack the module around it; without an output head it is loaded only if the head is the embedding."""
    values = config_of(name)
    template = abstract_module(DecoderConfig.from_hf_config(values), hax.Axis("vocab", values["vocab_size"]))
    base = ("model.", "gpt_neox.")
    inner = {key.partition(".")[2] if key.startswith(base) else key: value for key, value in text_tensors(name).items()}
    save_file(inner, tmp_path / "model.safetensors")
    match_checkpoint(template, read_tensor_index(open_folder(str(tmp_path))), "ck")
    heads = inner.keys() & {"embed_out.weight", "lm_head.weight"}
    assert len(heads) == (name != "opt")
    for head in heads:
        del inner[head]
        save_file(inner, tmp_path / "model.safetensors")
        with raises_message(CheckpointError):
            match_checkpoint(template, read_tensor_index(open_folder(str(tmp_path))), "ck")


@pytest.mark.parametrize("name", ["gemma2", "mistral", "qwen2"])
def test_windows_are_loaded_into_the_decoder_without_a_plan(name):
    """Levanter's classes of these types have a window only in the mask that their caller gives."""
    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("data",))):
        assert isinstance(load_pretrained(str(FOLDER / name)), Decoder)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("deepseek_v3", r"56 x model.layers.3.*"), ("glm_moe_dsa", "3 x model.layers.N.self_attn.indexer.wk.weight")],
)
def test_tensors_that_the_decoder_does_without_are_named(caplog, name, kinds):
    """Of the prediction of further tokens, and of an indexer, which are in its layers."""
    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("data",))):
        load_pretrained(str(FOLDER / name))
    (message,) = [record.getMessage() for record in caplog.records if "has no use for" in record.getMessage()]
    assert re.search(rf"holds \d+ tensors that the model has no use for \(.*{kinds}.*\); ignored", message), message
