"""LoRA adapters of embeddings, tied heads, experts, coded weights, and of GPT-2 are merged as by NumPy."""

import json

import numpy as np
import pytest
from adapted_llama import (
    ALL,
    BASE,
    CONFIG,
    EMBEDDING,
    FOLDER,
    GOLDEN,
    HALF,
    assert_merged,
    embedding_matrices,
    load,
    tied,
)
from coded_checkpoints import dequantized, numbers_of, quantized, read_stored, write_stored
from lora_adapters import PREFIX, matrices, merge, read_folder, write_adapter

from shardplan.errors import CheckpointError


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


@pytest.mark.parametrize("has_experts", [False, True])
def test_experts(tmp_path, has_experts, raises_message):
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
        with raises_message(CheckpointError):
            load(FOLDER / "qwen3_moe", other)


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
