"""`read_header` refuses every safetensors file that the official library refuses, and names the broken rule."""

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
ENTRY = b'{"dtype": "U8", "shape": [33], "data_offsets": [0, 33]}'
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
    """A `File` in memory."""

    name = "model.safetensors"

    def __init__(self, content):
        self.content, self.size = content, len(content)

    def read_into(self, offset, buffer):
        buffer[:] = self.content[offset : offset + len(buffer)]


def encode(header, data=DATA):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def change_entries(rng):
    """Change values, names and keys of the header."""
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


def change_text(rng):
    """Change bytes of the header."""
    text = bytearray(json.dumps(HEADER).encode())
    for _ in range(rng.randint(1, 3)):
        position = rng.randrange(len(text)) if rng.random() < 0.8 else 0
        text[position : position + rng.randint(0, 3)] = rng.choice([*TEXTS, b"", bytes([rng.randrange(256)])])
    return bytes(text) + b" " * rng.randint(0, 3)


def mutate(rng):
    text = rng.choice([change_entries, change_text])(rng)
    data = DATA[: rng.randrange(34)] if rng.random() < 0.1 else DATA + bytes(rng.choice([0, 0, 0, 0, 3]))
    length = rng.choice([0, 1, len(text) - 1, 2**63, 2**64 - 1]) if rng.random() < 0.05 else len(text)
    content = struct.pack("<Q", length) + text + data
    return content[: rng.randrange(len(content))] if rng.random() < 0.03 else content


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_mutated_files(seed):
    """A file that the official library refuses is refused, always with CheckpointError; others are read alike."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(2500):
        content = mutate(rng)
        try:
            tensors = read_header(Bytes(content))
        except CheckpointError:
            continue
        official = {name: (tuple(t["shape"]), t["dtype"], t["data"]) for name, t in deserialize(content)}
        assert official.keys() == tensors.keys()
        for name, tensor in tensors.items():
            data = content[tensor.offset : tensor.offset + tensor.nbytes]
            assert (tensor.shape, data) == (official[name][0], bytes(official[name][2]))
        accepted += 1
    assert accepted > 50


def test_a_tensor_that_occurs_twice(raises_message):
    """The official library takes the last of them."""
    with raises_message(CheckpointError):
        read_header(Bytes(encode(b'{"a": %b, "a": %b}' % (ENTRY, ENTRY))))


def test_a_pointer_of_git_lfs(raises_message):
    """What a clone without Git LFS has in place of every shard."""
    with raises_message(CheckpointError):
        read_header(Bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1234567", "7 bytes is too short for a safetensors file"),
        (struct.pack("<Q", 100), "its header claims 100 bytes, the file has 8"),
        (encode(b"{"), "damaged header: Input data was truncated"),
        (encode(b'{"a": {"dtype": "U8", %b}' % ENTRY[1:]), "damaged header: duplicate key 'dtype'; download it again"),
        (encode(b'{"a": NaN}'), r"damaged header: JSON is malformed: invalid character \(byte 6\)"),
        (encode(b"[1]"), "damaged header: "),
        (encode({"__metadata__": {"x": 1}}, b""), "damaged header: __metadata__ must map names to strings"),
        (
            encode({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}),
            "a has type F4, which is not supported",
        ),
        (encode({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}), "both must be lists of non-neg"),
        (
            encode({"a": {"dtype": "U8", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}}),
            "whose size in bytes exceeds 64 bits",
        ),
        (
            encode({"a": {"dtype": "U8", "shape": [40], "data_offsets": [0, 40]}}),
            "a lies outside the file; it is truncated",
        ),
        (encode({"a": {"dtype": "U8", "shape": [33], "data_offsets": [0, 32]}}), "a has 32 bytes for shape"),
        (encode({"a": {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}}), "1 bytes after the last tensor"),
        (
            encode({"a": {"dtype": "U8", "shape": [32], "data_offsets": [1, 33]}}),
            "a starts at byte .*, the preceding data ends at byte",
        ),
    ],
)
def test_messages_name_the_broken_rule(content, message):
    with pytest.raises(CheckpointError, match=f"^model.safetensors: .*{message}"):
        read_header(Bytes(content))
    with pytest.raises(SafetensorError):
        deserialize(content)
