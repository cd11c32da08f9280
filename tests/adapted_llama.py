"""The golden Llama with LoRA adapters: loaded, and compared with a merge by NumPy."""

import json
from pathlib import Path

import jax
import numpy as np
from coded_checkpoints import write_stored
from lora_adapters import PREFIX, read_folder, write_adapter
from safetensors.numpy import save_file

from shardplan import load_pretrained
from shardplan.checkpoint.load import stream_checkpoint
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import build_model
from shardplan.runtime.devices import arrange
from shardplan.storage import open_adapter, open_folder

FOLDER = Path(__file__).parent / "golden" / "families"
GOLDEN = FOLDER / "llama_lora"
BASE = read_folder(GOLDEN)
CONFIG = json.loads((GOLDEN / "config.json").read_text())
STORED = read_folder(GOLDEN / "adapter")
QV = {"target_modules": ["q_proj", "v_proj"]}
MAPPING = {"embed": ["model"], "mlp": ["data"], "vocab": ["data"]}
"""Shards inner dimensions, so that devices read rows in parts."""


def load(folder, adapter=None, dtype="float32", mapping=None, model_class=None):
    """Load a checkpoint with an adapter: array path -> array."""
    opened = open_folder(str(folder))
    template = build_model(read_config(None, opened, model_class), 8).template
    mesh = arrange(jax.devices(), parse_slice("cpu-8"), {"replica": 1, "data": 2, "model": 4})
    path = None if adapter is None else str(adapter)
    model, _ = stream_checkpoint(template, opened, mesh, mapping, dtype, adapter=open_adapter(path))
    return {path: np.asarray(leaf.array) for path, leaf in named_leaves(model)}


def assert_merged(tmp_path, folder, adapter, expected, config, model_class=None):
    """Compare a checkpoint with an adapter with the float64 numbers that it must have.

    In float32 they are rounded once; in bfloat16, once more.
    """
    merged = write_stored(tmp_path / "merged", {}, config)
    save_file({name: each.astype(np.float32) for name, each in expected.items()}, merged / "model.safetensors")
    exact = load(merged, model_class=model_class)
    for mapping in (None, MAPPING):
        found = load(folder, adapter, mapping=mapping, model_class=model_class)
        assert found.keys() == exact.keys()
        for path, values in exact.items():
            np.testing.assert_array_max_ulp(found[path], values, 1)
    rounded = load(folder, adapter, "bfloat16", model_class=model_class)
    for path, values in exact.items():
        half = np.ldexp(1.0, np.frexp(values)[1] - 9)  # half of a unit in the last place of bfloat16
        error = np.abs(rounded[path].astype(np.float64) - values.astype(np.float64))
        assert (error <= half * (1 + 2e-5)).all(), path


LAYERS = range(2)
PROJECTIONS = {
    "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48),
}  # fmt: skip
TARGETS = [name.partition(".")[2] for name in PROJECTIONS]
ALL = {f"model.layers.{i}.{name}": shape for i in LAYERS for name, shape in PROJECTIONS.items()}
HALF = {name: shape for name, shape in ALL.items() if name.endswith(("q_proj", "down_proj"))}


def embedding_matrices(vocab, embed, name="model.embed_tokens"):
    random = np.random.default_rng(2)
    a, b = random.normal(size=(4, vocab)), random.normal(size=(embed, 4))
    parts = {"A": a.astype(np.float32), "B": b.astype(np.float32)}
    return {f"{PREFIX}{name}.lora_embedding_{part}": each for part, each in parts.items()}


def tied(tmp_path, golden, tensors, **config):
    """Return the arrays of a tied Llama with an adapter."""
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    with jax.set_mesh(arrange(jax.devices(), parse_slice("cpu-8"), {"replica": 1, "data": 2, "model": 4})):
        model = load_pretrained(str(golden / "llama31"), adapter=str(adapter), dtype="float32")
    return {path: np.asarray(leaf.array) for path, leaf in named_leaves(model)}


EMBEDDING = "model.embed_tokens.weight"
