"""Checksums of files combined from those of parts, and checksums that stores have recorded."""

import base64
import hashlib
import http.server
import threading
import zlib
from types import SimpleNamespace

import crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.integrity import CheckedFile, check_file, check_files
from shardplan.errors import CheckpointError
from shardplan.storage import open_folder
from shardplan.storage.checksums import (
    Checksum,
    ChecksumAlgorithm,
    checksum_from_properties,
    combine_crcs,
    compute_crc,
    fetch_checksum,
)
from shardplan.storage.folder import ReadTuning

DIRECT = {ChecksumAlgorithm.CRC32C: crc32c.crc32c, ChecksumAlgorithm.CRC32: zlib.crc32}


@given(st.sampled_from(sorted(DIRECT)), st.binary(max_size=200), st.binary(max_size=200))
def test_combine_crcs(algorithm, before, after):
    parts = (compute_crc(algorithm, memoryview(part)) for part in (before, after))
    assert combine_crcs(algorithm, *parts, len(after)) == DIRECT[algorithm](before + after)


class Memory:
    """A file in memory with a recorded checksum."""

    name, version, tuning, is_shared = "a.bin", "v1", ReadTuning(7, 2), True

    def __init__(self, data, recorded):
        self.data, self.size, self.recorded = data, len(data), recorded

    def read_into(self, offset, buffer):
        buffer[:] = self.data[offset : offset + len(buffer)]

    def recorded_checksum(self):
        return self.recorded


def recorded(algorithm, data):
    """The checksum of some bytes, computed by other libraries."""
    if algorithm == ChecksumAlgorithm.SHA256:
        return Checksum(ChecksumAlgorithm.SHA256, hashlib.sha256(data).digest())
    return Checksum.from_crc(algorithm, DIRECT[algorithm](data))


