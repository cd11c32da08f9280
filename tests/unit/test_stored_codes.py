"""Every way to store weights as codes that is read, against decoders in NumPy that share no code with the package."""

import ml_dtypes
import numpy as np
import pytest
from coded_checkpoints import E2M1, MemoryFile

from shardplan.checkpoint.format.codecs.decode_index import decode_index
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex
from shardplan.checkpoint.mapping.views import tensor_view
from shardplan.checkpoint.transfer.reading import ReadTarget, plan_reads, run_read
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model.huggingface.read_quantization import read_modelopt_file, read_quantization

OUT, IN = 24, 64
RANDOM = np.random.default_rng(7)


def words(codes, bits):
    """Pack codes along the last dimension into int32, the first code in the lowest bits."""
    in_word = 32 // bits
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, in_word)
    packed = np.zeros(parts.shape[:-1], np.uint32)
    for i in range(in_word):
        packed |= parts[..., i] << np.uint32(bits * i)
    return packed.view(np.int32)


def scales_of(shape, dtype=np.float32):
    return RANDOM.uniform(0.5, 2, shape).astype(dtype)


def packed_integers(bits, group, is_symmetric):
    """compressed-tensors, pack-quantized."""
    codes = RANDOM.integers(0, 2**bits, (OUT, IN))
    groups = IN // (group or IN)
    scales = scales_of((OUT, groups), ml_dtypes.bfloat16)
    zeros = np.full((OUT, groups), 2 ** (bits - 1)) if is_symmetric else RANDOM.integers(0, 2**bits, (OUT, groups))
    tensors = {
        "w.weight_packed": words(codes, bits), "w.weight_scale": scales,
        "w.weight_shape": np.array([OUT, IN], np.int64),
    }  # fmt: skip
    if not is_symmetric:
        tensors["w.weight_zero_point"] = words(zeros.T, bits).T
    weights = {"type": "int", "num_bits": bits, "symmetric": is_symmetric, "actorder": "weight"}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    each = np.arange(IN) // (group or IN)
    numbers = (codes - zeros[:, each]).astype(np.float32) * scales.astype(np.float32)[:, each]
    return compressed("pack-quantized", weights), tensors, numbers


def compressed(form, weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"],
        "sparsity_config": {}, "transform_config": {}, "version": "0.10.3", "kv_cache_scheme": None,
    }  # fmt: skip


def gptq(bits, group, version, has_order):
    codes = RANDOM.integers(0, 2**bits, (IN, OUT))
    groups = IN // (group or IN)
    zeros, scales = RANDOM.integers(0, 2**bits, (groups, OUT)), scales_of((groups, OUT), np.float16)
    order = np.arange(IN) // (group or IN)
    if has_order:
        order = RANDOM.permutation(order)
    tensors = {
        "w.qweight": words(codes.T, bits).T, "w.qzeros": words(zeros, bits), "w.scales": scales,
        "w.g_idx": order.astype(np.int32),
    }  # fmt: skip
    zeros = zeros + (1 if version == "gptq" else 0)
    numbers = (codes - zeros[order]).astype(np.float32) * scales.astype(np.float32)[order]
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": has_order, "sym": False}
    return config | {"checkpoint_format": version}, tensors, numbers.T


def awq(group):
    codes = RANDOM.integers(0, 16, (IN, OUT))
    groups = IN // (group or IN)
    zeros, scales = RANDOM.integers(0, 16, (groups, OUT)), scales_of((groups, OUT), np.float16)
    pack = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "w.qweight": words(codes.reshape(IN, -1, 8)[:, :, pack].reshape(IN, OUT), 4),
        "w.qzeros": words(zeros.reshape(groups, -1, 8)[:, :, pack].reshape(groups, OUT), 4), "w.scales": scales,
    }  # fmt: skip
    each = np.arange(IN) // (group or IN)
    numbers = (codes - zeros[each]).astype(np.float32) * scales.astype(np.float32)[each]
    return {"quant_method": "awq", "bits": 4, "group_size": group or -1, "version": "gemm"}, tensors, numbers.T


