"""LoRA adapters: every weight equals a merge by NumPy, rounded once, and logits are those of the merged model."""

import json
import math
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from adapted_llama import ALL, BASE, CONFIG, FOLDER, GOLDEN, HALF, LAYERS, STORED, TARGETS, assert_merged, load
from coded_checkpoints import MemoryFile, write_stored
from levanter.adaptor import lora
from lora_adapters import PREFIX, matrices, merge, write_adapter
from safetensors.numpy import save_file
from test_logits import MESHES, deviation

from shardplan.checkpoint.adapter.adapted_tensor import adapt_tensor
from shardplan.checkpoint.adapter.adapter import read_adapter
from shardplan.checkpoint.adapter.factors import Factors, MatrixCache
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.load import stream_checkpoint
from shardplan.checkpoint.mapping.views import tensor_view
from shardplan.checkpoint.transfer.reads.reading import ReadTarget, plan_reads, run_read
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import build_model
from shardplan.runtime.devices import arrange
from shardplan.storage import open_adapter, open_folder


@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=[pytest.mark.whole] if i else []) for i, mesh in
                                  enumerate(MESHES)])  # fmt: skip
def test_logits_equal_those_of_the_merged_model(make_config, mesh):
    error = 2 * float(np.load(GOLDEN / "golden.npz")["own_error"]) + 1e-6
    assert deviation(FOLDER, make_config, "llama_lora", mesh, model_adapter=GOLDEN / "adapter") <= error


def test_the_golden_adapter_changes_logits(make_config):
    """Or else the test above would pass without it."""
    assert deviation(FOLDER, make_config, "llama_lora", MESHES[0]) > 0.1


DOWN_0, DOWN_1 = (f"model.layers.{i}.mlp.down_proj" for i in LAYERS)


def renamed(tensors):
    """As a version of PEFT that kept the adapter's name."""
    return {name.replace(".weight", ".default.weight"): each for name, each in tensors.items()}


@pytest.mark.parametrize(
    ("tensors", "scaling", "config"),
    [
        (STORED, lambda module: 2, {"target_modules": ["q_proj", "v_proj"]}),
        (matrices(ALL), lambda module: 2, {"target_modules": TARGETS}),
        (matrices(ALL), lambda module: 2, {"target_modules": "all-linear"}),
        (
            matrices(HALF),
            lambda module: 8 / math.sqrt(4),
            {"use_rslora": True, "target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.(q_proj|down_proj)"},
        ),
        (
            matrices({module: (*shape, {DOWN_0: 2, DOWN_1: 8}.get(module, 4)) for module, shape in HALF.items()}),
            lambda module: {DOWN_0: 3 / 2, DOWN_1: 3 / 8}.get(module, 2),
            {
                "target_modules": ["q_proj", "down_proj"],
                "rank_pattern": {"^model.layers.0.mlp.down_proj": 2, r"layers\.1.mlp.down_proj": 8, "down_proj": 5},
                "alpha_pattern": {"down_proj": 3.0, "proj": 100},
            },
        ),
        (
            matrices({name: shape for name, shape in HALF.items() if ".1." in name}),
            lambda module: 2,
            {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        ),
        (
            matrices({name: shape for name, shape in HALF.items() if "down" in name}),
            lambda module: 2,
            {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["self_attn.q_proj"]},
        ),
        (renamed(matrices(ALL)), lambda module: 2, {"target_modules": TARGETS}),
        (
            {name.removeprefix(PREFIX): each for name, each in matrices(ALL).items()},
            lambda module: 2,
            {"target_modules": TARGETS},
        ),
        (matrices({"lm_head": (72, 32)}), lambda module: 2, {"target_modules": ["lm_head"]}),
    ],
    ids=["golden", "all", "all-linear", "rslora", "patterns", "layers", "excluded", "default", "no prefix", "head"],
)  # fmt: skip
def test_every_weight_is_that_of_a_merge(tmp_path, tensors, scaling, config):
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    plain = {name.replace(".default", ""): each for name, each in tensors.items()}
    assert_merged(tmp_path, GOLDEN, adapter, merge(BASE, plain, scaling), CONFIG)


def test_names_with_the_prefix_of_a_wrapper(tmp_path):
    """The checkpoint and the adapter may have different ones."""
    wrapped = write_stored(tmp_path / "wrapped", {}, CONFIG)
    save_file({f"_orig_mod.{name}": each for name, each in BASE.items()}, wrapped / "model.safetensors")
    tensors = {name.replace(PREFIX, f"{PREFIX}language_model."): each for name, each in STORED.items()}
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules=["q_proj", "v_proj"])
    for path, values in load(GOLDEN, GOLDEN / "adapter").items():
        np.testing.assert_array_equal(load(wrapped, adapter)[path], values, err_msg=path)


