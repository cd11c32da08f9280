"""Adapters that are damaged, of another model, or of a kind that is not supported are refused on one line."""

import shutil

import numpy as np
import pytest
from adapted_llama import BASE, CONFIG, EMBEDDING, GOLDEN, QV, STORED, embedding_matrices, load, tied
from coded_checkpoints import write_stored
from lora_adapters import PREFIX, matrices, read_folder, write_adapter
from safetensors.numpy import save_file

from shardplan.errors import CheckpointError, ConfigError


def test_tensors_that_the_model_has_no_use_for(tmp_path, caplog, raises_message):
    """Those of a vision tower are named; an adapter of nothing else is refused."""
    vision = {"vision_tower.q_proj.weight": np.ones((8, 8), np.float32)}
    base = write_stored(tmp_path / "base", {}, CONFIG)
    save_file(BASE | vision, base / "model.safetensors")
    own = matrices({"vision_tower.q_proj": (8, 8)})
    load(base, write_adapter(tmp_path / "both", STORED | own, **QV))
    text = "the adapter changes tensors that the model has no use for (vision_tower.q_proj.weight)"
    assert text in caplog.text
    alone = write_adapter(tmp_path / "alone", own, target_modules=["vision_tower.q_proj"])
    with raises_message(CheckpointError):
        load(base, alone)


def test_missing_files_of_the_checkpoint_are_not_blamed_on_the_adapter(golden, tmp_path, raises_message):
    shutil.copytree(golden / "llama", tmp_path / "base")
    (tmp_path / "base" / "model-00002-of-00003.safetensors").unlink()
    adapter = write_adapter(tmp_path / "adapter", matrices({"model.layers.0.self_attn.q_proj": (32, 32)}))
    with raises_message(CheckpointError):
        load(tmp_path / "base", adapter)


@pytest.mark.parametrize("kind", ["saved", "matrices"])
def test_a_tied_model_of_which_one_half_changes_is_refused(golden, tmp_path, kind, raises_message):
    vocab, embed = read_folder(golden / "llama31")[EMBEDDING].shape
    if kind == "saved":
        tensors = {PREFIX + EMBEDDING: np.ones((vocab, embed), np.float32)}
        config = {"target_modules": [], "modules_to_save": ["embed_tokens"]}
    else:
        tensors, config = embedding_matrices(vocab, embed), {"target_modules": ["embed_tokens"]}
    with raises_message(CheckpointError):
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
def test_an_adapter_of_another_size_of_the_family_is_refused(golden, tmp_path, sizes, raises_message):
    """Its modules have the same names; of a model with fewer layers, they even have the same shapes."""
    shapes = {
        f"model.layers.{i}.self_attn.{name}": shape if "num_hidden_layers" in sizes else (64, 64)
        for i in range(sizes.get("num_hidden_layers", 2))
        for name, shape in (("q_proj", (32, 32)), ("v_proj", (16, 32)))
    }
    with raises_message(CheckpointError):
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


def test_folders_that_hold_no_adapter(tmp_path, raises_message):
    with raises_message(ConfigError):
        load(GOLDEN, GOLDEN)
    with raises_message(ConfigError):
        load(GOLDEN, tmp_path / "lora")
    folder = write_adapter(tmp_path / "adapter", STORED, **QV)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with raises_message(CheckpointError):
        load(GOLDEN, folder)
    (folder / "adapter_config.json").write_text("<html>")
    with raises_message(ConfigError):
        load(GOLDEN, folder)
    (folder / "adapter_config.json").write_text('{"r": 1, "r": 2}')
    with raises_message(ConfigError):
        load(GOLDEN, folder)
