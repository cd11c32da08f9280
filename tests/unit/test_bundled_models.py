"""The bundled config.json files: each is a model of the published size, and can be planned."""

import math

import pytest

from shardplan.errors import InfeasibleError
from shardplan.hardware import GENERATIONS, GIB, standard_slices
from shardplan.model.bundled_configs import BUNDLED, HUB_NAMES, bundled_name
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.huggingface.model_types import SUPPORTED_TYPES
from shardplan.model.inspect import inspect_model
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.search.make_plan import make_plan

PUBLISHED = {
    "apertus-8b": 8.05, "aya-23-8b": 8.03, "command-a": 111, "command-r": 35, "command-r7b": 8.03, "deepseek-v2": 236,
    "deepseek-v2-lite": 15.7, "deepseek-v3": 671, "deepseek-v3.2": 671, "dots.llm1": 142, "ernie-4.5-21b-a3b": 21.8,
    "exaone-4.0-32b": 32.0, "gemma-2-27b": 27.2, "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2b": 2.51,
    "gemma-3-12b": 11.8, "gemma-3-1b": 1.0, "gemma-3-27b": 27.0, "gemma-3-4b": 3.88, "gemma-7b": 8.54,
    "glm-4-32b-0414": 32.6, "glm-4-9b": 9.4, "glm-4-9b-0414": 9.4, "glm-4.5": 355, "glm-4.5-air": 106,
    "glm-4.7-flash": 30, "glm-5": 744, "gpt-j-6b": 6.05, "gpt-neox-20b": 20.55, "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9, "gpt2": 0.124, "gpt2-large": 0.774, "gpt2-medium": 0.355, "gpt2-xl": 1.558,
    "granite-3.1-2b": 2.53, "granite-3.1-8b": 8.17, "hunyuan-a13b": 80, "hy3-preview": 295, "kimi-k2": 1040,
    "llama-2-13b": 13.0, "llama-2-70b": 69.0, "llama-2-7b": 6.74, "llama-3-70b": 70.6, "llama-3-8b": 8.03,
    "llama-3.1-405b": 405, "llama-3.1-70b": 70.6, "llama-3.1-8b": 8.03, "llama-3.1-8b-1m": 8.03, "llama-3.2-1b": 1.23,
    "llama-3.2-3b": 3.21, "llama-3.3-70b": 70.6, "llama-4-maverick": 400, "llama-4-scout": 109, "minimax-m2": 230,
    "ministral-3-3b": 3.4, "ministral-3-8b": 8.4, "mistral-7b-v0.1": 7.24, "mistral-7b-v0.3": 7.25,
    "mistral-nemo-12b": 12.2, "mistral-small-24b": 23.6, "mistral-small-4-119b": 119, "mixtral-8x22b": 141,
    "mixtral-8x7b": 46.7, "moonlight-16b": 16, "nsa-125m": 0.116, "olmo-3-32b": 32.2, "olmo-3-7b": 7.3,
    "olmo2-13b": 13.7, "olmo2-32b": 32.2, "olmo2-7b": 7.3, "olmoe-1b-7b": 6.92, "opt-1.3b": 1.3, "opt-125m": 0.125,
    "opt-13b": 13, "opt-2.7b": 2.7, "opt-30b": 30, "opt-6.7b": 6.7, "opt-66b": 66, "phi-1.5": 1.42, "phi-2": 2.78,
    "phi-3-mini-4k": 3.82, "phi-3.5-mini": 3.82, "phi-4": 14.7, "phi-4-mini": 3.84, "pythia-1.4b": 1.415,
    "pythia-12b": 11.846, "pythia-160m": 0.1623, "pythia-1b": 1.0118, "pythia-2.8b": 2.7752, "pythia-410m": 0.4053,
    "pythia-6.9b": 6.8573, "pythia-70m": 0.0704, "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5, "qwen2.5-3b": 3.09, "qwen2.5-72b": 72.7, "qwen2.5-7b": 7.61, "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7, "qwen3-14b": 14.8, "qwen3-235b-a22b": 235, "qwen3-30b-a3b": 30.5, "qwen3-32b": 32.8,
    "qwen3-4b": 4.0, "qwen3-8b": 8.2, "seed-oss-36b": 36.2, "smollm2-1.7b": 1.71, "smollm2-135m": 0.135,
    "smollm2-360m": 0.362, "smollm3-3b": 3.08, "stablelm-2-1.6b": 1.644, "stablelm-3b-4e1t": 2.795,
    "starcoder2-15b": 16.0, "starcoder2-3b": 3.03, "starcoder2-7b": 7.17, "tinyllama-1.1b": 1.1,
}  # fmt: skip
"""Name -> parameters as published, in billions: by the model's card or paper; of Gemma 3 and Ministral 3 the text.

Of Llama 4, the image model is among them, less than one of the billions. Nobody published nsa-125m, which is the model
of two reports of training runs.
"""
SPREAD = ("command-r7b", "gpt-neox-20b", "ministral-3-3b", "mixtral-8x22b", "pythia-70m", "qwen2.5-72b")
"""Models of several families and sizes, which are planned in every run."""
GENERATION = GENERATIONS["v6e"]
PARAMETER_BYTES = 2
"""Of a parameter as evaluations store it, in bfloat16."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED)
def test_the_parameters_are_as_many_as_published(name):
    model = build_model(read_config(name, None), 1)
    assert inspect_model(model).size == pytest.approx(PUBLISHED[name] * 1e9, rel=0.02)


def test_every_model_type_has_a_bundled_model():
    assert {read_config(name, None)["model_type"] for name in BUNDLED} == set(SUPPORTED_TYPES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SPREAD else pytest.mark.whole) for name in BUNDLED]
)
def test_its_evaluation_fits_a_slice(name, make_config):
    plan = smallest_plan(name, make_config)
    arrays = plan.parameters
    total = sum(math.prod(array.axes.values()) for array in arrays) * PARAMETER_BYTES
    assert total == pytest.approx(PUBLISHED[name] * 1e9 * PARAMETER_BYTES, rel=0.02)
    on_device = sum(array.bytes_per_device for array in arrays)
    assert total <= on_device * plan.hardware.devices and on_device == plan.memory.parameters
    assert plan.memory.fits


def smallest_plan(name, make_config):
    """Plan the evaluation of a bundled model on the smallest slice that it fits."""
    for each in standard_slices(GENERATION):
        if PUBLISHED[name] * 1e9 * PARAMETER_BYTES < each.devices * GENERATION.hbm_gib * GIB:
            config = make_config(model_config=name, hardware_slice=each.name, workload_batch=each.devices)
            try:
                return make_plan(config)
            except InfeasibleError:
                continue
    raise AssertionError(f"{name} fits no slice")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("command-r", {"model_max_length": 131072}),
        ("gpt2", {"n_ctx": 1024, "n_special": 0, "predict_special_tokens": True}),
        ("smollm2-135m", {"is_llama_config": True, "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}),
    ],
)
def test_keys_of_the_release_that_say_nothing(name, keys):
    """Neither Levanter's classes nor the families of the decoder refuse them."""
    for model_class in (None, LEVANTER):
        config = read_config(name, None, model_class)
        plain = {key: value for key, value in config.items() if key not in keys}
        model = build_model({**plain, **keys}, 1)
        assert inspect_model(model) == inspect_model(build_model(plain, 1))


def test_repositories_have_one_bundled_model_each():
    repositories = [repository for each in HUB_NAMES.values() for repository in each]
    assert len(set(map(str.lower, repositories))) == len(repositories)
    for name, each in HUB_NAMES.items():
        assert {bundled_name(repository) for repository in each} == {name}
    assert bundled_name("meta-llama/Llama-3-8B") == "llama-3-8b"
    assert bundled_name("somebody/Meta-Llama-3-8B") is None
