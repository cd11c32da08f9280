"""Families of the decoder: streamed with a planned sharding, they have the logits of transformers, and are saved alike.

A family is a row of `FAMILIES`, the name of its folder, which docs/howto/add-a-family.md says how to make. It has
a checkpoint with the names of the released ones, and logits that transformers computes in float64; `own_error` is the
largest error of transformers' own logits in float32.
"""

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
from conftest import run, word_tokenizer
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file, save_file
from test_logits import MESHES, SHARDED_POSITIONS, TOLERANCE, deviation
from transformers import PreTrainedTokenizerFast

from shardplan import load_pretrained
from shardplan.checkpoint.format.index import read_index
from shardplan.checkpoint.levanter_converter.config import make_hf_config
from shardplan.checkpoint.load import stream_checkpoint
from shardplan.checkpoint.mapping.state_dict_program import expected_tensors
from shardplan.checkpoint.match import match_tensors
from shardplan.checkpoint.saving.save import save_pretrained
from shardplan.decoder import families
from shardplan.decoder.config import DecoderConfig
from shardplan.decoder.model import Decoder
from shardplan.decoder.parts.mlp.experts import ExpertsConfig
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import abstract_module, build_model, transformers_config
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.storage import open_folder

FOLDER = Path(__file__).with_name("families")
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "add-a-family.md"
FAMILIES = (
    "apertus", "cohere", "cohere2", "cohere_plus", "deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v32",
    "dots1", "ernie4_5_moe", "exaone4", "exaone4_full", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "gpt_neox_sequential", "gpt_oss", "gptj", "granite", "hunyuan_v1_moe",
    "hy_v3", "kimi_k2", "llama4", "llama4_text", "minimax_m2", "ministral3", "mistral4", "olmo3", "olmoe", "opt",
    "opt_350m", "phi", "phi3", "phi3_short", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "stablelm_12b",
    "starcoder2",
)  # fmt: skip
ON_ONE_DEVICE = (
    "ernie4_5_moe_interval", "gemma2", "glm4_moe_groups", "hunyuan_v1_moe_topk", "mistral", "qwen2", "qwen3_moe_mixed",
)  # fmt: skip
"""Checkpoints whose logits are compared on one device: types that Levanter's classes compute, and variants of others.

Variants have experts in some layers only, groups of experts, or other numbers of them in each layer.
"""
BUFFERS = (".attention.bias", ".attn.bias", ".inv_freq", ".masked_bias")
"""Ends of names of stored tensors that transformers computes anew: they need not be saved."""
CONSTANTS = (".beta", ".eps")
"""Ends of names of stored tensors that are no parameters, and that transformers reads."""
QUICKLY_SAVED = ("apertus", "cohere_plus", "glm", "gptj", "olmo3")
"""A family with constants, some whose halves of heads are moved, and one with segments of two layers."""
METHODS = itertools.cycle(
    [
        AttentionPlan("ring", 1, 4, "zigzag"), AttentionPlan("all_gather", 1, 4),
        AttentionPlan("hybrid", 2, 2, "zigzag"), AttentionPlan("ulysses", 4),
    ]
)  # fmt: skip


def tolerance(name):
    """Twice the error of transformers in float32, for sums in another order."""
    return 2 * float(np.load(FOLDER / name / "golden.npz")["own_error"]) + 1e-6


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


def config_of(name):
    """The config.json of the language model of a folder, as shardplan reads it."""
    return read_config(None, open_folder(str(FOLDER / name)))


def text_tensors(name):
    """The tensors of the decoder of a folder, by the names that they have without an image model beside it.

    Those of an indexer of positions, and of a layer for predicting further tokens, are ignored as images are.
    """
    ignored = ("vision_tower", "vision_model", ".indexer.", f"model.layers.{config_of(name).get('num_hidden_layers')}.")
    tensors = {}
    for path in sorted((FOLDER / name).glob("*.safetensors")):
        for key, value in load_file(path).items():
            if not any(part in key for part in ignored):
                tensors[key.removeprefix("language_model.")] = value
    return tensors


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


