"""The config.json of each family: read as transformers reads it, exported alike, and refused where it is unknown."""

import dataclasses

import haliax as hax
import jax
import pytest
from conftest import word_tokenizer
from decoder_families import FAMILIES, ON_ONE_DEVICE, config_of
from transformers import PreTrainedTokenizerFast

from shardplan.checkpoint.levanter_converter.config import make_hf_config
from shardplan.decoder.config import DecoderConfig
from shardplan.decoder.parts.mlp.experts import ExpertsConfig
from shardplan.errors import ConfigError
from shardplan.model.registry import abstract_module, build_model, transformers_config


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


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
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
def test_sequences_of_which_an_indexer_chooses_positions_are_refused(name, raises_message):
    """Up to as many as it chooses, 48 in these models, its golden logits are those of attention to all."""
    values = config_of(name)
    with raises_message(ConfigError):
        build_model(values, 49)
    model = abstract_module(DecoderConfig.from_hf_config(values), hax.Axis("vocab", values["vocab_size"]))
    tokens = hax.NamedArray(jax.ShapeDtypeStruct((49,), "int32"), (hax.Axis("position", 49),))
    with raises_message(ConfigError):
        jax.eval_shape(lambda model, tokens: model(tokens), model, tokens)
    assert build_model(values, 49, shorten=True).positions == 48