def nvfp4(is_modelopt):
    codes = RANDOM.integers(0, 16, (OUT, IN))
    scales = scales_of((OUT, IN // 16)).astype(ml_dtypes.float8_e4m3fn)
    common = np.array([0.37], np.float32)
    stored = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    factor = scales.astype(np.float32) * common if is_modelopt else scales.astype(np.float32) / common
    numbers = E2M1[codes] * np.repeat(factor, 16, axis=1)
    if is_modelopt:
        tensors = {"w.weight": stored, "w.weight_scale": scales, "w.weight_scale_2": common.reshape(())}
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, tensors, numbers
    tensors = {"w.weight_packed": stored, "w.weight_scale": scales, "w.weight_global_scale": common}
    weights = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    return compressed("nvfp4-pack-quantized", weights), tensors, numbers


def byte_codes(method, dtype, scale_shape):
    codes = (RANDOM.normal(size=(OUT, IN)) * 20).astype(dtype)
    scales = scales_of(scale_shape)
    tensors = {"w.weight": codes, "w.weight_scale": scales, "w.input_scale": np.float32(3)}
    factors = np.repeat(np.repeat(scales, 16, 0)[:OUT], 16, 1) if scale_shape == (2, 4) else scales
    weights = {"type": "int" if dtype == np.int8 else "float", "num_bits": 8, "symmetric": True}
    strategy = {(): "tensor", (OUT, 1): "channel", (2, 4): "block"}[scale_shape]
    weights |= {"strategy": strategy, "block_structure": [16, 16] if strategy == "block" else None}
    config = {
        "compressed-tensors": compressed("int-quantized" if dtype == np.int8 else "float-quantized", weights),
        "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    }[method]
    return config, tensors, codes.astype(np.float32) * factors


FP8 = ml_dtypes.float8_e4m3fn
CASES = {
    **{
        f"packed-{bits}-{group}-{'symmetric' if symmetric else 'zeros'}": (packed_integers, bits, group, symmetric)
        for bits in (4, 8) for group in (16, None) for symmetric in (True, False)
    },
    **{
        f"{version}-{bits}-{group}-{'act-order' if has_order else 'in-order'}": (gptq, bits, group, version, has_order)
        for bits, version in ((4, "gptq"), (4, "gptq_v2"), (8, "gptq"))
        for group, has_order in ((16, False), (None, False), (16, True))
    },
    "awq": (awq, 16), "awq-all": (awq, None), "nvfp4": (nvfp4, False), "modelopt-nvfp4": (nvfp4, True),
    "int8": (byte_codes, "compressed-tensors", np.int8, (OUT, 1)),
    "fp8-rows": (byte_codes, "compressed-tensors", FP8, (OUT, 1)),
    "fp8-tensor": (byte_codes, "compressed-tensors", FP8, ()),
    "fp8-blocks": (byte_codes, "compressed-tensors", FP8, (2, 4)),
    "fbgemm": (byte_codes, "fbgemm_fp8", FP8, (OUT, 1)), "modelopt-fp8": (byte_codes, "modelopt", FP8, ()),
}  # fmt: skip


def stored(tensors):
    """An index of tensors in memory."""
    data, entries = bytearray(), {}
    for name, values in tensors.items():
        values = np.asarray(values)
        entries[name] = len(data), values.shape, values.dtype
        data += np.ascontiguousarray(values).tobytes()
    memory = MemoryFile(bytes(data))
    return TensorIndex({name: Tensor(memory, *entry) for name, entry in entries.items()})


def decoded(config, tensors):
    return decode_index(stored(tensors), read_quantization({"quantization_config": config}, "config.json"), "here")


def values_of(view, tensors, max_bytes=100):
    target = ReadTarget((0,) * len(view.shape), np.zeros(view.shape, np.float32))
    for each in plan_reads(view, tensors, [target], max_bytes):
        run_read(each)
    return target.buffer


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


def test_layers_are_stored_alike():
    """A plain weight beside codes of the same name in another layer is refused, unless config.json lists it."""
    config, tensors, numbers = byte_codes("compressed-tensors", FP8, (OUT, 1))
    both = {f"layers.0.{name}": each for name, each in tensors.items()} | {"layers.1.w.weight": numbers}
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.w\.weight is stored as float32, and layers\.0\.w\.weight as"
    ):
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


def test_groups_of_one_kind():
    """Groups that differ in activations alone are one way to store weights, and others are two."""
    config = compressed("pack-quantized", WEIGHTS)
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**group, "input_activations": None}
    assert read_quantization({"quantization_config": config}, "config.json").group == 16
    config["config_groups"]["group_1"] = {**group, "weights": {**WEIGHTS, "num_bits": 8}}
    with pytest.raises(ConfigError, match="config_groups has 2 ways to store weights"):
        read_quantization({"quantization_config": config}, "config.json")


def test_a_file_of_model_optimizer():
    found = read_modelopt_file(
        b'{"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}',
        "f",
    )
    assert found.is_plain("lm_head.weight") and not found.is_plain("model.layers.0.mlp.up_proj.weight")
    assert read_modelopt_file(b'{"quantization": {"quant_algo": null}}', "f") is None
    with pytest.raises(ConfigError, match=r"f has no quantization\.quant_algo"):
        read_modelopt_file(b'{"quantization": 3}', "f")
