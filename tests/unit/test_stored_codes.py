"""Every way to store weights as codes that is read, against decoders in NumPy that share no code with the package."""

import numpy as np
import pytest
from stored_forms import CASES, FP8, IN, OUT, byte_codes, compressed, decoded, gptq

from shardplan.checkpoint.mapping.views import tensor_view
from shardplan.checkpoint.transfer.reads.reading import ReadTarget, plan_reads, run_read
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model.huggingface.read_quantization import read_modelopt_file, read_quantization


def values_of(view, tensors, max_bytes=100):
    target = ReadTarget((0,) * len(view.shape), np.zeros(view.shape, np.float32))
    for each in plan_reads(view, tensors, [target], max_bytes):
        run_read(each)
    return target.buffer


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_numbers(case):
    """Whole, transposed, in parts, in every second column, and over the ends of rows."""
    make, *arguments = CASES[case]
    config, tensors, expected = make(*arguments)
    index, not_read = decoded(config, tensors)
    assert [*index.tensors] == ["w.weight"] and set(not_read) == tensors.keys() & {"w.input_scale"}
    tensor = index.tensors["w.weight"]
    assert tensor.shape == expected.shape
    view = tensor.view("w.weight") or tensor_view("w.weight", tensor.shape)
    for changed, values in (
        (view, expected),
        (view.transpose((1, 0)), expected.T),
        (view.slice((3, 5), (14, 43)), expected[3:14, 5:43]),
        (view.reshape((3, 8, 4, 16)).transpose((2, 0, 3, 1)), expected.reshape(3, 8, 4, 16).transpose(2, 0, 3, 1)),
        (view.reshape((OUT, IN // 2, 2)).slice((0, 0, 1), (OUT, IN // 2, 2)), expected[:, 1::2].reshape(OUT, -1, 1)),
    ):
        for max_bytes in (20, 10**6):
            np.testing.assert_array_equal(values_of(changed, index.tensors, max_bytes), values)


def test_scales_of_many_tensors_are_one_read():
    """Of 100 tensors whose scales lie side by side, as in files that safetensors wrote."""
    tensors, expected = {}, {}
    for i in range(100):
        config, parts, numbers = byte_codes("compressed-tensors", FP8, (OUT, 1))
        tensors |= {f"{i}.{name}": values for name, values in parts.items()}
        expected[f"{i}.w.weight"] = numbers
    index, _ = decoded(config, dict(sorted(tensors.items(), key=lambda each: -np.asarray(each[1]).itemsize)))
    for name, numbers in expected.items():
        np.testing.assert_array_equal(values_of(tensor_view(name, numbers.shape), index.tensors, 10**6), numbers)
    assert len(index.tensors["0.w.weight"].file.reads) == len(expected) + 1


def change(case, **changes):
    make, *arguments = CASES[case]
    config, tensors, _ = make(*arguments)
    tensors = dict(tensors)
    for name, value in changes.items():
        key = f"w.{name}"
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value(tensors[key]) if callable(value) else value
    return config, tensors


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("packed-4-16-symmetric", {"weight_scale": None}, "w has codes without w.weight_scale"),
        ("packed-4-16-symmetric", {"weight_shape": None}, "w has codes without w.weight_shape"),
        ("packed-4-16-symmetric", {"weight_packed": lambda t: t[:, :-2]}, r"weight_scale has the shape \[24, 4\]"),
        ("packed-4-16-symmetric", {"weight_packed": lambda t: t[:0]}, r"\[0, 8\]; codes have 2 dimensions"),
        ("packed-4-16-symmetric", {"weight": np.zeros(3, np.float32)}, "w.weight is stored both as it is and as codes"),
        ("packed-4-16-zeros", {"weight_zero_point": None}, "w has codes without w.weight_zero_point"),
        ("packed-4-16-zeros", {"weight_zero_point": lambda t: t[:1]}, r"weight_zero_point has the shape \[1, 4\]"),
        ("gptq-4-16-act-order", {"g_idx": None}, "w has codes without w.g_idx"),
        ("gptq-4-16-act-order", {"g_idx": lambda t: t[1:]}, r"g_idx has the shape \[63\]; .* it is \[64\]"),
        ("gptq-4-16-in-order", {"qzeros": lambda t: t.astype(np.int64)}, "qzeros is stored as int64; it must be int32"),
        ("gptq-4-16-in-order", {"qweight": lambda t: t.reshape(-1)}, r"has the shape \[192\]; codes have 2 dimensions"),
        ("awq", {"scales": lambda t: t[:1]}, r"scales has the shape \[1, 24\]; .* it is \[4, 24\]"),
        ("awq", {"qzeros": None}, "w has codes without w.qzeros"),
        ("nvfp4", {"weight_global_scale": None}, "w has codes without w.weight_global_scale"),
        ("nvfp4", {"weight_scale": lambda t: t.astype(np.float32)}, "is stored as float32; it must be float8"),
        ("modelopt-nvfp4", {"weight": lambda t: t[:, :-8]}, r"the shape \[24, 4\]; .* it is \[24, 3\]"),
        ("int8", {"weight_scale": lambda t: t[:5]}, r"weight_scale has the shape \[5, 1\]"),
        ("int8", {"weight_scale": None}, "is stored as int8 without scales"),
        ("fp8-blocks", {"weight_scale": lambda t: t[:, :3]}, r"with blocks of \[16, 16\] it has \[2, 4\]"),
    ],
)  # fmt: skip
def test_damaged_parts_are_refused(case, changes, message):
    with pytest.raises(CheckpointError, match=message):
        decoded(*change(case, **changes))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gptq-4-16-act-order", {"g_idx": lambda t: t + 1}, r"w.g_idx has 4 as the group of row \d+, and there are 4"),
        ("gptq-4-16-in-order", {"g_idx": lambda t: t - 1}, "w.g_idx has -1 as the group of row 0"),
        ("nvfp4", {"weight_global_scale": lambda t: t * 0}, "w.weight_global_scale has 0 as scale 0"),
        ("nvfp4", {"weight_scale": lambda t: t * 0}, "w.weight_scale has 0 as scale 0"),
        ("awq", {"scales": lambda t: t * np.nan}, "w.scales has nan as scale 0"),
        ("fp8-rows", {"weight_scale": lambda t: t * np.float32(1e37)}, "with which numbers are infinite"),
        ("packed-8-None-symmetric", {"weight_scale": lambda t: -t}, "w.weight_scale has -.* as scale 0"),
    ],
)
def test_damaged_values_are_refused(case, changes, message):
    index, _ = decoded(*change(case, **changes))
    tensor = index.tensors["w.weight"]
    with pytest.raises(CheckpointError, match=message):
        values_of(tensor.view("w.weight") or tensor_view("w.weight", tensor.shape), index.tensors)


