"""Headers of safetensors files: what the official library refuses, and what no reader can make sense of."""

import json
import random
import struct

import pytest
from safetensors import SafetensorError, deserialize

from shardplan.checkpoint.format.header import read_header
from shardplan.errors import CheckpointError

HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "\u00e9": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
    "z": {"dtype": "F16", "shape": [0, 5], "data_offsets": [33, 33]},
    "__metadata__": {"format": "pt"},
}
DATA = bytes(range(33))
VALUES = (
    0, 1, -1, 3, 24, 33, 2**31, 2**63, 2**64 - 1, 2**64, 1.0, 1e3, True, None, "x", [], {}, [0, 24], "F32", "F8_E8M0",
    "C64", "F64", "BOOL",
)  # fmt: skip
TEXTS = (
    b" ",
    b"{",
    b"}",
    b"\0",
    b"NaN",
    b"Infinity",
    b"\\ud800",
    b",",
    b'"a":1,',
    b"\t",
    b"-",
    b"1e2",
    b"\xff",
    b"\xef\xbb\xbf",
)


class Bytes:
    """A file in memory."""

    name = "model.safetensors"

    def __init__(self, content):
        self.content, self.size = content, len(content)

    def read_into(self, offset, buffer):
        buffer[:] = self.content[offset : offset + len(buffer)]


def written(header, data=DATA):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def changed_entries(rng):
    """Values, names and keys of the header are others."""
    header = json.loads(json.dumps(HEADER))
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(header))
        entry = header[name]
        if not isinstance(entry, dict) or rng.random() < 0.2:
            header[rng.choice([name, "c", "", "\0", "__metadata__"])] = rng.choice([entry, *VALUES])
        elif entry and rng.random() < 0.2:
            entry.pop(rng.choice(list(entry)))
        else:
            key = rng.choice(["dtype", "shape", "data_offsets", "extra"])
            listed = [rng.choice(VALUES) for _ in range(rng.randint(0, 4))]
            entry[key] = rng.choice([listed, rng.choice(VALUES)])
    return json.dumps(header, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def changed_text(rng):
    """Bytes of the header are others."""
    text = bytearray(json.dumps(HEADER).encode())
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(text)) if rng.random() < 0.8 else 0
        text[place : place + rng.randint(0, 3)] = rng.choice([*TEXTS, b"", bytes([rng.randrange(256)])])
    return bytes(text) + b" " * rng.randint(0, 3)


def mutated(rng):
    text = rng.choice([changed_entries, changed_text])(rng)
    data = DATA[: rng.randrange(34)] if rng.random() < 0.1 else DATA + bytes(rng.choice([0, 0, 0, 0, 3]))
    length = rng.choice([0, 1, len(text) - 1, 2**63, 2**64 - 1]) if rng.random() < 0.05 else len(text)
    whole = struct.pack("<Q", length) + text + data
    return whole[: rng.randrange(len(whole))] if rng.random() < 0.03 else whole


@pytest.mark.parametrize("seed", range(4))
def test_mutated_files(seed):
    """Nothing is accepted that the official library refuses, and no error is another than CheckpointError."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(2500):
        content = mutated(rng)
        try:
            found = read_header(Bytes(content))
        except CheckpointError:
            continue
        official = {name: (tuple(t["shape"]), t["dtype"], t["data"]) for name, t in deserialize(content)}
        assert official.keys() == found.keys()
        for name, tensor in found.items():
            data = content[tensor.offset : tensor.offset + tensor.nbytes]
            assert (tensor.shape, data) == (official[name][0], bytes(official[name][2]))
        accepted += 1
    assert accepted > 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1234567", "7 bytes is no safetensors file"),
        (struct.pack("<Q", 100), "its header claims 100 bytes, the file has 8"),
        (written(b"{"), "damaged header: Expecting property name"),
        (written(b'{"a": {}, "a": {}}'), "damaged header: a is there twice"),
        (written(b'{"a": NaN}'), "damaged header: NaN is no JSON"),
        (written(b"[1]"), "damaged header: "),
        (written({"__metadata__": {"x": 1}}, b""), "damaged header: __metadata__ must hold texts"),
        (
            written({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}),
            "a has type F4, which is not supported",
        ),
        (written({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}), "both must count"),
        (
            written({"a": {"dtype": "U8", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}}),
            "more numbers than can be",
        ),
        (written({"a": {"dtype": "U8", "shape": [40], "data_offsets": [0, 40]}}), "a lies outside the file"),
        (written({"a": {"dtype": "U8", "shape": [33], "data_offsets": [0, 32]}}), "a has 32 bytes for shape"),
        (written({"a": {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}}), "1 bytes after the last tensor"),
        (written({"a": {"dtype": "U8", "shape": [32], "data_offsets": [1, 33]}}), "what precedes ends at"),
    ],
)
def test_what_is_wrong_is_said(content, message):
    with pytest.raises(CheckpointError, match=f"^model.safetensors: .*{message}"):
        read_header(Bytes(content))
    with pytest.raises(SafetensorError):
        deserialize(content)
