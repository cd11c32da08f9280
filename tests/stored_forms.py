"""Every way to store weights as codes that is read, with their numbers by NumPy, sharing no code with the package."""

import ml_dtypes
import numpy as np
from coded_checkpoints import E2M1, MemoryFile

from shardplan.checkpoint.format.codecs.decode_index import decode_index
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex
from shardplan.model.huggingface.read_quantization import read_quantization

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
