"""References to folders, and reading by ranges from every kind of storage."""

import http.server
import os
import random
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from obstore.store import MemoryStore

from shardplan.errors import CheckpointError, ConfigError
from shardplan.storage import hub, objects, open_folder, read_bytes
from shardplan.storage.filesystem import FilesystemFolder
from shardplan.storage.hub import HubFolder
from shardplan.storage.local import LocalFile, LocalFolder
from shardplan.storage.objects import ObjectFolder
from shardplan.storage.writing import OutputFolder


class Ranges(http.server.SimpleHTTPRequestHandler):
    """A static web server that answers Range requests."""

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        data = path.read_bytes()[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def served(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(200)))
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0),
        lambda *args: Ranges(*args, directory=str(tmp_path)),  # type: ignore[arg-type]
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield tmp_path, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def check(folder):
    file = folder.open("a.bin")
    assert file.size == 200
    buffer = bytearray(20)
    file.read_into(30, memoryview(buffer))
    assert bytes(buffer) == bytes(range(30, 50))
    file.read_into(5, memoryview(bytearray()))
    assert read_bytes(folder, "a.bin") == bytes(range(200))
    assert folder.open("none.bin") is None
    with pytest.raises(CheckpointError, match=r"a\.bin"):
        file.read_into(190, memoryview(bytearray(20)))


def test_local_folder(served):
    folder = open_folder(str(served[0]))
    assert isinstance(folder, LocalFolder)
    check(folder)


def test_web_folder(served):
    folder = open_folder(served[1])
    assert isinstance(folder, ObjectFolder)
    check(folder)


def test_memory_folder(served, raises_message):
    """A scheme that fsspec reads."""
    fsspec.filesystem("memory").pipe_file("/model/a.bin", bytes(range(200)))
    folder = open_folder("memory://model")
    assert isinstance(folder, FilesystemFolder)
    check(folder)
    file = folder.open("a.bin")
    fsspec.filesystem("memory").pipe_file("/model/a.bin", bytes(range(100)))
    with raises_message(CheckpointError):
        file.read_into(0, memoryview(bytearray(20)))


def test_a_small_file_that_is_not_small_is_refused(tmp_path, raises_message):
    """Its size decides how much memory is allocated."""
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(2**28 + 1)
    with raises_message(CheckpointError):
        read_bytes(open_folder(str(tmp_path)), "config.json")


def test_changed_local_file(tmp_path, raises_message):
    """The version of a file depends on its content only."""
    (tmp_path / "a.bin").write_bytes(bytes(20))
    (tmp_path / "b.bin").write_bytes(bytes(20))
    folder = open_folder(str(tmp_path))
    file = folder.open("a.bin")
    assert file.version == folder.open("b.bin").version
    (tmp_path / "a.bin").write_bytes(bytes([1] * 20))
    os.utime(tmp_path / "a.bin", (1, 1))
    assert file.version != folder.open("a.bin").version
    with raises_message(CheckpointError):
        file.read_into(0, memoryview(bytearray(20)))


CONTENT = random.Random(0).randbytes(2**20)


class Faults(http.server.BaseHTTPRequestHandler):
    """A server with the fault named by `fault`."""

    protocol_version = "HTTP/1.1"
    fault, requests = "", 0

    def do_HEAD(self):
        self.answer(200, CONTENT, {"ETag": '"v1"'}, 0)

    def do_GET(self):
        Faults.requests += 1
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data, etag, shift, fault = CONTENT[first : last + 1], '"v1"', 0, self.fault
        if fault == "range ignored":
            return self.answer(200, CONTENT, {"ETag": etag})
        if fault == "busy twice" and self.requests <= 2:
            return self.answer(503, b"", {})
        if fault == "refused condition" and self.headers["If-Match"]:
            return self.answer(412, b"", {})
        if fault == "another range":
            shift = 5
        if fault == "another version":
            etag = '"v2"'
        if fault == "short range" and len(data) > SMALL:
            data = data[: len(data) // 2]
        content_range = f"bytes {first + shift}-{first + shift + len(data) - 1}/{len(CONTENT)}"
        part = {"truncated": 2 * len(data) // 3, "trickle": 1000}.get(fault, len(data))
        self.answer(206, data, {"ETag": etag, "Content-Range": content_range}, part if len(data) > SMALL else None)

    def answer(self, status, data, headers, sent=None):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[:sent])
        if sent:
            self.wfile.flush()
            time.sleep(5 if self.fault == "trickle" else 0)
            self.close_connection = True

    def log_message(self, *args):
        pass


SMALL = 2**17
"""Ranges up to this many bytes are answered completely."""


@pytest.fixture
def faulty(monkeypatch):
    """A function that sets the fault and returns the URL; delays and timeouts are a hundredth of the real ones."""
    monkeypatch.setattr(objects, "FIRST_RETRY_DELAY_S", 0.002)
    monkeypatch.setattr(objects, "TIMEOUT", timedelta(seconds=0.6))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Faults)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def set_fault(fault):
        monkeypatch.setattr(Faults, "fault", fault)
        monkeypatch.setattr(Faults, "requests", 0)
        return f"http://127.0.0.1:{server.server_port}"

    yield set_fault
    server.shutdown()


