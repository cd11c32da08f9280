"""LoRA adapters: every weight equals a merge by NumPy, rounded once, and logits are those of the merged model."""

import itertools
import json
import math
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from coded_checkpoints import MemoryFile, dequantized, numbers_of, quantized, read_stored, write_stored
from conftest import run
from levanter.adaptor import lora
from lora_adapters import PREFIX, matrices, merge, read_folder, write_adapter
from safetensors.numpy import save_file
from test_logits import MESHES, deviation

from shardplan import load_pretrained
from shardplan.checkpoint.adapter.adapted_tensor import adapt_tensor
from shardplan.checkpoint.adapter.adapter import read_adapter
from shardplan.checkpoint.adapter.factors import Factors, MatrixCache
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.load import stream_checkpoint
from shardplan.checkpoint.mapping.views import tensor_view
from shardplan.checkpoint.transfer.reading import ReadTarget, plan_reads, run_read
from shardplan.errors import CheckpointError, ConfigError
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import build_model
from shardplan.runtime.devices import arrange
from shardplan.storage import open_adapter, open_folder

FOLDER = Path(__file__).with_name("families")
GOLDEN = FOLDER / "llama_lora"
BASE = read_folder(GOLDEN)
CONFIG = json.loads((GOLDEN / "config.json").read_text())
STORED = read_folder(GOLDEN / "adapter")
QV = {"target_modules": ["q_proj", "v_proj"]}
MAPPING = {"embed": ["model"], "mlp": ["data"], "vocab": ["data"]}
"""Shards inner dimensions, so that devices read rows in parts."""


@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=[pytest.mark.whole] if i else []) for i, mesh in
                                  enumerate(MESHES)])  # fmt: skip
def test_logits_equal_those_of_the_merged_model(make_config, mesh):
    error = 2 * float(np.load(GOLDEN / "golden.npz")["own_error"]) + 1e-6
    assert deviation(FOLDER, make_config, "llama_lora", mesh, model_adapter=GOLDEN / "adapter") <= error


def test_the_golden_adapter_changes_logits(make_config):
    """Or else the test above would pass without it."""
    assert deviation(FOLDER, make_config, "llama_lora", MESHES[0]) > 0.1


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


@pytest.mark.parametrize("is_old", [False, True])
def test_parameters_that_were_saved_whole(tmp_path, is_old):
    """An embedding, a head and norms, beside matrices, also as older versions of PEFT name them."""
    random = np.random.default_rng(1)
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    saved = {name: random.normal(size=BASE[name].shape).astype(np.float32) for name in names}
    middle = ".modules_to_save.default.weight" if is_old else ".weight"
    tensors = {PREFIX + name.replace(".weight", middle): each for name, each in saved.items()}
    listed = ["lm_head", "embed_tokens", "model.norm"]
    own = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": listed}
    adapter = write_adapter(tmp_path / "adapter", tensors | matrices(HALF), **own)
    assert_merged(tmp_path, GOLDEN, adapter, merge(BASE | saved, matrices(HALF), lambda module: 2), CONFIG)


def embedding_matrices(vocab, embed, name="model.embed_tokens"):
    random = np.random.default_rng(2)
    a, b = random.normal(size=(4, vocab)), random.normal(size=(embed, 4))
    parts = {"A": a.astype(np.float32), "B": b.astype(np.float32)}
    return {f"{PREFIX}{name}.lora_embedding_{part}": each for part, each in parts.items()}


@pytest.mark.parametrize("is_saved", [False, True])
def test_an_embedding(tmp_path, is_saved):
    """PEFT saves the base of an adapted embedding too."""
    tensors = embedding_matrices(72, 32)
    own = BASE["model.embed_tokens.weight"]
    base = own + 1 if is_saved else own
    if is_saved:
        tensors[f"{PREFIX}model.embed_tokens.base_layer.weight"] = base
    a, b = (tensors[f"{PREFIX}model.embed_tokens.lora_embedding_{part}"].astype(np.float64) for part in "AB")
    expected = BASE | {"model.embed_tokens.weight": base + 2 * (b @ a).T}
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules=["embed_tokens"])
    assert_merged(tmp_path, GOLDEN, adapter, expected, CONFIG)


