"""`read_index` returns what the official safetensors library reads, and refuses damaged checkpoints."""

import json
import threading
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardplan.checkpoint.format.header import FIRST_READ_BYTES
from shardplan.checkpoint.format.index import check_tensors, read_index, read_tensor_index
from shardplan.errors import CheckpointError
from shardplan.storage import open_folder


def save(folder, tensors, name="model.safetensors"):
    save_file(tensors, folder / name)
    return folder / name


def test_offsets_shapes_and_types(tmp_path):
    values = np.arange(24).reshape(2, 3, 4)
    tensors = {
        str(np.dtype(dtype)): values.astype(dtype)
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_, np.float64)
    } | {"scalar": np.float32(7).reshape(()), "empty": np.zeros((0, 3), np.float32), "naïve.名": values}
    path = save(tmp_path, tensors)
    data = path.read_bytes()
    index = read_index(open_folder(str(tmp_path)))
    assert index.keys() == tensors.keys()
    for name, tensor in index.items():
        expected = tensors[name]
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
        assert data[tensor.offset : tensor.offset + expected.nbytes] == expected.tobytes()


def test_shards_of_an_index(golden):
    index = read_index(open_folder(str(golden / "llama")))
    weights = json.loads((golden / "llama" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: tensor.file.name.rsplit("/", 1)[1] for name, tensor in index.items()} == weights


def header(entries) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "3 bytes is too short for a safetensors file"),
        ((1 << 40).to_bytes(8, "little"), "its header claims 1099511627776 bytes, the file has 8"),
        ((2).to_bytes(8, "little") + b"{]", "damaged header"),
        (header([1]), "damaged header: it must map names of tensors to their types, shapes and offsets"),
        (header({"a": {"dtype": "F32", "shape": [2]}}), "damaged header: a has no data_offsets"),
        (header({"a": None}), "damaged header: a has no dtype and no shape and no data_offsets"),
        (header({"a": {"dtype": "U8", "shape": None, "data_offsets": [0, 1]}}), "has shape None and offsets"),
        (header({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}), "type .'U8'., which is not supported"),
        (header({"a": {"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}}) + b"x" * 8, "a has type F7"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + b"x" * 7, "it is truncated"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + b"x" * 4, r"4 bytes for shape \(2,\)"),
        (header({"a": {"dtype": "U8", "shape": [2.0], "data_offsets": [0, 2]}}) + b"xx", "both must be lists of"),
        (header({"a": {"dtype": "U8", "shape": [-2, -1], "data_offsets": [0, 2]}}) + b"xx", "both must be lists of"),
        (header({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}) + b"xxx", "a starts at byte"),
        (
            header({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}) + b"xxx",
            "1 bytes after the last tensor",
        ),
        (
            header({n: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for n in "ab"}) + b"xx",
            "b starts at byte",
        ),
    ],
)
def test_damaged_files(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(Exception, match=r"header|SafetensorError|type|deserializ"):  # the official library refuses too
        load_file(path)
    with pytest.raises(CheckpointError, match=message):
        read_index(open_folder(str(tmp_path)))


def test_damaged_index(tmp_path, raises_message):
    with raises_message(CheckpointError):
        read_index(open_folder(str(tmp_path)))
    index = tmp_path / "model.safetensors.index.json"
    types = "its 'weight_map' must map the name of each tensor to the name of its file"
    for text, problem in (
        ("{", "Expecting property name"), ("[]", "it has no 'weight_map'"), ("{}", "it has no 'weight_map'"),
        ('{"weight_map": 3}', types), ('{"weight_map": {"a": null}}', types),
    ):  # fmt: skip
        index.write_text(text)
        with pytest.raises(CheckpointError, match=f"index.json is damaged: {problem}"):
            read_index(open_folder(str(tmp_path)))
    for path in ("../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "", "s3://b/x.safetensors", "."):
        index.write_text(json.dumps({"weight_map": {"a": path}}))
        with raises_message(CheckpointError):
            read_index(open_folder(str(tmp_path)))
    index.write_text("<!DOCTYPE html><html>Sign in</html>")
    with raises_message(CheckpointError):
        read_index(open_folder(str(tmp_path)))


def write_index(folder, **files):
    """Write an index that lists tensors in files: file, with _ for a dot -> names of its tensors."""
    weight_map = {name: file.replace("_", ".") for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_decides_where_files_overlap(tmp_path, raises_message):
    """A tensor that the index lists nowhere is read from the file that has it; one that no file has is none."""
    save(tmp_path, {"a": np.zeros(2, np.float32)}, "x.safetensors")
    save(tmp_path, {name: np.ones(2, np.float32) for name in "abc"}, "y.safetensors")
    write_index(tmp_path, x_safetensors="ab", y_safetensors="d")
    index = read_tensor_index(open_folder(str(tmp_path)))
    found = {name: (tensor.file_name, tensor.is_listed) for name, tensor in index.tensors.items()}
    assert found == {"a": ("x.safetensors", True), "b": ("y.safetensors", False), "c": ("y.safetensors", False)}
    assert index.absent == ("d",)
    write_index(tmp_path, x_safetensors="b", y_safetensors="c")
    index = read_tensor_index(open_folder(str(tmp_path)))
    assert index.tensors["a"].file_name == "x.safetensors"
    assert [(name, tensor.file_name) for name, tensor in index.rivals] == [("a", "y.safetensors")]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with raises_message(CheckpointError):
        read_index(open_folder(str(tmp_path)))


def test_paths_of_an_index(tmp_path):
    """Files in subfolders may have one name; `./` means nothing."""
    for folder, value in (("x", 1.0), ("y", 2.0)):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder, {folder: np.full(2, value, np.float32)})
    weight_map = {"x": "./x/model.safetensors", "y": "y//model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    index = read_index(open_folder(str(tmp_path)))
    assert {name: tensor.file_name for name, tensor in index.items()} == {
        "x": "x/model.safetensors", "y": "y/model.safetensors"
    }  # fmt: skip
    for name, value in (("x", 1.0), ("y", 2.0)):
        data = bytearray(8)
        index[name].file.read_into(index[name].offset, memoryview(data))
        assert np.frombuffer(data, np.float32).tolist() == [value, value]


def test_a_complete_file_beside_an_index_whose_files_are_gone(tmp_path, raises_message):
    save(tmp_path, {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
    write_index(tmp_path, x_safetensors="a", y_safetensors="b")
    for left in ((), ("x.safetensors",)):  # of an earlier save
        for name in left:
            save(tmp_path, {"a": np.ones(2, np.float32)}, name)
        index = read_tensor_index(open_folder(str(tmp_path)))
        assert index.is_stale and {tensor.file_name for tensor in index.tensors.values()} == {"model.safetensors"}
    save(tmp_path, {"b": np.zeros(2, np.float32)})
    index = read_tensor_index(open_folder(str(tmp_path)))
    assert not index.is_stale and index.missing_files == ("y.safetensors",) and index.single.keys() == {"b"}
    with raises_message(CheckpointError):
        read_index(open_folder(str(tmp_path)))


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"<!DOCTYPE html>\n<html>", "a web page"),
        (b"\n <HTML lang=en>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer"),
        (b"PK\x03\x04" + bytes(20), "a PyTorch file"),
        (b"\x80\x02}q\x00.........", "a PyTorch file"),
        (b"GGUF\x03\x00\x00\x00\x00\x00", "a GGUF file"),
        (bytes(3000), "filled with zeros"),
        (b"", "empty"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path, start, kind):
    (tmp_path / "model.safetensors").write_bytes(start)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {kind}"):
        read_index(open_folder(str(tmp_path)))


def test_a_header_whose_length_looks_like_another_kind(tmp_path):
    """The first bytes of a safetensors file are a number, and may be those of a pickle."""
    entry = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(entry).encode().ljust(0x280)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert (tmp_path / "model.safetensors").read_bytes()[:2] == b"\x80\x02"
    assert load_file(tmp_path / "model.safetensors").keys() == read_index(open_folder(str(tmp_path))).keys()


@pytest.mark.parametrize("name", ["w.weight_scale_inv", "w.qweight", "w.SCB"])
def test_quantised_checkpoints_are_refused(tmp_path, name, raises_message):
    save(tmp_path, {"w.weight": np.zeros((2, 3)), name: np.zeros(1)})
    with raises_message(CheckpointError):
        check_tensors(read_index(open_folder(str(tmp_path))), {"w.weight": (2, 3)}, "ck")


def test_all_differences_are_reported_together(tmp_path):
    tensors = {"a": np.zeros((2, 3)), "extra": np.zeros(1), "h.0.attn.bias": np.zeros(1), "lm_head.weight": np.zeros(1)}
    save(tmp_path, tensors)
    index = read_index(open_folder(str(tmp_path)))
    with pytest.raises(CheckpointError) as error:
        check_tensors(index, {"a": (3, 2), "b": (1,), "c": (1,), "d": (1,), "e": (1,)}, "ck", {"lm_head.weight"})
    assert str(error.value) == (
        "ck does not match the model of its config.json: 4 tensors missing (b, c, d, and 1 more); 1 tensor that the "
        "model does not have (extra); 1 tensor with a different shape (a has (2, 3), the model (3, 2))"
    )


def test_a_header_longer_than_the_first_read(tmp_path):
    tensors = {f"layers.{i}.attention.weight": np.full(1, i, np.float32) for i in range(4000)}
    path = save(tmp_path, tensors)
    assert path.stat().st_size - 4 * len(tensors) > FIRST_READ_BYTES
    index = read_index(open_folder(str(tmp_path)))
    assert index.keys() == tensors.keys()
    assert (index["layers.7.attention.weight"].offset - path.stat().st_size) % 4 == 0


class Together:
    """A folder whose requests about shards are answered when as many are waiting as there are shards."""

    ref = "slow"

    def __init__(self, folder, shards):
        self.folder, self.requests = open_folder(folder), 0
        self.barrier, self.lock = threading.Barrier(shards, timeout=30), threading.Lock()

    def request(self, name):
        with self.lock:
            self.requests += 1
        if name.startswith("model-"):
            self.barrier.wait()

    def open(self, name):
        self.request(name)
        file = self.folder.open(name)

        def read_into(offset, buffer):
            if buffer:
                self.request(name)
            file.read_into(offset, buffer)

        return file and SimpleNamespace(name=file.name, size=file.size, read_into=read_into)


def test_files_are_opened_at_the_same_time(tmp_path):
    """Each takes two round trips: for its size, and for its header."""
    files = {f"model-{i}.safetensors": {f"{i}.weight": np.zeros(i + 1, np.float32)} for i in range(40)}
    for name, tensors in files.items():
        save(tmp_path, tensors, name)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    folder = Together(str(tmp_path), len(files))
    index = read_index(folder)
    assert {name: tensor.shape for name, tensor in index.items()} == {f"{i}.weight": (i + 1,) for i in range(40)}
    assert folder.requests == 3 + 2 * len(files)  # the index, twice, and whether there is a model.safetensors


def many_names(count):
    """Names of a header's last two tensors are the same."""
    entries = [f'"{i}": {{"dtype": "U8", "shape": [], "data_offsets": [{i}, {i + 1}]}}' for i in range(count)]
    return [*entries, entries[-1]]


def many_dimensions(count):
    """A tensor has as many dimensions, and a size that does not fit it."""
    return [f'"0": {{"dtype": "U8", "shape": [{", ".join(["1"] * count)}], "data_offsets": [0, 2]}}']


@pytest.mark.slow
@pytest.mark.parametrize(("entries", "reason"), [(many_names, "duplicate key"), (many_dimensions, "0 has")])
def test_reading_a_header_takes_time_in_proportion_to_its_size(tmp_path, entries, reason):
    """Also one that is refused: ten times the names, or dimensions, may not take a hundred times as long."""

    def seconds(count):
        text = ("{" + ",".join(entries(count)) + "}").encode()
        (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"0" * count)
        times = []
        for _ in range(5):
            started = time.process_time()
            with pytest.raises(CheckpointError, match=reason):
                read_index(open_folder(str(tmp_path)))
            times.append(time.process_time() - started)
        return min(times)

    assert seconds(40_000) < 40 * seconds(4_000)
