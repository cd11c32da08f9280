"""Checksums: of whole files from those of parts, and what stores say that they have on record."""

import base64
import hashlib
import http.server
import threading
import zlib
from types import SimpleNamespace

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.checkpoint.format.integrity import CheckedFile, check_file, check_files
from shardplan.errors import CheckpointError
from shardplan.storage import open_folder
from shardplan.storage.checksums import SHA256, Checksum, crc, joined, of_properties, of_url
from shardplan.storage.folder import Pace

DIRECT = {"crc32c": crc32c.crc32c, "crc32": zlib.crc32}


@given(st.sampled_from(sorted(DIRECT)), st.binary(max_size=200), st.binary(max_size=200))
def test_two_parts_have_the_checksum_of_the_whole(algorithm, before, after):
    parts = (crc(algorithm, memoryview(part)) for part in (before, after))
    assert joined(algorithm, *parts, len(after)) == DIRECT[algorithm](before + after)


class Memory:
    """A file in memory, with a checksum on record."""

    name, version, pace, is_shared = "a.bin", "v1", Pace(7, 2), True

    def __init__(self, data, recorded):
        self.data, self.size, self.recorded = data, len(data), recorded

    def read_into(self, offset, buffer):
        buffer[:] = self.data[offset : offset + len(buffer)]

    def recorded_checksum(self):
        return self.recorded


def recorded(algorithm, data):
    """The checksum of some bytes, by the libraries."""
    if algorithm == SHA256:
        return Checksum(SHA256, hashlib.sha256(data).digest())
    return Checksum.of_crc(algorithm, DIRECT[algorithm](data))


@given(
    st.sampled_from([*sorted(DIRECT), SHA256]),
    st.binary(min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 59), st.integers(0, 60)), max_size=12),
    st.integers(0, 59),
)
def test_whatever_was_read_of_a_file(algorithm, data, reads, damaged):
    """Parts that overlap, repeat, and leave gaps; and one bit that is another than on record."""
    file = CheckedFile(Memory(data, recorded(algorithm, data)))
    for start, nbytes in reads:
        file.read_into(start % len(data), memoryview(bytearray(min(nbytes, len(data) - start % len(data)))))
    check_file(file, file.parts)
    changed = bytearray(data)
    changed[damaged % len(data)] ^= 16
    other = CheckedFile(Memory(bytes(changed), recorded(algorithm, data)))
    other.read_into(0, memoryview(bytearray(len(data) // 2)))
    with pytest.raises(CheckpointError, match=rf"a\.bin: is {algorithm} .* is on record; it is damaged, replace it"):
        check_file(other, other.parts)


@pytest.mark.parametrize("second", [(10, 30), (15, 40)])
def test_bytes_that_came_in_two_ways(second):
    """What a process holds may have been damaged on its way though another's, which counts, was not."""
    data = bytes(range(60))
    file = CheckedFile(Memory(data, recorded("crc32c", data)))
    file.read_into(10, memoryview(bytearray(20)))
    value = crc("crc32c", memoryview(data[slice(*second)]))
    check_file(file, [*file.parts, (*second, value)])
    with pytest.raises(CheckpointError, match=f"bytes {second[0]} to {second[1]} came in two ways; load again"):
        check_file(file, [*file.parts, (*second, value ^ 1)])


class Two:
    """What one of two processes sees of both; each has told the other `parts`."""

    count = 2

    def __init__(self, here, parts):
        self.here, self.parts = here, parts

    def tell(self, what, said):
        return {self.here: said[self.here], 1 - self.here: self.parts}

    def agree(self, what, find, describe):
        return find()


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("here", [0, 1])
def test_who_checks_what(monkeypatch, is_shared, here):
    """What all read is shared out; of what each has a copy of its own, each checks its own, with its own parts."""
    monkeypatch.setattr(Memory, "is_shared", is_shared)
    good = bytes(range(60))
    files = [CheckedFile(Memory(good, recorded("crc32c", good))) for _ in range(2)]
    for file, name in zip(files, ("a.bin", "b.bin"), strict=True):
        file.name = name
        file.read_into(0, memoryview(bytearray(20)))
    files[0].file.data = bytes(60)
    theirs = [[], [(20, 40, 0)]]  # as what the other process read of b.bin, and is not what is there
    tensors = [SimpleNamespace(file=file) for file in files]
    wrong = {(True, 0): "a.bin", (True, 1): "b.bin", (False, 0): "a.bin", (False, 1): "a.bin"}[is_shared, here]
    with pytest.raises(CheckpointError, match=f"{wrong}: is crc32c"):
        check_files(tensors, Two(here, theirs))


DATA = b"123456789"
CRC32C = base64.b64encode(bytes.fromhex("e3069283")).decode()  # of DATA: the check value of its definition
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
def test_what_servers_say(headers, expected):
    """Google's two headers of one name, Amazon's, that of RFC 9530; not a checksum of the checksums of parts."""

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
    assert str(of_url(f"http://127.0.0.1:{server.server_port}/a.bin")) == expected
    server.shutdown()


def test_what_google_and_the_hub_say():
    assert str(of_properties({"crc32c": CRC32C})) == "crc32c e3069283"
    digest = hashlib.sha256(DATA).hexdigest()
    assert str(of_properties({"lfs": SimpleNamespace(sha256=digest)})) == f"sha256 {digest}"
    assert of_properties({"size": 9}) is None


def test_the_cache_of_the_hub_names_files_by_their_digest(tmp_path):
    digest = hashlib.sha256(DATA).hexdigest()
    blob = tmp_path / "blobs" / digest
    blob.parent.mkdir()
    blob.write_bytes(DATA)
    (tmp_path / "a.bin").symlink_to(blob)
    (tmp_path / "b.bin").write_bytes(DATA)
    folder = open_folder(str(tmp_path))
    assert str(folder.open("a.bin").recorded_checksum()) == f"sha256 {digest}"
    assert folder.open("b.bin").recorded_checksum() is None