@pytest.mark.parametrize("model_class", [None, "levanter"])
def test_weights_of_gpt2_are_stored_as_inputs_and_outputs(golden, tmp_path, model_class):
    """Square matrices too, and biases were trained; `fan_in_fan_out` is that of PEFT's last layer, and may be false."""
    base = read_folder(golden / "gpt2")
    prefix = "transformer." if any(name.startswith("transformer.") for name in base) else ""
    modules = {
        name.removesuffix(".weight").removeprefix("transformer."): each.shape[::-1]
        for name, each in base.items() if name.endswith(("c_attn.weight", "c_proj.weight"))
    }  # fmt: skip
    assert any(rows == columns for rows, columns in modules.values())
    named = {f"transformer.{name}": shape for name, shape in modules.items()}
    tensors = matrices(named)
    expected = merge(
        {f"transformer.{name.removeprefix('transformer.')}": each for name, each in base.items()},
        tensors, lambda module: 2, named,
    )  # fmt: skip
    for module, (size, _) in named.items():
        expected[f"{module}.bias"] = tensors[f"{PREFIX}{module}.bias"] = np.arange(size, dtype=np.float32)
    expected = {name if prefix else name.removeprefix("transformer."): each for name, each in expected.items()}
    config = json.loads((golden / "gpt2" / "config.json").read_text())
    for number, is_said in enumerate([True, False]):
        own = {"target_modules": ["c_attn", "c_proj"], "bias": "lora_only", "fan_in_fan_out": is_said}
        adapter = write_adapter(tmp_path / f"adapter{number}", tensors, **own)
        (tmp_path / str(number)).mkdir()
        assert_merged(tmp_path / str(number), golden / "gpt2", adapter, expected, config, model_class)


def coded_llama(tmp_path):
    """A checkpoint in fp8, and its numbers."""
    coded = quantized({name: each for name, each in BASE.items() if name in ALL_WEIGHTS}, (20, 28))
    tensors = BASE | coded
    quantization = {"quant_method": "fp8", "weight_block_size": [20, 28]}
    folder = write_stored(tmp_path / "coded", tensors, CONFIG | {"quantization_config": quantization})
    return folder, dequantized(tensors, (20, 28)), CONFIG


ALL_WEIGHTS = {f"{module}.weight" for module in ALL}


@pytest.mark.parametrize("name", ["fp8", "llama_awq", pytest.param("llama_gptq", marks=pytest.mark.whole)])
def test_coded_weights(tmp_path, name):
    """Scales and the change are applied to the same numbers, also where codes are in the order of AWQ or GPTQ."""
    if name == "fp8":
        folder, numbers, config = coded_llama(tmp_path)
    else:
        folder, numbers = FOLDER / name, numbers_of(read_stored(FOLDER / name / "model.safetensors"))
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": None}
    shapes = {
        each.removesuffix(".weight"): values.shape for each, values in numbers.items()
        if each.endswith(("q_proj.weight", "down_proj.weight", "v_proj.weight"))
    }  # fmt: skip
    tensors = matrices(shapes, is_exact=True)
    targets = ["q_proj", "down_proj", "v_proj"]
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules=targets)
    assert_merged(tmp_path, folder, adapter, merge(numbers, tensors, lambda module: 2), config)


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