def saved_tensors(name):
    """The tensors that a saved checkpoint must have: those of the language model, without what is computed anew."""
    tensors = text_tensors(name).items()
    return {key: value for key, value in tensors if "multi_modal_projector" not in key and not key.endswith(BUFFERS)}


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


def test_the_family_of_the_page_on_families(tmp_path, monkeypatch, golden):
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
    with pytest.raises(ConfigError, match=r"config\.json: rope_interleaved True: a 'lucid' has no such key"):
        DecoderConfig.from_hf_config({**values, "rope_interleaved": True})


@pytest.mark.parametrize("name", ["gpt_neox", "opt", "seed_oss"])
def test_a_checkpoint_saved_from_the_base_model(tmp_path, name):
    """Its names lack the module around it; without an output head it is loaded only if the head is the embedding."""
    values = config_of(name)
    template = abstract_module(DecoderConfig.from_hf_config(values), hax.Axis("vocab", values["vocab_size"]))
    base = ("model.", "gpt_neox.")
    inner = {key.partition(".")[2] if key.startswith(base) else key: value for key, value in text_tensors(name).items()}
    save_file(inner, tmp_path / "model.safetensors")
    match_tensors(template, read_index(open_folder(str(tmp_path))), "ck")
    heads = inner.keys() & {"embed_out.weight", "lm_head.weight"}
    assert len(heads) == (name != "opt")
    for head in heads:
        del inner[head]
        save_file(inner, tmp_path / "model.safetensors")
        problem = rf"^ck does not .*: 1 tensor missing \({head}\); it was saved from the base model, without the output"
        with pytest.raises(CheckpointError, match=problem):
            match_tensors(template, read_index(open_folder(str(tmp_path))), "ck")


@pytest.mark.parametrize("name", [*FAMILIES, *ON_ONE_DEVICE])
def test_the_configuration_of_transformers_is_read_alike(name):
    """As Levanter's converter has it: with every default, and other names of keys than the released file."""
    if name == "olmo3":
        pytest.skip("this version of transformers knows no rotary embeddings of one kind of its layers")
    values = config_of(name)
    expected, found = (DecoderConfig.from_hf_config(each) for each in (values, transformers_config(dict(values))))
    assert dataclasses.replace(found, hf_config=expected.hf_config) == expected
    assert found.to_hf_config(80).vocab_size == 80


@pytest.mark.parametrize("name", [*FAMILIES, *ON_ONE_DEVICE])
def test_what_levanters_converter_exports_is_the_same_model(name):
    """With the special tokens of its tokenizer, and those of a configuration that it overrides."""
    values = config_of(name)
    config = DecoderConfig.from_hf_config(values)
    template = abstract_module(config, hax.Axis("vocab", 80))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(0), eos_token="t7", bos_token="t5")
    converter = config.hf_checkpoint_converter().replaced(tokenizer=tokenizer).with_config_overrides({"dtype": "x"})
    exported = make_hf_config(converter, template)
    again = DecoderConfig.from_hf_config(exported)
    assert dataclasses.replace(again, hf_config=config.hf_config) == config
    assert [exported[key] for key in ("vocab_size", "eos_token_id", "bos_token_id", "dtype")] == [80, 7, 5, "x"]


