"""Checkpoints in fp8 as tests write and read them, by NumPy alone: safetensors' loader for it has no such type."""

import dataclasses
import json

import ml_dtypes
import numpy as np

from shardplan.storage.folder import REMOTE

TYPES = {
    "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "I32": np.int32,
    "U8": np.uint8, "I64": np.int64, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
}  # fmt: skip
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


def numbers_of(tensors):
    """The tensors of a checkpoint with numbers in place of codes of four bits, as its release says."""
    result = dict(tensors)
    for name in list(tensors):
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            codes, scales = halves(result.pop(name)), result.pop(f"{base}_scales").astype(np.int32) - 127
            codes = codes.reshape(*scales.shape, 32)
            values = E2M1[codes] * np.exp2(scales.astype(np.float32))[..., None]
            result[base] = np.swapaxes(values.reshape(*scales.shape[:-1], -1), -1, -2)
        elif name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            codes, scales = halves(result.pop(name)), np.float32(result.pop(f"{base}_scale"))
            result.pop(f"{base}_shape")
            result[base] = (codes.astype(np.float32) - 8) * np.repeat(scales, codes.shape[1] // scales.shape[1], 1)
        elif name.endswith(".qweight"):
            base = name.removesuffix(".qweight")
            words, scales = result.pop(name), np.float32(result.pop(f"{base}.scales"))
            zeros, index = halves(result.pop(f"{base}.qzeros")), result.pop(f"{base}.g_idx", None)
            if index is None:  # AWQ
                order = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
                codes, zeros = (
                    each.reshape(len(each), -1, 8)[:, :, order].reshape(each.shape) for each in (halves(words), zeros)
                )
                index = np.arange(len(codes)) // (len(codes) // len(scales))
            else:
                codes = halves(words.T.copy()).T
                zeros = zeros.astype(np.int32) + 1
            result[f"{base}.weight"] = ((codes.astype(np.float32) - zeros[index]) * scales[index]).T
    return result


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def halves(array):
    """The halves of the bytes of the last dimension, the low one first."""
    data = np.ascontiguousarray(array).view(np.uint8)
    return np.stack([data & 15, data >> 4], -1).reshape(*array.shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class MemoryFile:
    """A file in memory."""

    data: bytes
    name: str = "memory"
    version: str = "1"
    tuning = REMOTE
    is_shared: bool = True
    reads: list = dataclasses.field(default_factory=list)

    @property
    def size(self):
        return len(self.data)

    def read_into(self, offset, buffer):
        self.reads.append((offset, len(buffer)))
        buffer[:] = self.data[offset : offset + len(buffer)]
