"""Unsupported config.json values are rejected, and what Levanter misreads in a config.json is corrected."""

import json

import numpy as np
import pytest

from shardplan.config import load_config
from shardplan.decoder import config_keys
from shardplan.errors import ConfigError
from shardplan.model.bundled_configs import BUNDLED, HUB_NAMES
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.huggingface.model_types import LEFT_OUT_KEYS
from shardplan.model.inspect import inspect_model
from shardplan.model.model_class import LEVANTER, LEVANTER_CLASSES
from shardplan.model.registry import build_model, transformers_config
from shardplan.search.make_plan import fit_position, make_plan, model_from_config
from shardplan.storage import open_folder


def variant(golden, tmp_path, name, **changes) -> str:
    values = json.loads((golden / name / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**values, **changes}.items() if value != "absent"}))
    return str(path)


@pytest.mark.parametrize("model_class", [None, LEVANTER])
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"vocab_size": "256"}, "vocab_size is '256'; it must be "),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be "),
        ("llama", {"head_dim": True}, "head_dim is True; it must be "),
        ("llama", {"vocab_size": 10**15}, "vocab_size is 1000000000000000; it must be "),
        ("llama", {"head_dim": 7}, "head_dim is 7; "),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        (
            "llama",
            {"quantization_config": {"bits": 4}},
            "are not supported (fp8, fbgemm_fp8, mxfp4, compressed-tensors, modelopt, awq, gptq are); use the",
        ),
        ("llama", {"rope_theta": "abc"}, "rope_theta is 'abc'; it must be a positive number"),
        ("llama", {"max_position_embeddings": None}, "max_position_embeddings is null; it must be a positive integer"),
        ("llama", {"hidden_act": "tangent"}, "hidden_act is 'tangent'; "),
        ("gpt2", {"activation_function": "mish"}, "activation_function is 'mish'; "),
        ("llama", {"num_key_value_heads": 5}, "num_key_value_heads "),
        ("gpt2", {"n_head": 7}, "96"),
        ("qwen3", {"head_dim": None}, "head_dim is null; "),
        (
            "mistral",
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor is missing; it must be a positive number",
        ),
        (
            "qwen2",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": "1", "high_freq_factor": 4}},
            "rope_scaling.low_freq_factor is '1'; it must be a positive number",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; ",
        ),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act is 'relu'; "),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"], "factor": 2}}, "['yarn']"),
        ("qwen2", {"layer_types": [[1], [1]]}, "layer_types is [[1], [1]]"),
        ("llama", {"model_type": ["llama"]}, "has no 'model_type'"),
        ("llama", {"model_type": "lama"}, "model_type 'lama' is not supported; did you mean 'llama'?"),
    ],
)
def test_unsupported_values_are_rejected(golden, tmp_path, name, changes, message, model_class):
    """By the decoder and for Levanter's classes, each in its own words behind the key and its value."""
    with pytest.raises(ConfigError) as error:
        build_model(read_config(variant(golden, tmp_path, name, **changes), None, model_class), 64)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is True; Levanter's llama supports only False"),
        (
            "llama",
            {"rope_scaling": None, "rope_parameters": {"full_attention": {}}},
            "rope_parameters has values for kinds of layers (full_attention)",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling has the type 'longrope', which is not supported (supported: default, dynamic, ",
        ),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False; Levanter's gpt2 supports only True"),
        ("gpt2", {"n_inner": 100}, "n_inner is 100; Levanter's GPT-2 supports only 4 x n_embd = 384"),
        ("gemma2", {"sliding_window": 32}, "1 of 2 layers of this gemma2 attend to 32 tokens only (sliding_window)"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": "absent"},
            "1 of 2 layers of this qwen3 attend to 4 tokens only (sliding_window), ",
        ),
    ],
)
def test_values_that_only_the_decoder_supports(golden, tmp_path, name, changes, message):
    """Levanter's classes have no place for them; a name that the decoder lacks too is refused by it in other words."""
    path = variant(golden, tmp_path, name, **changes)
    with pytest.raises(ConfigError) as error:
        build_model(read_config(path, None, LEVANTER), 64)
    assert message in str(error.value) and "\n" not in str(error.value)
    if "rope" not in message:
        assert build_model(read_config(path, None), 64).type == name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gptj", "n_embd": 64, "n_head": 4, "rotary_dim": 64}, "rotary_dim is 64; .* even, at most 16"),
        ({"model_type": "gptj", "n_embd": 65, "n_head": 4}, "n_head is 4; it must be a divisor of n_embd, 65"),
        ({"model_type": "opt", "hidden_size": 65, "num_attention_heads": 4}, "num_attention_heads is 4; .* 65"),
        ({"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, "head_dim 32: a "),
        (
            {
                "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "sliding_window": 8, "layer_types": ["sliding_attention"] * 2,
            },
            "layer_types is .* without sliding_attention, as windows are not used",
        ),
        ({"model_type": "llama", "a_key": True}, "a_key True: a 'llama' has no such key"),
    ],
)  # fmt: skip
def test_values_that_no_family_computes_are_rejected(values, message):
    sizes = {"n_layer": 2, "num_hidden_layers": 2, "ffn_dim": 128, "intermediate_size": 128, "vocab_size": 256}
    used = {key: value for key, value in sizes.items() if (key in ("n_layer",)) == (values["model_type"] == "gptj")}
    with pytest.raises(ConfigError, match=message):
        build_model({**used, "vocab_size": 256, **values}, 8)