def test_layers_are_stored_alike(raises_message):
    """A plain weight beside codes of the same name in another layer is refused, unless config.json lists it."""
    config, tensors, numbers = byte_codes("compressed-tensors", FP8, (OUT, 1))
    both = {f"layers.0.{name}": each for name, each in tensors.items()} | {"layers.1.w.weight": numbers}
    with raises_message(CheckpointError):
        decoded(config, both)
    index, _ = decoded({**config, "ignore": ["layers.1.w"]}, both)
    assert [*index.tensors] == ["layers.1.w.weight", "layers.0.w.weight"]


def test_groups_of_inputs_follow_the_file():
    """Also where config.json does not say that inputs are in another order."""
    config, tensors, expected = gptq(4, 16, "gptq", True)
    index, _ = decoded({**config, "desc_act": False}, tensors)
    np.testing.assert_array_equal(values_of(index.tensors["w.weight"].view("w.weight"), index.tensors), expected)


WEIGHTS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"\(bitsandbytes\), and weights that are quantized so are not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; it must be 4 or 8"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size is 0; it must be a positive integer, or -1"),
        ({"quant_method": "gptq", "desc_act": "no"}, "desc_act is 'no'; it must be true or false"),
        ({"quant_method": "gptq", "groupsize": 32}, "groupsize is not known; did you mean 'group_size'"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; it must be 'gemm'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point is False; it must be True"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ'; it must be 'FP8' or"),
        ({"quant_method": "modelopt"}, "quant_algo is None; it must be 'FP8' or 'NVFP4'"),
        ({"quant_method": "fp8", "ignore": ["re:("]}, r"lists 're:\(', which is no regular expression"),
        (compressed("marlin-24", WEIGHTS), "format is 'marlin-24'; it must be 'pack-quantized' or"),
        (compressed("pack-quantized", WEIGHTS | {"actorder": "group"}), r"in the order of their activations"),
        (compressed("pack-quantized", WEIGHTS | {"num_bits": 3}), "num_bits is 3; it must be 4 or 8"),
        (compressed("pack-quantized", {**WEIGHTS, "group_size": None}), "has strategy 'group' and no group_size"),
        (compressed("pack-quantized", {**WEIGHTS, "group": 2}), "weights.group is not known"),
        (compressed("pack-quantized", WEIGHTS) | {"config_groups": {}}, "config_groups has 0 ways to store weights"),
        (compressed("pack-quantized", WEIGHTS) | {"config_groups": "all"}, "is 'all'; it must be a mapping"),
        (compressed("pack-quantized", WEIGHTS) | {"sparsity_config": {"format": "sparse"}}, "sparsity_config"),
        (compressed("pack-quantized", WEIGHTS) | {"transform_config": {"r": 1}}, "transform_config is .*not supported"),
        (compressed("int-quantized", {"type": "int", "num_bits": 8, "symmetric": False}), "symmetric is False"),
        (compressed("float-quantized", {"type": "float", "strategy": "block"}), "'block' and block_structure None"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        read_quantization({"quantization_config": config}, "config.json")


def test_groups_of_one_kind(raises_message):
    """Groups that differ in activations alone are one way to store weights, and others are two."""
    config = compressed("pack-quantized", WEIGHTS)
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**group, "input_activations": None}
    assert read_quantization({"quantization_config": config}, "config.json").group == 16
    config["config_groups"]["group_1"] = {**group, "weights": {**WEIGHTS, "num_bits": 8}}
    with raises_message(ConfigError):
        read_quantization({"quantization_config": config}, "config.json")


def test_a_file_of_model_optimizer(raises_message):
    found = read_modelopt_file(
        b'{"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}',
        "f",
    )
    assert found.is_plain("lm_head.weight") and not found.is_plain("model.layers.0.mlp.up_proj.weight")
    assert read_modelopt_file(b'{"quantization": {"quant_algo": null}}', "f") is None
    with raises_message(ConfigError):
        read_modelopt_file(b'{"quantization": 3}', "f")
