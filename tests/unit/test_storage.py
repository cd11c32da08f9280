"""References: what kind each is, and that reading by ranges gives the same bytes everywhere."""

import http.server
import os
import threading
from pathlib import Path

import pytest

from shardplan.errors import CheckpointError, ConfigError
from shardplan.runtime.storage import HubFolder, LocalFolder, ObjectFolder, open_folder, read_bytes


class Ranges(http.server.SimpleHTTPRequestHandler):
    """A static web server that answers Range requests, as every real one does."""

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


def test_hub_cache(tmp_path, monkeypatch):
    """A cached repository is found without a network, and its commit is recorded."""
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
    with pytest.raises(ConfigError, match=r"'org/other@v2': no such folder here, and a\.bin can neither be downloaded"):
        open_folder("org/other@v2").open("a.bin")


def test_bad_references(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown scheme 'gcs'; did you mean 'gs'\?"):
        open_folder("gcs://bucket/x")
    (tmp_path / "llama").mkdir()
    with pytest.raises(ConfigError, match=f"lama does not exist; did you mean '{tmp_path}{os.sep}llama'"):
        open_folder(str(tmp_path / "lama"))