@pytest.mark.parametrize("name", [*FAMILIES, *ON_ONE_DEVICE])
def test_unknown_keys_are_refused(name):
    """A key that the family does not read, and that is not known to be harmless, may change what the model computes."""
    values = config_of(name)
    with pytest.raises(ConfigError, match=f"config.json: alibi True: a '{values['model_type']}' has no such key"):
        DecoderConfig.from_hf_config({**values, "alibi": True})
    sizes = {"n_head": 0, "num_attention_heads": 0}
    changed = {key: size for key, size in sizes.items() if key in values}
    with pytest.raises(ConfigError, match=r"(n_head|num_attention_heads) is 0; it must be an integer from 1 to "):
        DecoderConfig.from_hf_config({**values, **changed})


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (
            "granite",
            {"rope_scaling": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta is 0.1",
        ),
        ("granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1, "),
        ("gemma3_text", {"sliding_window": None}, "sliding_window is null; it must be a number of tokens"),
        (
            "mistral",
            {"layer_types": ["full_attention"] * 2},
            r"layer_types .*; it must be 2 times sliding_attention, as sliding_window is \d",
        ),
        ("ministral3", {"rope_parameters": None}, "rope_parameters is null; it must be given"),
        ("gptj", {"rotary_dim": None}, "rotary_dim is null"),
        ("gpt_oss", {"rope_scaling": None}, "rope_parameters is missing; it must be given"),
        ("gpt_oss", {"experts_per_token": 2}, "experts_per_token is 2; it must be num_experts_per_tok, 3"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        ("gpt_oss", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; it must be at most num_local_experts, 6"),
        ("llama4_text", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5; it must be at most"),
        (
            "llama4_text",
            {"attn_temperature_tuning": "yes"},
            "attn_temperature_tuning is 'yes'; it must be true or false",
        ),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers .*; it must be a list of 5 times 1, "),
        (
            "llama4_text",
            {"moe_layers": [5]},
            r"moe_layers is \[5\]; it must be a list of numbers of layers, from 0 to 4",
        ),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 5}, "layer_types .*; it must be a list of 5 times "),
        (
            "llama4_text",
            {"layer_types": ["chunked_attention"] * 5, "attention_chunk_size": None},
            "attention_chunk_size is null; it must be a number of tokens",
        ),
        (
            "llama4_text",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "use_qk_norm is True; it must be false, beside",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True; it must be False"),
        ("deepseek_v2_groups", {"topk_group": 1, "num_experts_per_tok": 4}, "topk_group is 1; it must be enough"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be 'sigmoid'"),
        ("deepseek_v3", {"n_group": 5}, "n_group is 5; it must be a divisor of the 12 experts"),
        ("kimi_k2", {"num_experts_per_tok": 13}, "num_experts_per_tok is 13; it must be at most "),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2; it must be 4"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False; it must be True"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, r"mlp_layer_types .*; it must be a list of 3 times dense or"),
        ("glm_moe_dsa", {"layer_types": ["full_attention"] * 3}, "layer_types .*; it must be indexed_attention for ev"),
        ("mistral4", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25; it must be 0.5"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings is True; it must be False"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers is '0'; it must be a list of numbers of layers"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be at most num_experts, 8"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; it must be null"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method is 'greedy'; it must be 'noaux_tc'"),
        ("glm4_moe_groups", {"n_group": 8}, "n_group is 8; it must be a divisor of the 8 experts, with at least 2"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts is null; it must be an integer"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be 'noaux_tc' or 'sigmoid'"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True; it must be False"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, r"attn_type_list is \[1, 0, 1\]; it must be 3 times 1"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'; it must be 'per_layer'"),
        (
            "hunyuan_v1_moe",
            {"num_shared_expert": [1, 2, 1]},
            r"num_shared_expert is \[1, 2, 1\]; it must be 1 in every",
        ),
        (
            "hunyuan_v1_moe",
            {"moe_topk": [3, 3]},
            r"moe_topk is \[3, 3\]; it must be a positive integer, or a list of 3",
        ),
        ("hunyuan_v1_moe", {"moe_topk": 9}, "moe_topk is 9; it must be at most num_experts, 8"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla is True; it must be False"),
        ("hunyuan_v1_moe", {"attention_head_dim": 8}, "attention_head_dim is 8; it must be 16"),
        ("hy_v3", {"expert_hidden_dim": 16}, "expert_hidden_dim is 16; it must be 12"),
        (
            "hy_v3",
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types is .*; it must be a list of 3 times dense or sparse",
        ),
        (
            "hy_v3",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 9.0}},
            "alpha is 9.0; it must be ",
        ),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(name, changes, problem):
    """Also null, where it says something else than a key that is left out."""
    with pytest.raises(ConfigError, match=problem):
        DecoderConfig.from_hf_config({**config_of(name), **changes})


@pytest.mark.parametrize("name", ["gemma2", "mistral", "qwen2"])
def test_windows_are_loaded_into_the_decoder_without_a_plan(name):
    """Levanter's classes of these types have a window only in the mask that their caller gives."""
    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("data",))):
        assert isinstance(load_pretrained(str(FOLDER / name)), Decoder)


