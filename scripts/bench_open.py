"""python scripts/bench_open.py [--output docs/benchmarks/open.md]

Opens a checkpoint of as many files as Llama 3.1 405B, on a web server that waits before every answer, and reads a
header of 20,000 names. The peer asks the same server for the size and the header of one file after the other.
"""

import http.server
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import safetensors
from bench_page import page_parser, write_page
from safetensors.numpy import save_file

from shardplan.checkpoint.format.index import INDEX, SINGLE, read_index
from shardplan.storage import open_folder

FILES, TENSORS_PER_FILE = 191, 6
LATENCY_S = 0.05
NAMES = 20_000
COMMAND = "python scripts/bench_open.py --output docs/benchmarks/open.md"


class SlowRanges(http.server.SimpleHTTPRequestHandler):
    """A static web server that answers requests for ranges, each after `LATENCY_S`."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        time.sleep(LATENCY_S)
        super().do_HEAD()

    def do_GET(self) -> None:
        time.sleep(LATENCY_S)
        path = Path(self.translate_path(self.path))
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        with path.open("rb") as file:
            file.seek(first)
            data = file.read(last + 1 - first)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


def make_checkpoint(folder: Path) -> list[str]:
    """Write a checkpoint of small tensors; returns the names of its files."""
    files = [f"model-{i:05}-of-{FILES:05}.safetensors" for i in range(1, FILES + 1)]
    weight_map = {}
    for i, file in enumerate(files):
        tensors = {f"layers.{i}.{j}.weight": np.zeros(4, np.float32) for j in range(TENSORS_PER_FILE)}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return files


def one_after_the_other(url: str, files: list[str]) -> None:
    """Ask for the size and the header of each file."""
    for file in files:
        with urlopen(Request(f"{url}/{file}", method="HEAD")):
            pass
        for byte_range in ("0-7", "8-4095"):
            with urlopen(Request(f"{url}/{file}", headers={"Range": f"bytes={byte_range}"})) as response:
                response.read()


def seconds(function: Callable[[], object]) -> float:
    """The time of one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    arguments = page_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        many, one = Path(name) / "many", Path(name) / "one"
        many.mkdir()
        one.mkdir()
        files = make_checkpoint(many)
        save_file({f"layers.{i}.weight": np.zeros(2, np.float32) for i in range(NAMES)}, one / SINGLE)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowRanges, directory=str(many)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        opened = sorted(seconds(lambda: read_index(open_folder(url))) for _ in range(5))[2]
        sequential = seconds(lambda: one_after_the_other(url, files))
        server.shutdown()
        header = sorted(seconds(lambda: read_index(open_folder(str(one)))) for _ in range(5))[2]
        official = sorted(seconds(lambda: safetensors.safe_open(one / SINGLE, "numpy").keys()) for _ in range(5))[2]
    lines = [
        "# Opening a checkpoint",
        "",
        f"```\n{COMMAND}\n```",
        "",
        f"| {FILES} files on a web server, {1000 * LATENCY_S:.0f} ms before every answer | seconds (median of 5) |",
        "|---|---:|",
        f"| shardplan, sizes and headers of 64 files at a time | {opened:.2f} |",
        f"| one request after the other: a size, the length of a header, a header | {sequential:.2f} |",
        "",
        f"| a header of {NAMES:,} names on a local disk | seconds (median of 5) |",
        "|---|---:|",
        f"| shardplan, in Python | {header:.3f} |",
        f"| safetensors, in Rust | {official:.3f} |",
    ]
    write_page("\n".join(lines) + "\n", arguments.output)


if __name__ == "__main__":
    main()