@given(
    st.sampled_from(ChecksumAlgorithm),
    st.binary(min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 59), st.integers(0, 60)), max_size=12),
    st.integers(0, 59),
)
def test_check_after_arbitrary_reads(algorithm, data, reads, damaged):
    """Reads overlap, repeat and leave gaps; a second file differs from its recorded checksum in one bit."""
    file = CheckedFile(Memory(data, recorded(algorithm, data)))
    for start, nbytes in reads:
        file.read_into(start % len(data), memoryview(bytearray(min(nbytes, len(data) - start % len(data)))))
    check_file(file, file.ranges)
    damaged_data = bytearray(data)
    damaged_data[damaged % len(data)] ^= 16
    other = CheckedFile(Memory(bytes(damaged_data), recorded(algorithm, data)))
    other.read_into(0, memoryview(bytearray(len(data) // 2)))
    message = rf"a\.bin: checksum is {algorithm} .*, its store recorded {algorithm} .*; the file is damaged, replace it"
    with pytest.raises(CheckpointError, match=message):
        check_file(other, other.ranges)


@pytest.mark.parametrize("second", [(10, 30), (15, 40)])
def test_two_reads_of_the_same_bytes_differ(second, raises_message):
    """The bytes that one process holds may be damaged although those that another process counted are not."""
    data = bytes(range(60))
    file = CheckedFile(Memory(data, recorded(ChecksumAlgorithm.CRC32C, data)))
    file.read_into(10, memoryview(bytearray(20)))
    value = compute_crc(ChecksumAlgorithm.CRC32C, memoryview(data[slice(*second)]))
    check_file(file, [*file.ranges, (*second, value)])
    with raises_message(CheckpointError):
        check_file(file, [*file.ranges, (*second, value ^ 1)])


class TwoProcesses:
    """A process group of two, seen from one process; the other one sends `parts`."""

    process_count = 2

    def __init__(self, process_index, parts):
        self.process_index, self.parts = process_index, parts

    def exchange(self, name, messages):
        own = {self.process_index: messages[self.process_index]} if self.process_index in messages else {}
        return own | ({1 - self.process_index: self.parts} if self.parts else {})

    def agree(self, name, compute, describe):
        return compute()


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("process", [0, 1])
def test_files_that_each_process_checks(monkeypatch, is_shared, process):
    """Shared files are divided among processes; each process checks its own copy of other files, from its own parts."""
    monkeypatch.setattr(Memory, "is_shared", is_shared)
    good = bytes(range(60))
    files = [CheckedFile(Memory(good, recorded(ChecksumAlgorithm.CRC32C, good))) for _ in range(2)]
    for file, name in zip(files, ("a.bin", "b.bin"), strict=True):
        file.name = name
        file.read_into(0, memoryview(bytearray(20)))
    files[0].file.data = bytes(60)
    # the other process read bytes of b.bin that differ from its content, which process 1 checks if it is shared
    theirs = {"1": [(20, 40, 0)]} if is_shared and process == 1 else {}
    tensors = [Tensor(file, 0, (1,), np.dtype(np.uint8)) for file in files]
    wrong = {(True, 0): "a.bin", (True, 1): "b.bin", (False, 0): "a.bin", (False, 1): "a.bin"}[is_shared, process]
    with pytest.raises(CheckpointError, match=f"{wrong}: checksum is crc32c"):
        check_files(tensors, TwoProcesses(process, theirs))


def test_summary_says_which_files_are_not_checked(capsys):
    files = [CheckedFile(Memory(b"123", checksum)) for checksum in (None, recorded(ChecksumAlgorithm.CRC32, b"123"))]
    files += [CheckedFile(Memory(b"123", None))]
    for file, name in zip(files, ("a.bin", "b.bin", "c.bin"), strict=True):
        file.name = name
    check_files([Tensor(file, 0, (1,), np.dtype(np.uint8)) for file in files], TwoProcesses(0, {}))
    assert capsys.readouterr().err == (
        "checksums: crc32 matches for 1 of 3 files; their store has none for 2 of 3 files (a.bin, ...), which are not "
        "checked\n"
    )


DATA = b"123456789"
CRC32C = base64.b64encode(bytes.fromhex("e3069283")).decode()  # of DATA: the check value in the definition of CRC32C
SHA = base64.b64encode(hashlib.sha256(DATA).digest()).decode()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("x-goog-hash", f"crc32c={CRC32C}"), ("x-goog-hash", "md5=abc=")], "crc32c e3069283"),
        ([("x-goog-hash", "md5=abc="), ("x-goog-hash", f"crc32c={CRC32C}")], "crc32c e3069283"),
        ([("x-amz-checksum-crc32c", CRC32C)], "crc32c e3069283"),
        ([("x-amz-checksum-crc32c", f"{CRC32C}-3")], "None"),
        ([("Repr-Digest", f"md5=:abc=:, sha-256=:{SHA}:")], f"sha256 {hashlib.sha256(DATA).hexdigest()}"),
        ([("ETag", '"e3069283"')], "None"),
    ],
)
def test_checksums_in_http_headers(headers, expected):
    """Two headers of one name from Google, Amazon's, and RFC 9530's; a checksum of checksums is ignored."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert str(fetch_checksum(f"http://127.0.0.1:{server.server_port}/a.bin")) == expected
    server.shutdown()


def test_checksums_in_filesystem_properties():
    assert str(checksum_from_properties({"crc32c": CRC32C})) == "crc32c e3069283"
    digest = hashlib.sha256(DATA).hexdigest()
    assert str(checksum_from_properties({"lfs": SimpleNamespace(sha256=digest)})) == f"sha256 {digest}"
    assert checksum_from_properties({"size": 9}) is None


def test_hub_cache_names_files_by_their_digest(tmp_path):
    digest = hashlib.sha256(DATA).hexdigest()
    blob = tmp_path / "blobs" / digest
    blob.parent.mkdir()
    blob.write_bytes(DATA)
    (tmp_path / "a.bin").symlink_to(blob)
    (tmp_path / "b.bin").write_bytes(DATA)
    folder = open_folder(str(tmp_path))
    assert str(folder.open("a.bin").recorded_checksum()) == f"sha256 {digest}"
    assert folder.open("b.bin").recorded_checksum() is None
