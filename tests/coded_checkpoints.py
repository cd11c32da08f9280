"""Checkpoints in fp8 as tests write and read them, by NumPy alone: safetensors' loader for it has no such type."""

import json

import ml_dtypes
import numpy as np

TYPES = {"F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "I32": np.int32}
NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}
SCALE = "_scale_inv"


def read_stored(path):
    """Name -> array of a safetensors file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        arrays[name] = np.frombuffer(data[end + first : end + last], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def write_stored(folder, tensors, config):
    """Write a checkpoint in a new folder, and return the folder."""
    folder.mkdir()
    entries, size = {}, 0
    for name, array in tensors.items():
        entries[name] = {
            "dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": [size, size + array.nbytes]
        }  # fmt: skip
        size += array.nbytes
    header = json.dumps(entries).encode()
    data = b"".join(array.tobytes() for array in tensors.values())
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantized(tensors, block, dtype=ml_dtypes.float8_e4m3fn):
    """The tensors with codes and scales of blocks in place of matrices; the scales are random."""
    random = np.random.default_rng(0)
    result = {}
    for name, array in tensors.items():
        if array.ndim != 2:
            result[name] = array
            continue
        count = [-(-size // length) for size, length in zip(array.shape, block, strict=True)]
        scales = random.uniform(0.01, 0.02, count).astype(np.float32)
        result[name] = (array / of_each_element(scales, array.shape, block)).astype(dtype)
        result[name + SCALE] = scales
    return result


def dequantized(tensors, block=(128, 128)):
    """The tensors with codes times the scales of their blocks, as the release of DeepSeek-V3 says."""
    result = {}
    for name, array in tensors.items():
        scales = tensors.get(name + SCALE)
        if not name.endswith(SCALE):
            factors = 1 if scales is None else of_each_element(scales, array.shape, block)
            result[name] = array.astype(np.float32) * np.float32(factors)
    return result


def of_each_element(scales, shape, block):
    """The scale of every element of a matrix."""
    rows, columns = (np.arange(size) // length for size, length in zip(shape, block, strict=True))
    return scales[np.ix_(rows, columns)]