@pytest.mark.parametrize("has_experts", [False, True])
def test_experts(tmp_path, has_experts):
    """Experts are linear layers of transformers 4, and those of transformers 5 have no adapters."""
    base, targets = read_folder(FOLDER / "qwen3_moe"), ("q_proj", "up_proj") if has_experts else ("q_proj",)
    shapes = {
        name.removesuffix(".weight"): each.shape for name, each in base.items()
        if name.removesuffix(".weight").endswith(targets)
    }  # fmt: skip
    assert any(".experts." in name for name in shapes) == has_experts
    tensors = matrices(shapes)
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules=["q_proj", "up_proj"])
    config = json.loads((FOLDER / "qwen3_moe" / "config.json").read_text())
    assert_merged(tmp_path, FOLDER / "qwen3_moe", adapter, merge(base, tensors, lambda module: 2), config)
    if has_experts:
        one = next(name for name in shapes if ".experts.3." in name)
        rest = matrices({name: shape for name, shape in shapes.items() if name != one})
        other = write_adapter(tmp_path / "other", rest, target_modules=["q_proj", "up_proj"])
        with pytest.raises(CheckpointError, match=rf"lacks what .* was trained \({one}.weight\)"):
            load(FOLDER / "qwen3_moe", other)


def test_tensors_that_the_model_has_no_use_for(tmp_path, caplog):
    """Those of a vision tower are named; an adapter of nothing else is refused."""
    vision = {"vision_tower.q_proj.weight": np.ones((8, 8), np.float32)}
    base = write_stored(tmp_path / "base", {}, CONFIG)
    save_file(BASE | vision, base / "model.safetensors")
    own = matrices({"vision_tower.q_proj": (8, 8)})
    load(base, write_adapter(tmp_path / "both", STORED | own, **QV))
    text = "the adapter changes tensors that the model has no use for (vision_tower.q_proj.weight)"
    assert text in caplog.text
    alone = write_adapter(tmp_path / "alone", own, target_modules=["vision_tower.q_proj"])
    with pytest.raises(CheckpointError, match=r"no use for .*, and nothing else; leave"):
        load(base, alone)


def test_missing_files_of_the_checkpoint_are_not_blamed_on_the_adapter(golden, tmp_path):
    shutil.copytree(golden / "llama", tmp_path / "base")
    (tmp_path / "base" / "model-00002-of-00003.safetensors").unlink()
    adapter = write_adapter(tmp_path / "adapter", matrices({"model.layers.0.self_attn.q_proj": (32, 32)}))
    with pytest.raises(CheckpointError, match=r"1 of 3 shards missing: model-00002-of-00003\.safetensors"):
        load(tmp_path / "base", adapter)


def test_checksums_include_the_files_of_an_adapter(capsys):
    opened = open_folder(str(GOLDEN))
    template = build_model(read_config(None, opened), 8).template
    mesh = arrange(jax.devices(), parse_slice("cpu-8"), {"replica": 1, "data": 2, "model": 4})
    stream_checkpoint(template, opened, mesh, None, None, checksum=True, adapter=open_adapter(str(GOLDEN / "adapter")))
    assert "their store has none for 2 of 2 files" in capsys.readouterr().err


def tied(tmp_path, golden, tensors, **config):
    """Return the arrays of a tied Llama with an adapter."""
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    with jax.set_mesh(arrange(jax.devices(), parse_slice("cpu-8"), {"replica": 1, "data": 2, "model": 4})):
        model = load_pretrained(str(golden / "llama31"), adapter=str(adapter), dtype="float32")
    return {path: np.asarray(leaf.array) for path, leaf in named_leaves(model)}


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("heads", [("lm_head",), ("lm_head", "embed_tokens")])
def test_a_tied_model_may_get_a_head_of_its_own(golden, tmp_path, heads):
    """Where the head was trained apart from the embedding, and saved whole."""
    own = read_folder(golden / "llama31")[EMBEDDING].astype(np.float32)
    tensors = {f"{PREFIX}lm_head.weight": own + 1}
    if "embed_tokens" in heads:
        tensors[PREFIX + EMBEDDING] = own + 2
    found = tied(tmp_path, golden, tensors, target_modules=[], modules_to_save=heads)
    np.testing.assert_array_equal(found["embeddings.token_embeddings.weight"], own + 2 * (len(heads) - 1))
    np.testing.assert_array_equal(found["lm_head.weight"], own + 1)