def test_keys_that_transformers_does_not_read_are_named(golden, tmp_path, caplog):
    """Leftovers of conversions, as `sliding_window` in a Llama that was a Mistral; false ones say nothing."""
    config_keys._say.cache_clear()
    path = variant(golden, tmp_path, "llama", sliding_window=4, attention_bias=False, rope_interleaved=False)
    assert build_model(read_config(path, None), 64).type == "llama"
    said = [record.message for record in caplog.records if record.name.startswith("shardplan")]
    assert said == ["config.json: sliding_window 4: ignored, as transformers does not read it in a 'llama'"]


def test_sizes_that_a_text_part_leaves_out(tmp_path):
    """As in LLaVA 1.5, whose text model has the sizes that transformers takes by default."""
    path = tmp_path / "config.json"
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    path.write_text(json.dumps({"model_type": "llava", "text_config": text}))
    model = build_model(read_config(str(path), None), 64)
    assert inspect_model(model).axes["mlp"] == transformers_config({"model_type": "llama"}).intermediate_size


@pytest.mark.parametrize("model_type", LEFT_OUT_KEYS)
def test_left_out_keys_are_those_of_transformers(model_type):
    expected = transformers_config({"model_type": model_type})
    assert {key: getattr(expected, key) for key in LEFT_OUT_KEYS[model_type]} == LEFT_OUT_KEYS[model_type]


def test_a_class_of_another_type_is_refused(golden, raises_message):
    path = str(golden / "gemma2" / "config.json")
    with raises_message(ConfigError):
        build_model(read_config(path, None, LEVANTER_CLASSES["llama"]), 64)