@pytest.mark.parametrize(("fault", "requests"), [("", 1), ("busy twice", 3), ("truncated", 3)])
def test_read_continues_where_it_stopped(faulty, fault, requests):
    file = open_folder(faulty(fault)).open("a.bin")
    buffer = bytearray(900_000)
    file.read_into(50_000, memoryview(buffer))
    assert bytes(buffer) == CONTENT[50_000:950_000]
    assert Faults.requests == requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("range ignored", r"a\.bin: bytes 1000\+900000 cannot be read: "),
        ("short range", r"a\.bin: bytes 1000\+900000 cannot be read: no data in 8 attempts"),
        ("another range", r"a\.bin: bytes 1000\+900000 cannot be read: no data in 8 attempts"),
        ("trickle", r"a\.bin: bytes 1000\+900000 cannot be read: no data in 8 attempts"),
        ("another version", r"a\.bin: changed while it was being read \(version \"v1\" of 1048576 bytes is now \"v2\""),
        ("refused condition", r"a\.bin: changed while it was being read"),
    ],
)
def test_wrong_responses_are_errors(faulty, fault, message):
    file = open_folder(faulty(fault)).open("a.bin")
    with pytest.raises(CheckpointError, match=message):
        file.read_into(1000, memoryview(bytearray(900_000)))