def test_a_tied_model_whose_embedding_and_head_were_trained_together(golden, tmp_path):
    own = read_folder(golden / "llama31")[EMBEDDING].astype(np.float32)
    config = {"target_modules": [], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    found = tied(tmp_path, golden, {PREFIX + EMBEDDING: own + 2}, **config)
    np.testing.assert_array_equal(found["embeddings.token_embeddings.weight"], own + 2)
    assert "lm_head.weight" not in found


@pytest.mark.parametrize("kind", ["saved", "matrices"])
def test_a_tied_model_of_which_one_half_changes_is_refused(golden, tmp_path, kind):
    vocab, embed = read_folder(golden / "llama31")[EMBEDDING].shape
    if kind == "saved":
        tensors = {PREFIX + EMBEDDING: np.ones((vocab, embed), np.float32)}
        config = {"target_modules": [], "modules_to_save": ["embed_tokens"]}
    else:
        tensors, config = embedding_matrices(vocab, embed), {"target_modules": ["embed_tokens"]}
    with pytest.raises(CheckpointError, match=r"changes model.embed_tokens.weight, and .*: PEFT changes one of both"):
        tied(tmp_path, golden, tensors, **config)


A0 = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = A0.replace("lora_A", "lora_B")


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, values):
    return lambda tensors: tensors.update({name: np.asarray(values, np.float32)})


def move(old, new):
    return lambda tensors: [tensors.update({name.replace(old, new): tensors.pop(name)}) for name in [*tensors]]