def test_an_adapter_in_several_files(tmp_path):
    """With an index, as transformers writes large ones; and in half precision."""
    half = {name: each.astype(ml_dtypes.bfloat16) for name, each in matrices(ALL).items()}
    whole = write_adapter(tmp_path / "whole", half, target_modules=TARGETS)
    folder, names = tmp_path / "parts", sorted(half)
    folder.mkdir()
    shutil.copy(whole / "adapter_config.json", folder)
    files = {name: f"adapter_model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in {*files.values()}:
        save_file({name: half[name] for name in names if files[name] == file}, folder / file)
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    expected = load(GOLDEN, whole)
    for path, values in load(GOLDEN, folder).items():
        np.testing.assert_array_equal(values, expected[path], err_msg=path)


@pytest.mark.quick
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_matrix_in_pieces(is_transposed):
    """As it is read: transposed, in parts, in every second column, and over the ends of rows."""
    random = np.random.default_rng(3)
    base, a, b = (random.normal(size=shape).astype(np.float32) for shape in ((16, 24), (3, 24), (16, 3)))
    if is_transposed:
        a, b = b.T.copy(), a.T.copy()
    expected = base + 0.75 * ((b.astype(np.float64) @ a).T if is_transposed else b.astype(np.float64) @ a)
    memory = MemoryFile(base.tobytes() + a.tobytes() + b.tobytes())
    stored = [
        Tensor(memory, start, each.shape, each.dtype)
        for start, each in ((0, base), (base.nbytes, a), (base.nbytes + a.nbytes, b))
    ]
    factors = Factors("w", *stored[1:], "a", "b", 0.75, is_transposed, MatrixCache(0))
    assert factors.shape == (16, 24)
    view = tensor_view("w", (16, 24))
    for changed, values in (
        (view, expected),
        (view.transpose((1, 0)), expected.T),
        (view.slice((3, 5), (14, 23)), expected[3:14, 5:23]),
        (view.reshape((2, 8, 3, 8)).transpose((2, 0, 3, 1)), expected.reshape(2, 8, 3, 8).transpose(2, 0, 3, 1)),
        (view.reshape((384,)).slice((100,), (300,)), expected.reshape(384)[100:300]),
        (view.reshape((16, 12, 2)).slice((0, 0, 1), (16, 12, 2)), expected.reshape(16, 12, 2)[:, :, 1:]),
        (view.scale(0.5), expected / 2),
    ):
        target = ReadTarget((0,) * len(changed.shape), np.zeros(changed.shape, np.float32))
        for read_ in plan_reads(changed, {"w": adapt_tensor(stored[0], factors, None)}, [target], 200):
            run_read(read_)
        np.testing.assert_array_equal(target.buffer, values.astype(np.float32))


@pytest.mark.quick
@pytest.mark.parametrize(("limit", "reads"), [(0, 4), (1500, 4), (10_000, 2)])
def test_matrices_are_kept_up_to_a_number_of_bytes(monkeypatch, limit, reads):
    """Those of two weights, 1024 bytes each, are used in turn."""
    read, names = Factors.read, []
    monkeypatch.setattr(Factors, "read", lambda factors: names.append(factors.name) or read(factors))
    adapter = read_adapter(open_folder(str(GOLDEN / "adapter")), limit)
    two = [(name, pair) for name, pair in adapter.pairs.items() if "q_proj" in name]
    factors = [Factors(name, pair.a, pair.b, "a", "b", 2.0, False, adapter.cache) for name, pair in two]
    for each in factors * 2:
        assert each.matrices().nbytes == 1024
    assert len(names) == reads


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_of_levanter(golden, tmp_path, name):
    """What Levanter's LoRA has saved makes the weights that Levanter's own merge makes."""
    opened = open_folder(str(golden / name))
    template = build_model(read_config(None, opened, "levanter"), 8).template
    mesh = arrange(jax.devices(), parse_slice("cpu-8"), {"replica": 1, "data": 2, "model": 4})
    base, _ = stream_checkpoint(template, opened, mesh, {}, "float32")
    settings = lora.LoraConfig(r=4, alpha=6.0, a_init_mode="random", exclude_modules=["lm_head"])
    with jax.set_mesh(mesh):
        adapted = lora.loraize(base, settings, jax.random.PRNGKey(0))
        lora.save_peft_pretrained(adapted, settings, None, str(tmp_path / "adapter"))
        merged = lora.merge_lora_modules(adapted)
    loaded, _ = stream_checkpoint(
        template, opened, mesh, {}, "float32", adapter=open_adapter(str(tmp_path / "adapter"))
    )
    changed = 0
    before = {path: np.asarray(leaf.array) for path, leaf in named_leaves(base)}
    expected = {path: np.asarray(leaf.array) for path, leaf in named_leaves(merged)}
    for path, leaf in named_leaves(loaded):
        np.testing.assert_allclose(np.asarray(leaf.array), expected[path], atol=2e-6, err_msg=path)
        changed += not np.array_equal(expected[path], before[path])
    assert changed >= 4