def test_unreadable_files_are_rejected(tmp_path, raises_message):
    path = tmp_path / "config.json"
    for text in ("{", "[" * 100000, "3"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_config(str(path), None)
    (tmp_path / "my-qwen").mkdir()
    (tmp_path / "my-qwen" / "config.json").write_text("{}")
    with raises_message(ConfigError):
        read_config(str(tmp_path / "my-qwn"), None)
    with raises_message(ConfigError):
        read_config(str(tmp_path / "llama-3.1-8.json"), None)


def test_a_bundled_model_by_its_name(tmp_path, monkeypatch):
    """A file of the same name, as of any other, wins."""
    assert read_config("llama-3.1-8b", None)["num_hidden_layers"] == 32
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3.1-8b").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    assert read_config("llama-3.1-8b", None)["num_hidden_layers"] == 2


def test_rope_parameters_of_transformers_5(golden, tmp_path):
    """`rope_parameters` give the same model as the older keys `rope_theta` and `rope_scaling`."""
    old = read_config(str(golden / "llama31" / "config.json"), None, LEVANTER)
    scaling = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    new = read_config(
        variant(golden, tmp_path, "llama31", rope_theta="absent", rope_scaling="absent", rope_parameters=scaling),
        None,
        LEVANTER,
    )
    assert build_model(new, 64).config.rope == build_model(old, 64).config.rope
    plain = {"rope_type": "default", "rope_theta": 123.0}
    path = variant(golden, tmp_path, "llama", rope_theta="absent", rope_parameters=plain)
    assert build_model(read_config(path, None, LEVANTER), 64).config.rope.theta == 123.0


def test_scaled_rotary_embeddings_reach_mistral(golden, tmp_path):
    scaling = {"rope_type": "linear", "factor": 8.0}
    model = build_model(read_config(variant(golden, tmp_path, "mistral", rope_scaling=scaling), None, LEVANTER), 64)
    assert model.config.rope.to_hf_config()[1] is not None


def test_head_size_and_attention_scale_reach_the_attention(golden, tmp_path):
    model = build_model(read_config(variant(golden, tmp_path, "llama", head_dim=16), None), 64)
    assert inspect_model(model).axes["head_size"] == 16
    changes = {"head_dim": 20, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0}
    attention = build_model(
        read_config(variant(golden, tmp_path, "gemma2", **changes), None, LEVANTER), 64
    ).config.attention_config()
    assert (attention.head_size, attention.scaling_factor, attention.logits_soft_cap) == (20, 1 / 8, 5.0)


def test_sliding_window_of_every_layer_becomes_an_attention_mask(golden, tmp_path):
    path = variant(golden, tmp_path, "mistral", sliding_window=32)
    assert build_model(read_config(path, None, LEVANTER), 64).mask.sliding_window == 32
    assert build_model(read_config(path, None, LEVANTER), 32).mask.sliding_window is None


def test_more_positions_than_the_model_has_are_rejected(golden, raises_message):
    config = read_config(str(golden / "llama" / "config.json"), None)
    with raises_message(ConfigError):
        build_model(config, 300)


def test_parameters_equal_the_checkpoint(golden):
    """The inspected parameters have exactly as many elements as the checkpoint files."""
    from shardplan.checkpoint.format.index import read_index
    from shardplan.storage import open_folder

    for folder in sorted(golden.iterdir()):
        tensors = read_index(open_folder(str(folder)))
        axes = inspect_model(build_model(read_config(str(folder / "config.json"), None), 64))
        assert axes.size == sum(int(np.prod(t.shape)) for t in tensors.values()), folder.name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # what the model has, as its config.json or the model's code says
        ({"model_type": "qwen3_next", "num_experts": 128}, "nearest is 'qwen3', .* routed experts .*num_experts 128"),
        ({"model_type": "dbrx", "kv_lora_rank": 512}, r"'mixtral', .* layer norms .*\(kv_lora_rank 512\)"),
        ({"model_type": "gemma3n_text", "sliding_window": 512}, "nearest is 'gemma2', .* windows in most layers"),
        ({"model_type": "qwen3_vl_moe", "text_config": {}}, "nearest is 'qwen3_moe', .* rotary positions in three"),
        ({"model_type": "dbrx"}, "nearest is 'mixtral', .* clipped queries"),
        ({"model_type": "mamba2"}, "no type that is comes near it: it has state-space"),
        # types that are known nowhere
        ({"model_type": "qwen3_giant", "n_routed_experts": 9}, r"'qwen3', .*routed experts \(n_routed_experts is 9\)"),
        (
            {"model_type": "acme", "num_local_experts": 4, "kv_lora_rank": 8},
            "nearest is 'mixtral', .* latent attention",
        ),
        ({"model_type": "acme", "attention_chunk_size": 64}, "no type that is comes near it: .* within chunks"),
        ({"model_type": "qwen4"}, "it is not known here how it differs"),
        ({"model_type": "llama_moe"}, "it is not known here how it differs"),
        ({"model_type": "acme_vl"}, "it is not known here how it differs"),
    ],
)
def test_models_that_are_not_supported_are_refused_first(golden, tmp_path, changes, said):
    """Before anything else of the file, with what is nearest and why it is another model; never as a misspelling."""
    broken = {"vocab_size": "many", "quantization_config": {"quant_method": "fp8"}, "rope_scaling": 3}
    with pytest.raises(ConfigError, match=f"model_type '{changes['model_type']}' is not supported.*{said}") as error:
        read_config(variant(golden, tmp_path, "llama", **broken, **changes), None)
    assert "did you mean" not in str(error.value) and "quant" not in str(error.value)


