"""python scripts/bench_orbax.py [--runs 3] [--checkpoint build/llama-1gib] [--output docs/benchmarks/orbax.md]

Export a model of about 1 GiB to Orbax from 8 virtual CPU devices in 2 processes, and compare the peak memory of each
process with its part of the model, and the seconds with those of writing the same bytes bare: every process writes its
shards to one file, and flushes it to the disk, as tensorstore does.

It prints a table (--output also writes it) and exits with 1 if a target is missed. If the checkpoint does not exist,
scripts/make_llama_checkpoint.py makes it.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PROCESSES = 2
DEVICES = 8
LAYERS = 7
GIB = 2**30
BUDGET = 128 * 2**20
"""Host memory that the load before the export may use beyond the model, bytes."""
MAX_OVERHEAD_GIB = 1.0
"""Limit of the memory of a process beyond its part of the model, Python and all libraries included."""
CHECKPOINT = Path("build/llama-1gib")
COMMAND = "python scripts/bench_orbax.py --output docs/benchmarks/orbax.md"
PACKAGES = ("jax", "orbax-checkpoint", "tensorstore")

LIMITATIONS = (
    "Virtual CPU devices keep their arrays in host memory: the part of the model is in the peak, whether it is written "
    "or not. Shards of a TPU are copied to the host before they are written: it holds one copy of its shards.",
    "The peak is that of the whole process from its start to the end of the export, the load included.",
    "Bare bytes are written after the export, by the same processes.",
    "Both processes share the 2 cores and the disk of one machine, and its other work is not controlled: only ratios "
    "within a run are compared.",
)


@dataclass(frozen=True)
class Measurement:
    """What one process has measured."""

    peak_bytes: int
    """Peak resident memory up to the end of the export."""
    loaded_bytes: int
    """Peak resident memory before the export."""
    model_bytes: int
    """Bytes of all arrays of the model."""
    own_bytes: int
    """Bytes of the shards of this process."""
    export_s: float
    """Duration of `save_orbax`."""
    bare_s: float
    """Duration of writing the same shards to a file, until they are on the disk."""


# ---- in a measuring process


def measure(checkpoint: str, folder: Path) -> Measurement:
    """Load the checkpoint with all other processes, export it, and write the same bytes bare."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from shardplan import load_pretrained, save_orbax
    from shardplan.runtime.devices import start_devices
    from shardplan.runtime.processes.group import open_process_group

    start_devices(f"cpu-{DEVICES}", DEVICES, is_cpu=True)
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("data",))):
        mapping = {"embed": "data"}
        model = load_pretrained(checkpoint, axis_mapping=mapping, dtype="bfloat16", budget=BUDGET)
        jax.block_until_ready(model)
    arrays = [array for array in jax.tree.leaves(model) if isinstance(array, jax.Array)]
    shards = [np.asarray(shard.data) for array in arrays for shard in array.addressable_shards]
    loaded = peak_rss()
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    started = time.perf_counter()
    save_orbax(model, str(folder / "orbax"), config)
    export_s = time.perf_counter() - started
    peak = peak_rss()
    with open_process_group() as processes:
        processes.wait_for_all("bare")
    started = time.perf_counter()
    with open(folder / f"bare-{jax.process_index()}", "wb") as file:
        for shard in shards:
            file.write(np.ascontiguousarray(shard).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    with open_process_group() as processes:
        processes.wait_for_all("written")
    bare_s = time.perf_counter() - started
    model_bytes = sum(array.nbytes for array in arrays)
    return Measurement(peak, loaded, model_bytes, sum(shard.nbytes for shard in shards), export_s, bare_s)


def peak_rss() -> int:
    """Return the largest resident memory of this process so far, bytes."""
    status = Path("/proc/self/status").read_text()  # not inherited from the process that started this one
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


# ---- in the parent


def run_once(checkpoint: Path, number: int) -> list[Measurement]:
    """Start all processes of an export, and return what each has measured."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    folder = Path(tempfile.mkdtemp(dir=checkpoint.parent))
    try:
        started = []
        for index in range(PROCESSES):
            environment = {
                **os.environ, "JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(PROCESSES), "JAX_PROCESS_ID": str(index),
            }  # fmt: skip
            command = [sys.executable, __file__, "--checkpoint", str(checkpoint), "--measure", str(folder)]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit(f"bench_orbax: processes ended with {[process.returncode for process in started]}")
        written = sum(path.stat().st_size for path in (folder / "orbax").rglob("*") if path.is_file())
    finally:
        shutil.rmtree(folder)
    run = [Measurement(**json.loads(output.splitlines()[-1])) for output in outputs]  # Gloo prints lines before it
    print(f"run {number}: {written / GIB:.2f} GiB written; {run}", file=sys.stderr, flush=True)
    return run


def export_ratio(run: list[Measurement]) -> float:
    """Return the seconds of an export relative to those of bare writes; the slowest process counts."""
    return max(each.export_s for each in run) / max(each.bare_s for each in run)


def overhead_gib(run: list[Measurement]) -> float:
    """Return the peak memory of a process beyond its part of the model, of the process with the largest."""
    return max(each.peak_bytes - each.model_bytes / PROCESSES for each in run) / GIB


def table(results: list[list[Measurement]]) -> str:
    """Format the measurements as Markdown tables."""
    rows = [
        "| process | peak RSS, GiB | peak RSS before the export, GiB | model / processes + 1 GiB | shards, GiB | "
        "export, s | bare, s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for index in range(PROCESSES):
        each = [run[index] for run in results]
        sizes = [
            max(one.peak_bytes for one in each) / GIB, max(one.loaded_bytes for one in each) / GIB,
            each[0].model_bytes / PROCESSES / GIB + MAX_OVERHEAD_GIB, each[0].own_bytes / GIB,
            statistics.median(one.export_s for one in each), statistics.median(one.bare_s for one in each),
        ]  # fmt: skip
        rows.append(f"| {index} | " + " | ".join(f"{size:.2f}" for size in sizes) + " |")
    ratios, overheads = [export_ratio(run) for run in results], [overhead_gib(run) for run in results]
    rows += [
        "",
        "| within a run | median | each run | target |",
        "|---|---:|---|---:|",
        f"| GiB beyond model / processes | {statistics.median(overheads):.2f} | "
        f"{', '.join(f'{value:.2f}' for value in overheads)} | <= {MAX_OVERHEAD_GIB:g} |",
        f"| seconds, export / bare | {statistics.median(ratios):.2f} | "
        f"{', '.join(f'{value:.2f}' for value in ratios)} | |",
    ]
    return "\n".join(rows)


def page(tables: str, runs: int, model_bytes: int) -> str:
    """Format the Markdown page."""
    versions = {"Python": platform.python_version()} | {package: metadata.version(package) for package in PACKAGES}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    lines = [
        "# Exporting to Orbax",
        "",
        "```",
        f"{COMMAND} --runs {runs}",
        "```",
        "",
        f"Model: a Llama of {model_bytes / GIB:.2f} GiB in random bfloat16, sharded over {DEVICES} virtual CPU devices "
        f"in {PROCESSES} processes.",
        f"Machine: {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB of memory.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "",
        "Of memory, the largest of all runs; of seconds, the median.",
        "",
        tables,
        "",
        *(f"- {sentence}" for sentence in LIMITATIONS),
        "",
    ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Measure exports to Orbax.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="folder; made if missing")
    parser.add_argument("--runs", type=int, default=3, help="times that the export is measured")
    parser.add_argument("--output", type=Path, help="Markdown page to write")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # for the measuring processes
    return parser.parse_args()


def main() -> int:
    """Measure, report, and return the exit status."""
    args = parse_arguments()
    if args.measure:
        with redirect_stdout(sys.stderr):  # stdout must carry nothing but the measurement
            measurement: Any = measure(str(args.checkpoint), args.measure)
        print(json.dumps(asdict(measurement)))
        return 0
    if not args.checkpoint.exists():
        script = Path(__file__).with_name("make_llama_checkpoint.py")
        command = [sys.executable, str(script), "--output", str(args.checkpoint), "--layers", str(LAYERS)]
        subprocess.run(command, check=True)
    results = [run_once(args.checkpoint, number + 1) for number in range(args.runs)]
    tables = table(results)
    print(tables)
    if args.output:
        args.output.write_text(page(tables, args.runs, results[0][0].model_bytes), encoding="utf-8")
    return 1 if statistics.median(map(overhead_gib, results)) > MAX_OVERHEAD_GIB else 0


if __name__ == "__main__":
    sys.exit(main())
