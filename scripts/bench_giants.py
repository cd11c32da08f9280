"""python scripts/bench_giants.py [--output docs/benchmarks/giants.md]

Opens, maps and schedules checkpoints with the names, types, shapes and files of released giants. Their headers are
real, and their data are holes of sparse files, which take no room on the disk.
"""

import http.server
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import safetensors
from bench_open import LATENCY_S, SlowRanges
from bench_page import page_parser, write_page

from shardplan.checkpoint.format.codecs.decode_index import quantization_of
from shardplan.checkpoint.format.index import INDEX, TensorIndex, read_tensor_index
from shardplan.checkpoint.format.shared_index import pack_index
from shardplan.checkpoint.load import array_specs
from shardplan.checkpoint.mapping.state_dict_program import expected_tensors
from shardplan.checkpoint.match import Match, match_checkpoint
from shardplan.checkpoint.transfer.load_plan import LoadPlan, plan_load
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.checkpoint.transfer.stream import DEFAULT_BUDGET
from shardplan.checkpoint.transfer.transfer import DeviceMesh
from shardplan.hardware import parse_slice, place_mesh
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import Model, build_model
from shardplan.runtime.garbage import without_garbage_collection
from shardplan.storage import open_folder

SLICE, MESH = "8xv4-8192", {"replica": 8, "data": 128, "model": 32}
MAPPING = {"experts": ("data",), "expert_mlp": ("model",), "embed": ("data",), "mlp": ("model",), "vocab": ("model",)}
COMMAND = "python scripts/bench_giants.py --output docs/benchmarks/giants.md"
PLAIN = ("embed_tokens", "lm_head", "mlp.gate.", "norm", "eh_proj", "shared_head")
"""Parts of names of tensors that are stored as plain numbers."""
BLOCK, GROUP, IN_WORD = 128, 32, 8
SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4}
REPEATS = 3


@dataclass(frozen=True)
class Giant:
    """A released checkpoint."""

    name: str
    config: str
    """Name of its bundled configuration."""
    files: int
    quantization: dict[str, Any]
    """Its quantization_config."""
    has_prediction_layer: bool = False
    """Whether it has a layer for multi-token prediction behind the others, which no model here needs."""

    @property
    def is_fp8(self) -> bool:
        """Whether linear projections are in fp8, with a scale for each block; otherwise experts are in int4."""
        return self.quantization["quant_method"] == "fp8"


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True},
        }
    },
}  # fmt: skip
GIANTS = (
    Giant("DeepSeek-V3", "deepseek-v3", 163, FP8, has_prediction_layer=True),
    Giant("Kimi-K2", "kimi-k2", 62, FP8),
    Giant("Kimi-K2-Thinking", "kimi-k2", 62, INT4),
)
Entry = tuple[str, tuple[int, ...]]
"""Type and shape of a tensor."""


