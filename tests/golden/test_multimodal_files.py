"""Models of images and text: the text model within one is the one that it is by itself, in every number."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from coded_checkpoints import numbers_of
from conftest import run
from multimodal_files import WRAPPERS, read_checkpoint, wrapped_config, write_wrapped
from test_config_variants import TOLERANCE, compute_reference_logits
from transformers import CONFIG_MAPPING

from shardplan.checkpoint.load import load_pretrained, stream_checkpoint
from shardplan.decoder.config import DecoderConfig
from shardplan.errors import CheckpointError, ConfigError
from shardplan.hardware import parse_slice
from shardplan.model.huggingface import text_part
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.huggingface.mrope_types import MROPE_TYPES
from shardplan.model.huggingface.text_part import TEXT_TYPES
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import build_model
from shardplan.runtime.devices import arrange
from shardplan.storage import open_folder

FAMILIES = Path(__file__).with_name("families")
DATA = Path(__file__).with_name("data")
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
INTERLEAVED = {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True}}
UNNAMED = {"model_type": None}
CASES = {
    "llava, llama in AWQ": ("llava", FAMILIES / "llama_awq", UNNAMED),
    "llava, mistral": ("llava of transformers 5", FAMILIES / "mistral", {}),
    "llava_next, mistral": ("llava_next", FAMILIES / "mistral", {}),
    "llava_onevision, qwen2": ("llava_onevision", FAMILIES / "qwen2", UNNAMED),
    "internvl, qwen2": ("internvl", FAMILIES / "qwen2", UNNAMED),
    "internvl_chat, gpt_oss": ("internvl_chat", FAMILIES / "gpt_oss_mxfp4", {}),
    "internvl_chat, qwen3_moe": ("internvl_chat", FAMILIES / "qwen3_moe", {}),
    "kimi_k25": ("kimi_k25", FAMILIES / "kimi_k2", UNNAMED),
    "kimi_k25 in integers": ("kimi_k25", FAMILIES / "kimi_int4", {}),
    "kimi_k25 in fp8": ("kimi_k25", FAMILIES / "deepseek_v3_fp8", {}),
    "qwen2_vl": ("qwen2_vl", FAMILIES / "qwen2", MROPE),
    "qwen2_5_vl": ("qwen2_5_vl", FAMILIES / "qwen2", {**MROPE, "model_type": "qwen2_5_vl_text"}),
    "qwen3_vl": ("qwen3_vl", DATA / "qwen3", {**INTERLEAVED, "model_type": "qwen3_vl_text"}),
    "glm4v": ("glm4v", FAMILIES / "glm4", {**MROPE, "model_type": "glm4v_text", "head_dim": None}),
    "glm4v_moe": ("glm4v_moe", FAMILIES / "glm4_moe_groups", {"model_type": "glm4v_moe_text"}),
}
"""Wrapper, checkpoint of its text model, and keys of this that differ within the wrapper."""
UNNEEDED = re.compile(r"holds (a tensor|\d+ tensors) that the model has no use for")


def read(folder):
    """The configuration of the model in `folder`, and array path -> array."""
    opened = open_folder(str(folder))
    model = build_model(read_config(None, opened), 8)
    mesh = arrange(jax.devices(), parse_slice("cpu-8"), {"replica": 1, "data": 2, "model": 4})
    module, _ = stream_checkpoint(model.template, opened, mesh, None, "float32")
    config = dataclasses.replace(model.config, hf_config="")
    return config, {path: np.asarray(leaf.array) for path, leaf in named_leaves(module)}


def assert_same_model(folder, golden):
    """The models of two checkpoints have the same configuration, and the same bits in every array."""
    (config, found), (expected_config, expected) = read(folder), read(golden)
    assert config == expected_config
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(found[path], values, err_msg=path)


def unneeded(caplog):
    """Which numbers of tensors were said to be of no use."""
    found = [UNNEEDED.search(record.message) for record in caplog.records]
    return ["1" if each[1] == "a tensor" else each[1].split()[0] for each in found if each]


@pytest.mark.parametrize("case", CASES)
def test_the_text_model_is_that_of_its_own_checkpoint(tmp_path, caplog, case):
    """One line names the tensors that are ignored: those of images, and those that the checkpoint of the text has."""
    name, golden, text = CASES[case]
    folder = write_wrapped(tmp_path / "wrapped", WRAPPERS[name], golden, text=text)
    assert_same_model(folder, golden)
    of_text = int(unneeded(caplog)[1]) if len(unneeded(caplog)) > 1 else 0
    assert unneeded(caplog)[0] == str(of_text + len(WRAPPERS[name].images))


@pytest.mark.parametrize("case", ["llava, mistral", "qwen2_vl", "glm4v_moe"])
def test_logits_equal_transformers(tmp_path, case):
    """The logits of the text model by itself, by transformers; rotary positions in three parts change none."""
    name, golden, text = CASES[case]
    reference = np.load(golden / "golden.npz")
    folder = open_folder(str(write_wrapped(tmp_path / "wrapped", WRAPPERS[name], golden, text=text)))
    logits = compute_reference_logits(read_config(None, folder), folder, reference["tokens"][0])
    assert np.abs(logits - reference["logits_float64"][0]).max() <= TOLERANCE


def test_the_plan_is_that_of_the_text_model(tmp_path):
    golden = FAMILIES / "mistral"
    wrapped = write_wrapped(tmp_path / "wrapped", WRAPPERS["llava"], golden)
    plans = []
    for folder in (golden, wrapped):
        done = run("plan", f"--model={folder}", "--hardware.slice=v5p-8", "--workload.position=32", "--json=-")
        assert done.returncode == 0, done.stderr
        plans.append(json.loads(done.stdout))
        del plans[-1]["model"]["ref"]
    for key in ("model", "mesh", "compute_mapping", "param_mapping", "parameters", "memory", "attention"):
        assert plans[0][key] == plans[1][key]


@pytest.mark.parametrize("case", ["qwen2_5_vl", "kimi_k25 in integers"])
def test_what_is_converted_is_the_text_model(tmp_path, case):
    """Its tensors have the names, and its config.json the type, of the text model alone; integers become numbers."""
    name, golden, text = CASES[case]
    wrapped = write_wrapped(tmp_path / "wrapped", WRAPPERS[name], golden, text=text)
    arguments = (f"--model={wrapped}", "--hardware.slice=cpu-8", "--workload.position=8", f"--to={tmp_path / 'out'}")
    done = run("checkpoint", "convert", *arguments, "--workload.param_dtype=float32")
    assert done.returncode == 0, done.stderr
    written, config = read_checkpoint(tmp_path / "out")
    stored, expected = read_checkpoint(golden)
    assert config["model_type"] == expected["model_type"]
    assert config["architectures"] == expected["architectures"]
    numbers = numbers_of(stored)
    assert written.keys() == numbers.keys()
    for key, values in numbers.items():
        np.testing.assert_array_equal(written[key], values, err_msg=key)
    assert_same_model(tmp_path / "out", golden)


TRANSFORMERS_5 = ("llava", "llava_next", "llava_onevision", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")


@pytest.mark.parametrize("name", [*TRANSFORMERS_5, "glm4v_moe"])
def test_the_configuration_of_transformers_is_read_alike(name):
    """The file that transformers 5 writes, with all defaults, is read as the text part that it makes of a release."""
    _, golden, text = next(case for case in CASES.values() if case[0] == name)
    values = json.loads((golden / "config.json").read_text())
    values = {key: value for key, value in {**values, **text}.items() if value is not None}
    values.pop("quantization_config", None)
    released = wrapped_config(WRAPPERS[name], values, tie_word_embeddings=values["tie_word_embeddings"])
    released.pop("vision_config")
    written = CONFIG_MAPPING[released["model_type"]](**json.loads(json.dumps(released))).to_dict()
    assert written["text_config"]["hidden_size"] == values["hidden_size"]
    found, expected = (DecoderConfig.from_hf_config(json.loads(json.dumps(each))) for each in (written, released))
    assert dataclasses.replace(found, hf_config="") == dataclasses.replace(expected, hf_config="")


@pytest.mark.parametrize("name", sorted(MROPE_TYPES))
def test_defaults_are_those_of_transformers(name):
    defaults = MROPE_TYPES[name].defaults
    config = CONFIG_MAPPING[name](**{"use_sliding_window": True} if "sliding_window" in defaults else {})
    values = {**config.to_dict(), **config.rope_parameters}
    values.setdefault("partial_rotary_factor", 1.0)
    assert {key: values[key] for key in defaults} == dict(defaults)


@pytest.mark.parametrize("name", sorted(TEXT_TYPES.keys() - {"kimi_k25"}))  # transformers 5.12 has no kimi_k25
def test_types_of_unnamed_text_models_are_those_of_transformers(name):
    assert CONFIG_MAPPING[name](text_config={}).get_text_config().model_type == TEXT_TYPES[name]


def heads(tensors):
    """The names of output heads among tensors."""
    return [name for name in tensors if name.endswith("lm_head.weight")]


@pytest.mark.parametrize(
    ("outer", "inner", "has_head", "is_tied"),
    [
        (None, True, False, True), (True, None, False, True), (True, False, False, True), (False, True, False, True),
        (None, False, True, False), (False, None, True, False), (False, True, True, False), (True, True, True, False),
    ],
)  # fmt: skip
def test_ties_of_either_part(tmp_path, outer, inner, has_head, is_tied):
    """A model is tied if either says so, and the files hold no head of their own."""

    def change(tensors):
        for name in heads(tensors) if not has_head else ():
            del tensors[name]

    ties = {} if outer is None else {"tie_word_embeddings": outer}
    folder = write_wrapped(
        tmp_path / "wrapped", WRAPPERS["llava"], FAMILIES / "mistral", text={"tie_word_embeddings": inner},
        change=change, **ties,
    )  # fmt: skip
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        model = load_pretrained(folder)
    tensors, _ = read_checkpoint(folder)
    name = "language_model.model.embed_tokens.weight" if is_tied else heads(tensors)[0]
    np.testing.assert_array_equal(np.asarray(model.get_lm_head().array), tensors[name])


def test_an_untied_model_without_a_head_is_refused(tmp_path, raises_message):
    golden, wrapper = FAMILIES / "mistral", WRAPPERS["llava"]
    folder = write_wrapped(tmp_path / "wrapped", wrapper, golden, change=lambda tensors: tensors.pop(heads(tensors)[0]))
    with raises_message(CheckpointError):
        read(folder)


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("is_outer", [False, True])
def test_how_weights_are_stored_is_said_by_either_part(tmp_path, prefix, is_outer):
    """With the names of modules as the text model has them, or as the wrapper has them."""
    golden = FAMILIES / "kimi_int4"
    quantization = json.loads((golden / "config.json").read_text())["quantization_config"]
    quantization["ignore"] = [f"{prefix}lm_head", f"re:{prefix}model.*self_attn.*", "vision_tower", "mm_projector"]
    outer = {"quantization_config": quantization} if is_outer else {}
    text = {"quantization_config": None if is_outer else quantization}
    folder = write_wrapped(tmp_path / "wrapped", WRAPPERS["kimi_k25"], golden, text=text, **outer)
    assert_same_model(folder, golden)


def without_text(tensors):
    for name in [name for name in tensors if name.startswith("language_model.")]:
        del tensors[name]


def halved(tensors):
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name.replace("language_model.model.", "model.language_model.")] = tensors.pop(name)


def doubled(tensors):
    for name in [name for name in tensors if name.startswith("language_model.model.")]:
        tensors[name.replace("language_model.model.", "model.language_model.")] = tensors[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_text, r"does not match the model of its config.json: \d+ tensors missing \(.*lm_head.weight"),
        (halved, r"9 tensors missing \(language_model.model.layers.1.* 1[0-9] tensors that the model does not have"),
        (doubled, r"holds 2 sets of weights .* begin with 'language_model.model.' and 'model.language_model.'; keep"),
    ],
)
def test_tensors_that_are_not_one_text_model_are_refused(tmp_path, change, message):
    folder = write_wrapped(tmp_path / "wrapped", WRAPPERS["llava"], FAMILIES / "mistral", change=change)
    with pytest.raises(CheckpointError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, r"it has no text_config; a 'llava' needs the keys of its text model there"),
        ({"text_config": "mistral"}, r"it has 'mistral' as text_config; a 'llava' needs the keys"),
        ({"text_config": {"model_type": "internlm2"}}, r"text_config: model_type 'internlm2' is not supported;"),
        ({"text_config": {"model_type": "mamba"}}, r"text_config: model_type 'mamba' is not supported, and no type"),
        ({"model_type": "internvl_chat", "text_config": {}}, r"text_config has no 'model_type', and that of the text"),
        (
            {"quantization_config": {"quant_method": "fp8"}, "text_config": {"quantization_config": {"a": 1}}},
            r"quantization_config says something else than that of its text_config; remove the one",
        ),
        (
            {"model_type": "qwen3_vl", "text_config": {"use_sliding_window": True}},
            r"text_config: use_sliding_window is True, and transformers computes a 'qwen3_vl_text' with False; remove",
        ),
        (
            {"model_type": "glm4v", "text_config": {"hidden_size": 30, "num_attention_heads": 4}},
            r"num_attention_heads is 4; it must be a divisor of hidden_size, 30",
        ),
        ({"model_type": "qwen3_vl_moe"}, r"nearest is 'qwen3_moe', .* the weights of all experts of a layer in one"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(tmp_path, changes, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llava", **changes}))
    with pytest.raises(ConfigError, match=message):
        read_config(str(path), None)


def test_sizes_that_contradict_the_text_part_are_named(tmp_path, caplog):
    """As stale ones of a release, which transformers does not read."""
    text_part._say.cache_clear()
    values = json.loads((FAMILIES / "mistral" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(wrapped_config(WRAPPERS["llava"], values, vocab_size=99, hidden_size=32)))
    assert read_config(str(path), None)["vocab_size"] == 72
    said = [record.message for record in caplog.records if "vocab_size" in record.message]
    assert said == [f"{path}: vocab_size is 99, and 72 in its text_config, which is read"]
    assert not any("hidden_size" in record.message for record in caplog.records)