def no_change(tensors):
    tensors.update({name: each * 0 for name, each in tensors.items() if "lora_B" in name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(A0), r"has .*0.self_attn.q_proj.lora_B.weight without its lora_A; download it again"),
        (drop(B0), r"has .*0.self_attn.q_proj.lora_A.weight without its lora_B"),
        (drop(A0, B0), r"lacks what its .* was trained \(model.layers.0.self_attn.q_proj.weight\); it is incomplete"),
        (
            lambda tensors: [tensors.pop(name) for name in [*tensors] if "layers.1" in name],
            r"lacks what .* \(model.layers.1.self_attn.q_proj.weight, model.layers.1.self_attn.v_proj.weight\)",
        ),
        (put(A0, np.ones((5, 32))), r"lora_A.weight has the shape \[5, 32\], and .*lora_B.weight \[32, 4\]; .* rank"),
        (
            lambda tensors: tensors.update({A0: np.ones((5, 32), np.float32), B0: np.ones((32, 5), np.float32)}),
            r"q_proj.lora_A.weight has the rank 5, and adapter_config.json says 4 \(r, rank_pattern\)",
        ),
        (put(A0, np.ones((4, 24))), r"change of .*q_proj.weight has the shape \[32, 24\], and .* \[32, 32\]"),
        (put(A0, np.ones(4)), r"lora_A.weight has the shape \[4\]; adapters of matrices alone are supported"),
        (put(B0, np.full((32, 4), np.nan)), r"q_proj.lora_B.weight has a number that is not finite"),
        (
            lambda tensors: tensors.update({A0: np.ones((4, 32), np.int32)}),
            r"lora_A.weight is stored as int32; it must be floating-point",
        ),
        (no_change, r"it changes nothing of .*llama_lora, because of every two matrices one is zero"),
        (drop(*STORED), r"holds no tensors, so that the adapter changes nothing"),
        (move("layers.1", "layers.7"), r"is not an adapter of this model: .* has no model.layers.7.self_attn.q_proj"),
        (move("self_attn.q_proj", "attn.wq"), r"has no 2 x model.layers.N.attn.wq.weight; name the adapter's own base"),
        (put(f"{PREFIX}lm_head.weight", np.ones((80, 32))), r"\[80, 32\], .*; a vocabulary that was resized"),
        (put(f"{PREFIX}model.layers.0.self_attn.q_proj.bias", np.ones(32)), r"has no .*0.self_attn.q_proj.bias"),
        (
            put(f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector", np.ones(32)),
            r"holds .*lora_magnitude_vector: DoRA is not supported; merge the adapter with PEFT",
        ),
        (put(B0.replace("weight", "bias"), np.ones(32)), r"lora_B.bias: a bias of lora_B is not supported"),
        (put(f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta", [1]), "some tokens were trained"),
        (put(f"{PREFIX}prompt", [1]), r"holds .*prompt: no LoRA adapter has a tensor of this name"),
        (put(f"{PREFIX}model.layers.0.self_attn.q_proj.lora_E", [1]), r"lora_E: this kind of adapter is not supported"),
        (put(f"{PREFIX}model.layers.0.self_attn.sinks", [1]), r"llama_lora has no model.layers.0.self_attn.sinks;"),
        (put(A0.replace(".weight", ".default.weight"), np.ones((4, 32))), r"which are one tensor; remove one"),
        (
            put(f"{PREFIX}model.layers.0.self_attn.q_proj.lora_embedding_A", np.ones((4, 32))),
            r"has matrices of a linear layer and of an embedding for one weight",
        ),
    ],
)  # fmt: skip
def test_damaged_adapters_and_those_of_other_models_are_refused(tmp_path, change, message):
    tensors = dict(STORED)
    change(tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        load(GOLDEN, write_adapter(tmp_path / "adapter", tensors, **QV))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sizes", [{"hidden_size": 64}, {"num_hidden_layers": 3}])
def test_an_adapter_of_another_size_of_the_family_is_refused(golden, tmp_path, sizes):
    """Its modules have the same names; of a model with fewer layers, they even have the same shapes."""
    shapes = {
        f"model.layers.{i}.self_attn.{name}": shape if "num_hidden_layers" in sizes else (64, 64)
        for i in range(sizes.get("num_hidden_layers", 2))
        for name, shape in (("q_proj", (32, 32)), ("v_proj", (16, 32)))
    }
    with pytest.raises(CheckpointError, match="is not an adapter of this model"):
        load(GOLDEN, write_adapter(tmp_path / "adapter", matrices(shapes), **QV))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, r"use_dora is True: DoRA is not supported; merge the adapter with PEFT"),
        ({"use_qalora": True}, "QALoRA is not supported"),
        ({"lora_bias": True}, "a bias of lora_B is not supported"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "the replication of layers is not supported"),
        (
            {"target_parameters": ["experts.gate_up_proj"]},
            "parameters outside of linear layers, such as stacked experts",
        ),
        ({"trainable_token_indices": [1]}, "an embedding of which some tokens were trained is not supported"),
        ({"alora_invocation_tokens": [1]}, "Activated LoRA, which no merged weight can compute, is not supported"),
        ({"megatron_config": {"x": 1}}, "a model of Megatron is not supported"),
        ({"loftq_config": {"loftq_bits": 4}}, "LoftQ is not supported"),
        ({"peft_type": "IA3"}, r"peft_type is 'IA3', and only LORA is supported"),
        ({"peft_type": None}, r"peft_type is None, and only LORA is supported"),
        ({"task_type": "SEQ_CLS"}, r"task_type is 'SEQ_CLS'; an adapter of a language model has CAUSAL_LM"),
        ({"init_lora_weights": "pissa_niter_4"}, r"'pissa_niter_4': it is for other base weights than the model has"),
        ({"init_lora_weights": "olora"}, r"'olora': it is for other base weights; ?.*|path_initial_model"),
        ({"init_lora_weights": "eva"}, r"'eva': EVA leaves out layers, as a damaged file would"),
        ({"init_lora_weights": "xavier"}, r"init_lora_weights is 'xavier'; it must be True or False or 'gaussian'"),
        ({"use_rslorra": True}, r"use_rslorra is not known; did you mean 'use_rslora'\?"),
        ({"use_rslora": "yes"}, r"use_rslora is 'yes'; it must be true or false"),
        ({"fan_in_fan_out": True}, r"fan_in_fan_out is true, and this model stores linear layers as outputs x inputs"),
        ({"r": 0}, r"adapter_config.json.r is 0; it must be a positive integer"),
        ({"lora_alpha": 0}, r"lora_alpha is 0; it must be a number, and not 0: the adapter would change nothing"),
        ({"rank_pattern": {"q_proj": "8"}}, r"rank_pattern.q_proj is '8'; it must be a positive integer"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern is \['q_proj'\]; it must map names of modules to numbers"),
        ({"alpha_pattern": {"(q_proj": 8}}, r"alpha_pattern has '\(q_proj', which is no regular expression"),
        ({"target_modules": None}, r"target_modules is None; it must name modules"),
        ({"target_modules": [1]}, r"target_modules is \[1\]; it must be a list of names of modules"),
        ({"bias": "some"}, r"bias is 'some'; it must be 'none' or 'all' or 'lora_only'"),
        ({"layers_to_transform": "1"}, r"layers_to_transform is '1'; it must list numbers of layers"),
    ],
)
def test_configurations_that_are_refused(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(GOLDEN, write_adapter(tmp_path / "adapter", STORED, **(QV | config)))
    assert "\n" not in str(error.value) and "adapter_config.json" in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, r"has no tensor of lm_head, which modules_to_save lists"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, r"lacks .* \(2 x model.layers.N.self_attn.o_proj"),
        ({"layers_to_transform": 1, "target_modules": ["q_proj", "v_proj", "k_proj"]}, r"lacks .*layers.1.*k_proj"),
    ],
)  # fmt: skip
def test_what_the_configuration_says_was_trained_must_be_there(tmp_path, config, message):
    with pytest.raises(CheckpointError, match=message):
        load(GOLDEN, write_adapter(tmp_path / "adapter", STORED, **(QV | config)))


