"""Whatever its config.json says, a model has the logits of transformers: keys that count, keys that are ignored."""

import json
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from shardplan.checkpoint.load import stream_checkpoint
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import build_model
from shardplan.steps.forward import cast_for_compute, compute_activations, compute_logits
from shardplan.storage import open_folder

GOLDEN = Path(__file__).parent
VARIANTS = json.loads((GOLDEN / "config_variants.json").read_text())
REFERENCE = np.load(GOLDEN / "config_variants.npz")
TOLERANCE = 2e-5


def compute_reference_logits(hf_config, folder, tokens):
    """float32[position, vocab] logits of one sequence, unsharded."""
    model = build_model(hf_config, len(tokens))
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with hax.partitioning.set_mesh(mesh):
        module, _ = stream_checkpoint(model.template, folder, mesh, {}, "float32")
        named = hax.named(tokens[None], ("batch", "position"))

        @hax.named_jit
        def forward(module, tokens):
            return compute_logits(model, module, compute_activations(model, module, tokens))

        logits = forward(cast_for_compute(module, "float32"), named)
    return np.asarray(logits.rearrange(("batch", "position", "vocab")).array)[0]


@pytest.mark.parametrize("name", VARIANTS)  # transformers 4 does not read num_experts of a Mixtral
def test_logits_equal_transformers(golden, tmp_path, name):
    folder = golden / VARIANTS[name]["checkpoint"]
    values = {**json.loads((folder / "config.json").read_text()), **VARIANTS[name]["changes"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))
    tokens = np.load(folder / "golden.npz")["tokens"][0]
    logits = compute_reference_logits(read_config(str(path), None), open_folder(str(folder)), tokens)
    assert np.abs(logits[REFERENCE["positions"]] - REFERENCE[name]).max() <= TOLERANCE


def test_text_part_of_a_model_of_images_and_text(golden, tmp_path, caplog):
    """The text model within it is read alone, and has the same logits as by itself; one line says so."""
    folder, path = golden / "mistral", tmp_path / "config.json"
    text = {
        key: value for key, value in json.loads((folder / "config.json").read_text()).items() if key != "model_type"
    }
    vision = {"model_type": "pixtral", "hidden_size": 7, "num_experts": 8}
    path.write_text(json.dumps({"model_type": "mistral3", "text_config": text, "vision_config": vision}))
    reference = np.load(folder / "golden.npz")
    hf_config = read_config(str(path), None)
    assert hf_config["model_type"] == "mistral"
    logits = compute_reference_logits(hf_config, open_folder(str(folder)), reference["tokens"][0])
    assert np.abs(logits - reference["logits"][0]).max() <= TOLERANCE
    read_config(str(path), None)
    said = f"{path} is that of a mistral3, a model of images and text; its text_config is read, a mistral"
    assert [record.message for record in caplog.records if record.name.startswith("shardplan")] == [said]


def read_golden(folder):
    """Return the tensors and the config.json of a golden checkpoint."""
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    return tensors, json.loads((folder / "config.json").read_text())


def assert_golden_logits(golden_folder, folder, tensors, config):
    """Check that a checkpoint with these tensors has the logits that transformers has for the golden one."""
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    reference = np.load(golden_folder / "golden.npz")
    opened = open_folder(str(folder))
    logits = compute_reference_logits(read_config(None, opened), opened, reference["tokens"][0])
    assert np.abs(logits - reference["logits"][0]).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["mistral", "mixtral", "qwen2"])
def test_heads_of_another_size_than_hidden_size_over_heads(golden, tmp_path, name):
    """As in Mistral Nemo; a group of heads that the output projection ignores changes no logits."""
    tensors, config = read_golden(golden / name)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["hidden_size"] // heads
    more = {"q_proj": heads // groups * head_dim, "k_proj": head_dim, "v_proj": head_dim}
    random = np.random.default_rng(0)
    for tensor, value in tensors.items():
        projection = tensor.split(".")[-2]
        if projection in more:
            added = random.standard_normal((more[projection], *value.shape[1:]), np.float32)
            tensors[tensor] = np.concatenate([value, added])
        elif projection == "o_proj":
            tensors[tensor] = np.pad(value, [(0, 0), (0, more["q_proj"])])
    changes = {"num_attention_heads": heads + heads // groups, "num_key_value_heads": groups + 1, "head_dim": head_dim}
    assert_golden_logits(golden / name, tmp_path, tensors, {**config, **changes})


def test_a_tied_mistral(golden, tmp_path):
    """It has one array for embedding and output head, and without a window it is a tied Llama."""
    tensors, config = read_golden(golden / "llama31")
    assert config["tie_word_embeddings"] and "lm_head.weight" not in tensors
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert_golden_logits(golden / "llama31", tmp_path, tensors, config)