def test_keys_with_one_meaning_are_named_together(golden, tmp_path, raises_message):
    path = variant(golden, tmp_path, "llama", num_experts=8, num_experts_per_tok=2)
    with raises_message(ConfigError):
        read_config(path, None)


@pytest.mark.parametrize(("written", "meant"), [("Llama", "llama"), ("qwen-2", "qwen2"), ("mistrl", "mistral")])
def test_misspelt_model_types(golden, tmp_path, written, meant):
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        read_config(variant(golden, tmp_path, "llama", model_type=written), None)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "num_experts", 8),
        ("qwen3", "num_local_experts", 8),
        ("mistral", "kv_lora_rank", 16),
        ("mixtral", "n_shared_experts", 1),
        ("llama", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen2", "layer_types", ["linear_attention", "full_attention"]),
        ("mistral", "layer_types", ["full_attention", "sliding_attention"]),
        ("llama", "sliding_window_pattern", 6),
        ("qwen3", "attention_sinks", True),
        ("olmo2", "clip_qkv", 8.0),
        ("llama", "logit_scale", 0.0625),
        ("gemma", "final_logit_softcapping", 30.0),
        ("gemma", "query_pre_attn_scalar", 100),
        ("llama", "partial_rotary_factor", 0.5),
        ("gemma2", "use_bidirectional_attention", True),
        ("gpt2", "alibi", True),
        ("llama", "no_rope_layers", [1, 0]),
    ],
)
def test_keys_of_other_models_are_an_error(golden, tmp_path, name, key, value, raises_message):
    """A key that changes what is computed, in a type that does not have it."""
    with raises_message(ConfigError):
        read_config(variant(golden, tmp_path, name, **{key: value}), None)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "llama",
            {"num_local_experts": 1, "logit_scale": 1.0, "layer_types": ["full_attention"] * 2, "clip_qkv": None},
        ),
        ("gemma", {"query_pre_attn_scalar": 12, "final_logit_softcapping": None, "num_nextn_predict_layers": 1}),
        ("qwen3", {"qk_norm": True, "kv_lora_rank": None, "mlp_only_layers": [], "no_rope_layers": [1, 1]}),
        ("gemma2", {"sliding_window_pattern": 2, "quantization_config": None}),
    ],
)
def test_keys_that_change_nothing_are_ignored(golden, tmp_path, name, changes):
    assert build_model(read_config(variant(golden, tmp_path, name, **changes), None), 64).type == name


@pytest.mark.parametrize("ref", ["meta-llama/Llama-3.1-8B", "hf://meta-llama/Meta-Llama-3.1-8B-Instruct@main"])
def test_a_model_of_the_hub_that_is_bundled_without_a_network(monkeypatch, ref, raises_message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with raises_message(ConfigError):
        read_config(None, open_folder(ref))
    with raises_message(ConfigError):
        read_config(None, open_folder("meta-llama/Llama-3.1-405B-Instruct-FP8"))


def test_names_of_bundled_models_on_the_hub():
    assert HUB_NAMES.keys() | {"llama-3.1-8b-1m", "nsa-125m"} == BUNDLED.keys()


@pytest.mark.slow
def test_positions_by_default(golden, raises_message):
    """As many as the model has where none are set, and it has fewer than the default."""
    config = load_config(model={"config": str(golden / "gpt2" / "config.json")})
    model = model_from_config(config)
    assert model.positions == 256 and make_plan(config, model).workload.position == 256
    config = load_config(model={"config": "llama-3.1-8b"})
    assert fit_position(config, model_from_config(config)).workload.position == 2048
    config = load_config(model={"config": str(golden / "gpt2" / "config.json")}, workload={"position": 300})
    with raises_message(ConfigError):
        model_from_config(config)


def test_a_config_without_model_type_is_enough_for_an_own_class(tmp_path, raises_message):
    path = tmp_path / "config.json"
    path.write_text('{"vocab_size": 8}')
    expected = {"model_type": "MyConfig", "vocab_size": 8, "levanter_class": "mine:MyConfig"}
    assert read_config(str(path), None, "mine:MyConfig") == expected
    with raises_message(ConfigError):
        read_config(str(path), None)