def test_folders_that_hold_no_adapter(tmp_path):
    with pytest.raises(
        ConfigError, match=r"model.adapter: .* has no adapter_config.json; it is a model, which model.ref"
    ):
        load(GOLDEN, GOLDEN)
    with pytest.raises(ConfigError, match=r"adapter folder .*/lora does not exist; nothing in .* has a similar name"):
        load(GOLDEN, tmp_path / "lora")
    folder = write_adapter(tmp_path / "adapter", STORED, **QV)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(
        CheckpointError, match=r"has no adapter_model.safetensors; save adapter_model.bin as safetensors"
    ):
        load(GOLDEN, folder)
    (folder / "adapter_config.json").write_text("<html>")
    with pytest.raises(ConfigError, match=r"adapter_config.json is damaged: a web page \(HTML\)"):
        load(GOLDEN, folder)
    (folder / "adapter_config.json").write_text('{"r": 1, "r": 2}')
    with pytest.raises(ConfigError, match=r"adapter_config.json is damaged: duplicate key 'r'"):
        load(GOLDEN, folder)


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


def test_converted_with_an_adapter(tmp_path):
    """The written checkpoint is the merged one; a Plan names the adapter, and who reads the Plan applies it."""
    settings = [
        "--hardware.slice=cpu-8",
        "--workload.param_dtype=float32",
        "--workload.batch=8",
        "--workload.position=8",
    ]
    own = [f"--model={GOLDEN}", f"--model.adapter={GOLDEN / 'adapter'}", *settings]
    done = run("plan", *own, f"--json={tmp_path / 'plan.json'}")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["model"]["adapter"] == str(GOLDEN / "adapter")
    done = run("checkpoint", "convert", f"--plan={tmp_path / 'plan.json'}", f"--to={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert f"{GOLDEN} with the adapter {GOLDEN / 'adapter'} written to {tmp_path / 'out'}" in done.stdout + done.stderr
    expected = merge(BASE, STORED, lambda module: 2)
    written = read_folder(tmp_path / "out")
    assert written.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(written[name], values.astype(np.float32), err_msg=name)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_the_schedule_has_what_was_saved_whole(tmp_path):
    """A tensor of the adapter is read in place of that of the checkpoint."""
    tensors = STORED | {f"{PREFIX}lm_head.weight": np.zeros((72, 32), np.float16)}
    adapter = write_adapter(tmp_path / "adapter", tensors, **QV, modules_to_save=["lm_head"])
    sizes = []
    for path in (None, adapter):
        own = [] if path is None else [f"--model.adapter={path}"]
        settings = [
            "--hardware.slice=cpu-8",
            "--workload.batch=8",
            "--workload.position=8",
            f"--json={tmp_path / 's.json'}",
        ]
        done = run("checkpoint", f"--model={GOLDEN}", "--schedule", *own, *settings)
        assert done.returncode == 0, done.stderr
        sizes.append(json.loads((tmp_path / "s.json").read_text())["checkpoint_bytes"])
    assert sizes[0] - sizes[1] == 72 * 32 * 2


def test_results_are_those_of_the_files_of_an_adapter(checkpoint, tmp_path):
    """A run goes on only with the same adapter; its files are compared, whatever their folder is called."""
    base = read_folder(checkpoint)
    shape = base["model.layers.0.self_attn.q_proj.weight"].shape
    layers = sum(name.endswith("q_proj.weight") for name in base)
    tensors = matrices({f"model.layers.{i}.self_attn.q_proj": shape for i in range(layers)})
    adapter = write_adapter(tmp_path / "adapter", tensors)
    own = [f"--model.ref={checkpoint}", f"--data.path={checkpoint / 'text.jsonl'}", "--workload.batch=4"]
    own += ["--workload.position=64", "--workload.param_dtype=float32", "--workload.compute_dtype=float32"]

    def evaluate(output, *adapted):
        return run("eval", *own, *adapted, f"--output={tmp_path / output}")

    def loss(output):
        return json.loads((tmp_path / output / "summary.json").read_text())["total"]["loss_per_token"]

    done = evaluate("adapted", f"--model.adapter={adapter}")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "adapted" / "summary.json").read_text())
    assert summary["load"]["adapter"] == summary["plan"]["model"]["adapter"] == str(adapter)
    merged = write_stored(tmp_path / "merged", {}, json.loads((checkpoint / "config.json").read_text()))
    values = merge(base, tensors, lambda module: 2)
    save_file({name: each.astype(np.float32) for name, each in values.items()}, merged / "model.safetensors")
    for file in itertools.chain(checkpoint.glob("tokenizer*"), checkpoint.glob("special*")):
        shutil.copy(file, merged)
    done = run("eval", f"--model.ref={merged}", *own[1:], f"--output={tmp_path / 'expected'}")
    assert done.returncode == 0, done.stderr
    assert loss("adapted") == pytest.approx(loss("expected"), abs=2e-6)
    assert evaluate("adapted", f"--model.adapter={adapter.rename(tmp_path / 'moved')}").returncode == 0
    done = evaluate("adapted")
    assert done.returncode == 2 and "holds the results of another run: its adapter is" in done.stderr
    for name, change in (
        ("adapter_config.json", lambda data: data.replace(b'"lora_alpha": 8', b'"lora_alpha": 9')),
        ("adapter_model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    ):
        path = tmp_path / "moved" / name
        before = path.read_bytes()
        path.write_bytes(change(before))
        done = evaluate("adapted", f"--model.adapter={tmp_path / 'moved'}")
        assert done.returncode == 2 and f"files of the adapter differ: adapter/{name}" in done.stderr
        path.write_bytes(before)


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
