"""Weights that stay as their checkpoint stores them: what shares a scale, their numbers, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from coded_checkpoints import of_each_element
from haliax import Axis

from shardplan.decoder.names import evaluate
from shardplan.decoder.parameter_rules import parameter_rules
from shardplan.decoder.weight_blocks import blocks_of_rule
from shardplan.errors import ConfigError
from shardplan.model.dtypes.kept_weights import convert_blocks
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.huggingface.quantization import ByteCodes
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import abstract_module, build_model

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
E4M3 = ml_dtypes.float8_e4m3fn


class Numpy:
    """The operations of rules on NumPy's arrays."""

    reshape, transpose, concatenate, stack = map(staticmethod, (np.reshape, np.transpose, np.concatenate, np.stack))

    def slice(self, value, dimension, start, stop):
        return value.take(range(start, stop), axis=dimension)


@pytest.mark.slow
@pytest.mark.parametrize("block", [(16, 8), (24, 128), None], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "llama4_text", "gptj", "gpt_neox"])
def test_elements_of_a_block_share_a_scale(name, block):
    """Counted with arrays whose elements are the numbers of their scales."""
    model = build_model(read_config(str(FAMILIES / name / "config.json"), None), 8)
    codes = ByteCodes("fp8", (), "float8_e4m3fn", block)
    shapes = {path: leaf.array.shape for path, leaf in named_leaves(model.template)}

    def number_scales(stored):
        *others, rows, columns = stored.shape
        size = (1, columns) if block is None else block
        count = tuple(-(-n // each) for n, each in zip((rows, columns), size, strict=True))
        numbers = np.arange(math.prod([*others, *count])).reshape(-1, *count)
        of_matrices = [of_each_element(each, (rows, columns), size) for each in numbers]
        return np.stack(of_matrices).reshape(stored.shape) + sum(map(ord, stored.name)) * 100_000

    checked = 0
    for path, rule in parameter_rules(model.config, model.vocab.size).items():
        if not path.startswith("segments[") or not path.endswith(("proj.weight", "gate", "up", "down")):
            continue
        shape = shapes[path]
        numbers = evaluate(rule, number_scales, Numpy()).reshape(shape)
        blocks = blocks_of_rule(rule, codes, shape)
        for d, (n, length) in enumerate(zip(shape, blocks, strict=True)):
            assert n % length == 0
            by_block = np.moveaxis(numbers, d, -1).reshape(-1, n // length, length)
            assert (by_block == by_block[..., :1]).all(), (path, d)
        checked += max(blocks) > 1
    assert checked


@pytest.mark.slow
def test_blocks_of_deepseek_v3():
    """Blocks of 128 stay whole, but for heads of 192 channels, of which the rotated ones come first."""
    model = build_model(read_config("deepseek-v3", None, keeps_dtype=True), 8)
    shapes = {path.split("layers[0].")[-1]: leaf.array.shape for path, leaf in named_leaves(model.template)}
    assert shapes["self_attn.q_proj.weight.codes"] == (58, 128, 1, 192, 1536)
    assert shapes["self_attn.q_proj.weight.scales"] == (58, 128, 1, 3, 12)
    assert shapes["mlp.experts.down.scales"] == (58, 256, 16, 56)
    assert shapes["mlp.shared.up_proj.weight.scales"] == (58, 16, 56)
    assert "self_attn.q_a_norm.weight" in shapes and "mlp.router.weight" in shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "counts"),
    [((6, 8), (3, 2)), ((6, 8), (1, 1)), ((6, 8), (6, 1)), ((2, 6, 1, 8), (2, 3, 1, 8)), ((4,), (2,))],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_codes_times_scales(shape, counts, dtype):
    """Rounded once."""
    random = np.random.default_rng(0)
    codes = random.normal(size=shape).astype(E4M3)
    scales = random.uniform(0.01, 0.02, counts).astype(np.float32)
    factors = scales
    for d, (n, count) in enumerate(zip(shape, counts, strict=True)):
        factors = np.repeat(factors, n // count, axis=d)
    expected = (codes.astype(np.float32) * factors).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(convert_blocks(jnp.asarray(codes), jnp.asarray(scales), dtype)), expected)


def test_plain_modules_are_loaded_as_numbers():
    model = build_model(read_config(str(FAMILIES / "deepseek_v3_fp8" / "config.json"), None), 8)
    codes = ByteCodes("fp8", ("o_proj", "re:.*experts.5"), "float8_e4m3fn", (128, 128))
    module = abstract_module(replace(model.config, kept=codes), Axis("vocab", 64))
    paths = {path.split("layers[1].")[-1]: str(leaf.array.dtype) for path, leaf in named_leaves(module)}
    assert paths["self_attn.o_proj.weight"] == "float32"
    assert paths["mlp.experts.up"] == "float32"
    assert paths["mlp.shared.up_proj.weight.codes"] == "float8_e4m3fn"


LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 4}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (None, r"load.keep_dtype keeps weights in fp8, and .* has no quantization_config: weights are plain numbers"),
        ({"quant_method": "mxfp4"}, r"says that they are stored in mxfp4; leave it out: they are loaded as workload"),
        ({"quant_method": "awq"}, r"says that they are stored in awq;"),
        ({"quant_method": "gptq", "bits": 4}, r"says that they are stored in gptq;"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
            },
            r"says that they are stored in compressed-tensors \(int8\);",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(tmp_path, quantization, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | ({} if quantization is None else {"quantization_config": quantization})))
    with pytest.raises(ConfigError, match=message):
        read_config(str(path), None, keeps_dtype=True)


def test_other_classes_are_refused(tmp_path, raises_message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "fp8"}}))
    with raises_message(ConfigError):
        read_config(str(path), None, "levanter", keeps_dtype=True)


def test_training_is_refused(make_config, raises_message):
    with raises_message(ConfigError):
        make_config(model_config="deepseek-v3", workload_kind="train", load_keep_dtype=True)