def stored_entries(giant: Giant, shapes: dict[str, tuple[int, ...]]) -> dict[str, Entry]:
    """Return the tensors of the checkpoint, in the order of its files."""
    if giant.has_prediction_layer:
        last = 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("model.layers."))
        behind = {
            name.replace(f".{last - 1}.", f".{last}.", 1): n for name, n in shapes.items() if f".{last - 1}." in name
        }
        embed = shapes["model.norm.weight"][0]
        for part, shape in (("enorm", (embed,)), ("hnorm", (embed,)), ("eh_proj", (embed, 2 * embed))):
            behind[f"model.layers.{last}.{part}.weight"] = shape
        shapes = {**shapes, **behind}
    entries: dict[str, Entry] = {}
    for name, shape in shapes.items():
        is_plain = len(shape) != 2 or any(part in name for part in PLAIN)
        if giant.is_fp8 and not is_plain:
            entries[name] = "F8_E4M3", shape
            entries[f"{name}_scale_inv"] = "F32", tuple(-(-n // BLOCK) for n in shape)
        elif not giant.is_fp8 and ".mlp.experts." in name:
            entries[f"{name}_packed"] = "I32", (shape[0], shape[1] // IN_WORD)
            entries[f"{name}_scale"] = "BF16", (shape[0], shape[1] // GROUP)
            entries[f"{name}_shape"] = "I32", (2,)
        else:
            entries[name] = "F32" if "correction" in name else "BF16", shape
    return entries


def nbytes(entry: Entry) -> int:
    """Return the bytes of a tensor."""
    return SIZES[entry[0]] * int(np.prod(entry[1], dtype=np.int64))


def write_checkpoint(folder: Path, giant: Giant, entries: dict[str, Entry]) -> int:
    """Write the index, the headers and the configuration, with holes for data; returns the bytes of the data."""
    total, weight_map, number = sum(map(nbytes, entries.values())), {}, 0
    files: list[dict[str, Entry]] = [{} for _ in range(giant.files)]
    done = 0
    for name, entry in entries.items():
        number = min(done * giant.files // total, giant.files - 1)
        files[number][name] = entry
        weight_map[name] = f"model-{number + 1:05}-of-{giant.files:06}.safetensors"
        done += nbytes(entry)
    for number, content in enumerate(files):
        header, end = {}, 0
        # in the order of safetensors: wide types first, then by name
        for name, entry in sorted(content.items(), key=lambda each: (-SIZES[each[1][0]], each[0])):
            header[name] = {"dtype": entry[0], "shape": entry[1], "data_offsets": (end, end + nbytes(entry))}
            end += nbytes(entry)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = folder / f"model-{number + 1:05}-of-{giant.files:06}.safetensors"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    config = read_config(giant.config, None)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": giant.quantization}))
    return total


@without_garbage_collection()
def find_plan(model: Model, match: Match) -> LoadPlan:
    """Plan the load of all processes, which each of them does for itself."""
    mesh = DeviceMesh(tuple(MESH.items()), tuple(place_mesh(parse_slice(SLICE), MESH).hosts()))
    specs = array_specs(model.template, MAPPING, match.program)
    requests = {}
    for path, view in match.program.views.items():
        requests[path] = ArrayRequest(view, specs[path], np.dtype("bfloat16"))
    return plan_load(requests, match.tensors, mesh, DEFAULT_BUDGET, zero_copy=False)


def measured[T](function: Callable[[], T], clock: Callable[[], float] = time.process_time) -> tuple[T, float]:
    """Call a function; returns its result, and the median of its times."""
    times = []
    for _ in range(REPEATS):
        started = clock()
        result = function()
        times.append(clock() - started)
    return result, statistics.median(times)


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder from a process of its own, which waits before every answer; yields its address."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    process = context.Process(target=serve_forever, args=(str(folder), ports), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ports.get()}"
    finally:
        process.terminate()
        process.join()


def serve_forever(folder: str, ports: Any) -> None:
    """Serve a folder, and put the port into a queue."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowRanges, directory=folder))
    ports.put(server.server_port)
    server.serve_forever()


def measure(giant: Giant, folder: Path) -> str:
    """Return a line of the table."""
    model = build_model(read_config(giant.config, None), 4096)
    entries = stored_entries(giant, expected_tensors(model.template))
    total = write_checkpoint(folder, giant, entries)
    first = min(folder.glob("*.safetensors"))
    with safetensors.safe_open(first, "numpy") as official:  # the headers are valid
        assert set(official.keys()) <= entries.keys()
    with serve(folder) as url:
        _, remote_s = measured(lambda: read_tensor_index(open_folder(url)), time.perf_counter)
    quantization = quantization_of(open_folder(str(folder)))

    def find_match(index: TensorIndex) -> Match:
        return match_checkpoint(model.template, index, giant.name, quantization)

    index, local_s = measured(lambda: read_tensor_index(open_folder(str(folder))))
    match, match_s = measured(partial(find_match, index))
    _, schedule_s = measured(partial(find_plan, model, match))
    sent = len(pack_index(index))
    tracemalloc.start()
    find_plan(model, find_match(read_tensor_index(open_folder(str(folder)))))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    cells = [
        giant.name, f"{len(entries):,}", str(giant.files), f"{total / 2**30:,.0f}", f"{remote_s:.2f}", f"{local_s:.2f}",
        f"{match_s:.2f}", f"{schedule_s:.2f}", f"{peak / 2**20:,.0f}", f"{sent / 2**10:,.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    arguments = page_parser(__doc__).parse_args()
    rows = []
    for giant in GIANTS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(giant, Path(folder)))
    processes = len({*place_mesh(parse_slice(SLICE), MESH).hosts()})
    lines = [
        "# Checkpoints of giants",
        "",
        f"```\n{COMMAND}\n```",
        "",
        "Headers and index have the names, types, shapes and files of the releases; data are holes. Opened from a web",
        f"server that waits {1000 * LATENCY_S:.0f} ms before every answer (seconds of the clock), and from a disk;",
        f"mapped to the arrays of the model; scheduled for {processes:,} processes ({SLICE}), as each of them does",
        "(seconds of the processor, median of three). Peak memory: what Python and numpy allocate in process 0 for it.",
        "",
        "| checkpoint | tensors | files | GiB | opened at a distance, s | from a disk, s | mapped, s | scheduled, s "
        "| peak memory, MiB | index as sent, KiB |",
        f"|{'---|' + '---:|' * 9}",
        *rows,
    ]
    write_page("\n".join(lines) + "\n", arguments.output)


if __name__ == "__main__":
    main()