def test_hub_cache(tmp_path, monkeypatch, raises_message):
    """A cached repository is read without a network, and its commit is recorded."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "snapshots" / commit / "a.bin").write_bytes(bytes(range(200)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = open_folder("org/model")
    assert isinstance(folder, HubFolder)
    check(folder)
    assert folder.ref == f"org/model@{commit}"
    with raises_message(ConfigError):
        open_folder("org/other@v2").open("a.bin")


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path, monkeypatch, raises_message):
    """huggingface_hub would sleep and try again; `time.sleep` fails here, and so would that."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("the hub is asked again"))
    hub._is_reachable.cache_clear()
    try:
        with raises_message(ConfigError):
            open_folder("org/model").open("config.json")
    finally:
        hub._is_reachable.cache_clear()


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that redirects to another server, which has the content; it refuses every first request (429)."""

    protocol_version = "HTTP/1.1"
    content_url = ""
    asked: ClassVar[list[tuple[str, str]]] = []
    """Method and path of every request."""
    refused: ClassVar[set[tuple[str, str]]] = set()

    def do_HEAD(self):
        self.redirect()

    def do_GET(self):
        self.redirect()

    def redirect(self):
        request = self.command, self.path
        self.asked.append(request)
        is_first = request not in self.refused
        self.refused.add(request)
        is_known = self.path.endswith("/model.safetensors") and self.headers["Authorization"] == "Bearer hf_secret"
        self.send_response(429 if is_first else 302 if is_known else 404)
        self.send_header("Location", f"{self.content_url}{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


class Content(http.server.BaseHTTPRequestHandler):
    """The server with the content: it counts the bytes that it sends, and must not receive credentials."""

    protocol_version = "HTTP/1.1"
    sent = 0

    def do_HEAD(self):
        self.answer(200, b"", len(CONTENT))

    def do_GET(self):
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data = CONTENT[first : last + 1]
        Content.sent += len(data)
        self.answer(206, data, len(data), {"Content-Range": f"bytes {first}-{last}/{len(CONTENT)}"})

    def answer(self, status, data, size, headers=()):
        self.send_response(400 if self.headers["Authorization"] else status)
        for name, value in {**dict(headers), "Content-Length": str(size), "ETag": f'"{Content.sent}"'}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A repository of which only config.json is in the cache."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in (Hub, Content)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    template = f"http://127.0.0.1:{servers[0].server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for module in ("constants", "file_download"):  # the second one has the name in huggingface_hub 0 alone
        monkeypatch.setattr(f"huggingface_hub.{module}.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(objects, "FIRST_RETRY_DELAY_S", 0.002)
    for handler, name, value in (
        (Hub, "content_url", f"http://127.0.0.1:{servers[1].server_port}"), (Hub, "asked", []), (Hub, "refused", set()),
        (Content, "sent", 0),
    ):  # fmt: skip
        monkeypatch.setattr(handler, name, value)
    folder = open_folder(f"org/model@{commit}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert folder.open("config.json").version == commit
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield folder, snapshot
    for server in servers:
        server.shutdown()


def test_hub_ranges(hub_folder):
    """Only the ranges of a large file that are asked for are sent, again where the hub was busy."""
    folder, snapshot = hub_folder
    file = folder.open("model.safetensors")
    name = f"hf://org/model@{snapshot.name}/model.safetensors"
    assert (file.name, file.size, file.version) == (name, len(CONTENT), snapshot.name)
    for first, size in ((0, 8), (100, 5), (300_000, 500_000)):
        buffer = bytearray(size)
        file.read_into(first, memoryview(buffer))
        assert bytes(buffer) == CONTENT[first : first + size]
    assert Content.sent == 8 + 5 + 500_000
    assert folder.open("other.safetensors") is None
    path = f"/org/model/resolve/{snapshot.name}/model.safetensors"
    assert {asked for _, asked in Hub.asked} == {path, path.replace("model.s", "other.s")}
    assert Hub.asked.count(("HEAD", path)) == 2 and Hub.asked.count(("GET", path)) == 4


def test_a_cached_and_a_streamed_file_of_the_hub_have_one_version(hub_folder):
    """One host may have in its cache what another streams."""
    folder, snapshot = hub_folder
    streamed = folder.open("model.safetensors")
    (snapshot / "model.safetensors").write_bytes(CONTENT)
    cached = folder.open("model.safetensors")
    assert isinstance(cached, LocalFile) and not isinstance(streamed, LocalFile)
    assert (cached.version, cached.size) == (streamed.version, streamed.size)


def test_a_model_of_the_hub_by_its_url(tmp_path):
    folder = open_folder("hf://org/model@main")
    assert isinstance(folder, HubFolder) and folder.ref == "org/model@main"


def test_bad_references(tmp_path, raises_message):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with raises_message(ConfigError):
        open_folder(str(tmp_path / "model.safetensors"))
    with raises_message(ConfigError):
        open_folder("htps://bucket/x")
    (tmp_path / "llama").mkdir()
    with raises_message(ConfigError):
        open_folder(str(tmp_path / "lama"))


@pytest.mark.parametrize("kind", ["local", "memory://out", "store"])
def test_files_and_folders_are_removed(tmp_path, kind):
    """Nothing happens for what does not exist."""
    target = OutputFolder(kind if "://" in kind else str(tmp_path / "out"))
    if kind == "store":
        target._store = MemoryStore()
    for name in ("a", "b", "c/d", "c/e/f"):
        with target.create(name) as writer:
            writer.write(b"x")
    for name in ("a", "c/", "missing", "missing/"):
        target.remove(name)
    assert [target.has_file(name) for name in ("a", "b", "c/d", "c/e/f")] == [False, True, False, False]


def test_a_local_file_has_its_name_when_it_is_complete(tmp_path):
    """A file that is replaced stays as it was until then, and if the writing fails."""
    target = OutputFolder(str(tmp_path))
    (tmp_path / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), target.create("a") as writer:
        writer.write(b"new")
        assert (tmp_path / "a").read_text() == "old"
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"
    with target.create("a") as writer:
        writer.write(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "new"