@pytest.mark.parametrize("name", ["mistral", "phi3", "qwen2", "smollm3", "starcoder2"])
def test_a_window_of_null_is_none(name):
    uses_windows = {"use_sliding_window": True} if name in ("qwen2", "smollm3") else {}
    config = DecoderConfig.from_hf_config({**config_of(name), **uses_windows, "sliding_window": None})
    assert all(layer.attention.window is None for segment in config.segments for layer in segment.layers)


def kinds_of_layers(changes):
    """Chunk, whether there are rotary embeddings, and whether there are experts, of every layer of the Llama 4."""
    config = DecoderConfig.from_hf_config({**config_of("llama4_text"), **changes})
    layers = [layer for segment in config.segments for layer in segment.layers * segment.repeats]
    return [(each.attention.chunk, each.attention.rotary is not None, hasattr(each.mlp, "router")) for each in layers]


def test_layers_of_llama_4():
    """As transformers reads these keys: of kinds of attention, lists win over what they follow from by default."""
    assert kinds_of_layers({}) == [(16, True, True)] * 3 + [(None, False, True), (16, True, True)]
    assert kinds_of_layers({"attention_chunk_size": None}) == [(None, i != 3, True) for i in range(5)]
    assert kinds_of_layers({"no_rope_layer_interval": 2}) == [
        (None if i % 2 else 16, i % 2 == 0, True) for i in range(5)
    ]
    assert kinds_of_layers({"layer_types": ["full_attention"] * 5}) == [(None, i != 3, True) for i in range(5)]
    assert [each[2] for each in kinds_of_layers({"interleave_moe_layer_step": 2})] == [False, True, False, True, False]
    assert [each[2] for each in kinds_of_layers({"moe_layers": [0, 4]})] == [True, False, False, False, True]


def test_layers_without_experts():
    """The first ones, others by `moe_layer_freq`, or those that `mlp_layer_types` names."""
    for changes, expected in (
        ({"first_k_dense_replace": 2}, [False, False, True]),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, [True, False, True]),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, [True, False, True]),
    ):
        config = DecoderConfig.from_hf_config({**config_of("deepseek_v3"), **changes})
        layers = [layer for segment in config.segments for layer in segment.layers * segment.repeats]
        assert [isinstance(layer.mlp, ExpertsConfig) for layer in layers] == expected


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_sequences_of_which_an_indexer_chooses_positions_are_refused(name):
    """Up to as many as it chooses, 48 in these models, its golden logits are those of attention to all."""
    values = config_of(name)
    problem = f" is 49, and the indexer of a {name} chooses 48 positions for each query .*; use at most 48"
    with pytest.raises(ConfigError, match=f"workload.position{problem}"):
        build_model(values, 49)
    model = abstract_module(DecoderConfig.from_hf_config(values), hax.Axis("vocab", values["vocab_size"]))
    tokens = hax.NamedArray(jax.ShapeDtypeStruct((49,), "int32"), (hax.Axis("position", 49),))
    with pytest.raises(ConfigError, match=f"the number of positions{problem}"):
        jax.eval_shape(lambda model, tokens: model(tokens), model, tokens)
    assert build_model(values, 49, shorten=True).positions == 48


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
