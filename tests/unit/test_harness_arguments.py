"""Arguments of lm_eval's `hf` model, as people type them, among those of the model `shardplan`."""

import json

import numpy as np
import pytest

from shardplan.errors import ConfigError
from shardplan.eval.harness.hf_arguments import WITHOUT_EFFECT, TextArguments, read_text_arguments, translate
from shardplan.eval.harness.settings import read_settings


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"pretrained": "org/model", "revision": "main", "dtype": "float32"}, ("org/model", "float32")),
        ({"pretrained": "org/model", "revision": 2024, "dtype": "bfloat16"}, ("org/model@2024", "bfloat16")),
        ({"pretrained": "hf://org/model", "revision": "v1.0", "dtype": "half"}, ("hf://org/model@v1.0", "float16")),
        ({"pretrained": "org/model@a1", "revision": "a1", "dtype": "torch.float32"}, ("org/model@a1", "float32")),
        ({"model": {"ref": "org/model"}, "dtype": np.float32}, ("org/model", "float32")),
        ({"model.ref": "org/model", "pretrained": "org/model"}, ("org/model", None)),
    ],
)
def test_arguments_that_stand_for_keys(arguments, expected):
    keys = translate(arguments)
    ref, dtype = expected
    assert keys["model.ref"] == ref
    assert keys.get("workload.param_dtype") == keys.get("workload.compute_dtype") == dtype
    assert keys.keys() <= {"model.ref", "workload.param_dtype", "workload.compute_dtype"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"delta": "org/delta"},
            "delta cannot be used; merge the delta with the model, and name the merged",
        ),
        ({"load_in_4bit": True}, "load_in_4bit cannot be used; quantized weights are not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config cannot be used; quantized weights"),
        ({"mixed_precision_dtype": "bfloat16"}, "cannot be used; set workload.param_dtype and workload.compute_dtype"),
        ({"subfolder": "last"}, "subfolder cannot be used; name the folder itself as model.ref"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size cannot be used; set mesh.model"),
        ({"backend": "seq2seq"}, "backend is 'seq2seq'; only decoder models are supported, leave it out"),
        ({"softmax_dtype": "bfloat16"}, "softmax_dtype is 'bfloat16'; scores are computed in float32, leave it out"),
        ({"dtype": "float64"}, "dtype is 'float64'; valid: auto, bfloat16, float16, float32"),
        ({"dtype": "fp8"}, "dtype is 'fp8'; valid: auto, bfloat16, float16, float32"),
        ({"pretrained": "a/b", "model.ref": "a/c"}, "pretrained=a/b contradicts model.ref=a/c; leave one of them out"),
        (
            {"dtype": "float32", "workload": {"param_dtype": "bfloat16"}},
            "dtype=float32 contradicts workload.param_dtype",
        ),
        ({"pretrained": "a/b@1", "revision": "2"}, "revision=2 contradicts a/b@1; leave one of them out"),
        ({"pretrained": "gs://a/b", "revision": "2"}, "revision is 2, and gs://a/b is no repository of the hub"),
        ({"revision": "2"}, "revision is 2, and pretrained is not set; set pretrained"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ConfigError) as error:
        translate(arguments)
    assert str(error.value).startswith("model_args: ") and message in str(error.value)


@pytest.mark.slow
def test_an_adapter(raises_message):
    assert translate({"peft": "org/adapter"}) == {"model.adapter": "org/adapter"}
    with raises_message(ConfigError):
        translate({"peft": "org/a", "model.adapter": "org/b"})


def test_what_has_no_effect_is_said(caplog):
    arguments = {"parallelize": True, "trust_remote_code": True, "logits_cache": False, "peft": None, "delta": ""}
    same = {"backend": "causal", "softmax_dtype": "float32", "use_fast_tokenizer": True, "load_in_8bit": False}
    assert translate({**arguments, **same, "mesh.model": 2}) == {"mesh.model": 2}
    # an argument that is false, or not set, is as if it were left out
    assert [record.message for record in caplog.records] == [
        f"{name} is not used: {WITHOUT_EFFECT[name]}" for name in ("parallelize", "trust_remote_code")
    ]


def test_arguments_of_texts(raises_message):
    assert read_text_arguments({}) == TextArguments()
    given = {"tokenizer": "org/other", "chat_template_args": '{"mood": "calm"}', "enable_thinking": False}
    assert read_text_arguments(given) == TextArguments("org/other", {"mood": "calm", "enable_thinking": False})
    assert translate(given) == {}
    for wrong in ("mood", "[1]", "{"):
        with raises_message(ConfigError):
            read_text_arguments({"chat_template_args": wrong})
    for thinking in ({"enable_thinking": True}, {"chat_template_args": {"enable_thinking": True}}):
        with raises_message(ConfigError):
            read_text_arguments(thinking)


CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        (
            {"dtype": "float64"},
            "the dtype in the config.json of {} is 'float64'; set dtype to one of bfloat16, float16",
        ),
        ({}, "model_args: dtype is auto, and the dtype in the config.json of {} is not there; set dtype to one of"),
    ],
)
def test_the_type_auto_is_that_of_the_checkpoint(tmp_path, stored, expected):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **stored}))
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {{ref: {tmp_path}}}\n")
    if expected in ("float16", "float32", "bfloat16"):
        work = read_settings(str(file), 31, {"dtype": "auto"})[0].workload
        assert (work.param_dtype, work.compute_dtype, work.position) == (expected, expected, 32)
        return
    with pytest.raises(ConfigError) as error:
        read_settings(str(file), 31, {"dtype": "auto"})
    assert expected.format(tmp_path) in str(error.value)


def test_a_misspelt_argument_of_hf(raises_message):
    with raises_message(ConfigError):
        read_settings(None, None, {"pretraind": "org/model"})
