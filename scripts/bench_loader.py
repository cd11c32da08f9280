"""python scripts/bench_loader.py [--runs 3] [--checkpoint build/llama-2gib] [--output docs/benchmarks/loader.md]

Load one checkpoint with shardplan and with its peers (scripts/loader_peers.py), onto the same mesh of virtual CPU
devices with the same axis mapping, and compare seconds and peak memory. Every measurement is a process of its own; the
loaders take turns, and ratios are taken within a run. The models that shardplan and Levanter load must have equal bits
and equal shards.

It prints a table (--output also writes it) and exits with 1 if a target is missed or the models differ. If the
checkpoint does not exist, scripts/make_llama_checkpoint.py makes it. Levanter needs about 22 GiB of memory.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from loader_peers import maxtext_load, orbax_load, preadv_load

from shardplan.model.corrections.levanter_compat import LEVANTER_PACKAGES

DEVICES = 8
MESH = {"replica": 1, "data": 2, "model": 4}
DTYPE = "bfloat16"
LOADERS = ("preadv", "shardplan", "orbax", "maxtext", "levanter")
MODELS = ("shardplan", "levanter")
"""Loaders that return a Levanter model; of the arrays of the others only the bytes are counted."""
BUDGET = 256 * 2**20
"""Host memory that shardplan may use beyond the model, bytes."""
PACKAGES = ("jax", *LEVANTER_PACKAGES, "numpy")
MAX_TOUCHED_FRACTION = 0.9
"""Largest fraction of the free memory that is touched before a load; other processes keep the remainder."""
TOUCHED_PER_MODEL_BYTE = 10
"""Bytes touched per byte of the model: what Levanter needs at its peak."""
GIB = 2**30
MAX_OVERHEAD_GIB = BUDGET / GIB + 300 / 1024
"""Limit of the memory of shardplan's process beyond the model, GiB: the budget, and Python with its libraries."""
CHECKPOINT = Path("build/llama-2gib")
COMMAND = "python scripts/bench_loader.py --output docs/benchmarks/loader.md"

LIMITATIONS = (
    "Virtual CPU devices share one memory: no transfer to an accelerator is included, and with shardplan the devices "
    "that hold the same shard share its buffer.",
    "The files come from the page cache: a slower disk or network adds the same time for reading to both.",
    "One process holds all shards: what shardplan saves when every host reads only its own shards is not measured.",
    "`preadv` reads all bytes with as many threads as shardplan into memory that was touched before; Orbax returns the "
    "checkpoint's tensors, not the stacked model; `maxtext` reimplements MaxText's loader from its description.",
    "Only `load_pretrained` is timed, after imports and a look at the model; Levanter's time includes compiling its "
    "conversion, as every first load does.",
    "Peak RSS is of the whole process up to the end of the load.",
    "Free memory is written to just before each load, because memory that a virtual machine's host has reclaimed "
    "costs seconds per GiB at its first use; a load of more than a few seconds, such as Levanter's, still has some of "
    "it.",
    "The machine has other work: only ratios within a run are compared with the targets.",
)


@dataclass(frozen=True)
class Measurement:
    """The measurements of one load, in a process of its own."""

    seconds: float
    """Duration of the `load_pretrained` call, until all arrays are ready."""
    peak_bytes: int
    """Peak resident memory of the process up to the end of the load."""
    base_bytes: int
    """Peak resident memory before the load."""
    model_bytes: int
    """Bytes of all arrays, each counted once."""
    values_sha256: str
    """Digest of the values of all arrays, in the order of their paths."""
    shards_sha256: str
    """Digest of the part of each array on each device."""


@dataclass(frozen=True)
class Target:
    """A value computed from the measurements of a run, and the range in which its median must be."""

    label: str
    compute: Callable[[Mapping[str, Measurement]], float]
    minimum: float = 0.0
    maximum: float = math.inf

    def row(self, results: list[dict[str, Measurement]]) -> str:
        """Return the row of the Markdown table."""
        values = [self.compute(run) for run in results]
        limit = f">= {self.minimum:g}" if self.minimum else f"<= {self.maximum:.3g}"
        each = ", ".join(f"{value:.2f}" for value in values)
        return f"| {self.label} | {statistics.median(values):.2f} | {each} | {limit} |"

    def is_met(self, results: list[dict[str, Measurement]]) -> bool:
        """Return whether the median is within the limits."""
        return self.minimum <= statistics.median(self.compute(run) for run in results) <= self.maximum


def time_ratio(loader: str) -> Callable[[Mapping[str, Measurement]], float]:
    return lambda run: run[loader].seconds / run["shardplan"].seconds


def memory_ratio(loader: str) -> Callable[[Mapping[str, Measurement]], float]:
    return lambda run: run[loader].peak_bytes / run["shardplan"].peak_bytes


TARGETS = (
    Target("seconds, levanter / shardplan", time_ratio("levanter"), minimum=15),
    Target("seconds, orbax / shardplan", time_ratio("orbax"), minimum=1),
    Target("seconds, maxtext / shardplan", time_ratio("maxtext"), minimum=1),
    Target("seconds, shardplan / preadv", lambda run: 1 / time_ratio("preadv")(run), maximum=2.5),
    Target("peak RSS, levanter / shardplan", memory_ratio("levanter"), minimum=1),
    Target("peak RSS, orbax / shardplan", memory_ratio("orbax"), minimum=1),
    Target("peak RSS, maxtext / shardplan", memory_ratio("maxtext"), minimum=1),
    Target("GiB of shardplan beyond the model",
           lambda run: (run["shardplan"].peak_bytes - run["shardplan"].model_bytes) / GIB, maximum=MAX_OVERHEAD_GIB),
)  # fmt: skip


def log(message: str) -> None:
    """Print one line to stderr at once."""
    print(message, file=sys.stderr, flush=True)


# ---- in a measuring process: JAX is imported here and only here, so that the parent stays small


def measure(loader: str, checkpoint: str) -> Measurement:
    """Load `checkpoint` with `loader` onto `DEVICES` virtual CPU devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    calls = {"shardplan": shardplan_load, "levanter": levanter_load}
    calls |= {"preadv": preadv_load, "orbax": orbax_load, "maxtext": maxtext_load}
    load = calls[loader](checkpoint, make_bench_plan(checkpoint))
    base = peak_rss()
    touch_free_memory(sum(path.stat().st_size for path in Path(checkpoint).glob("*.safetensors")))
    started = time.perf_counter()
    model = jax.block_until_ready(load())
    seconds = time.perf_counter() - started
    peak = peak_rss()
    if loader not in MODELS:
        size = model if isinstance(model, int) else sum(array.nbytes for array in jax.tree.leaves(model))
        return Measurement(seconds, peak, base, size, "", "")
    return Measurement(seconds, peak, base, *fingerprint(model))


def make_bench_plan(checkpoint: str) -> Any:
    """Make shardplan's Plan for `MESH`; this also inspects the model, so that no loader is timed doing it first."""
    from shardplan import make_plan
    from shardplan.config import PlanConfig
    from shardplan.config.sections import HardwareConfig, MeshConfig, ModelConfig
    from shardplan.plan.workload.workload import Workload

    return make_plan(
        PlanConfig(
            model=ModelConfig(ref=checkpoint),
            hardware=HardwareConfig(slice=f"cpu-{DEVICES}"),
            mesh=MeshConfig(**MESH),
            # few tokens: only the parameter mapping of the plan is used, and it must fit any machine that the load fits
            workload=Workload(batch=DEVICES, position=256, param_dtype=DTYPE, compute_dtype=DTYPE),
        )
    )


def shardplan_load(checkpoint: str, plan: Any) -> Callable[[], Any]:
    """Return the call that loads with shardplan."""
    from shardplan import load_pretrained

    return lambda: load_pretrained(checkpoint, plan=plan, budget=BUDGET)


def levanter_load(checkpoint: str, plan: Any) -> Callable[[], Any]:
    """Return the call that loads with Levanter, on the mesh and with the parameter mapping of `plan`."""
    import haliax as hax
    import jax.numpy as jnp
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    from shardplan.execution.device_mesh import make_mesh

    converter = LlamaConfig().hf_checkpoint_converter(ref_checkpoint=checkpoint)
    mapping = {axis: tuple(mesh_axes) for axis, mesh_axes in plan.param_mapping.items()}
    mesh = make_mesh(plan)

    def load() -> Any:
        with hax.partitioning.set_mesh(mesh), hax.axis_mapping(mapping):
            return converter.load_pretrained(
                LlamaLMHeadModel, ref=checkpoint, axis_mapping=mapping, dtype=jnp.dtype(DTYPE)
            )

    return load


def touch_free_memory(model_bytes: int) -> None:
    """Write once, in a process that then ends, to as much free memory as a load may need.

    A virtual machine's host reclaims memory that was free for some seconds, and its next use costs up to 3 s/GiB:
    otherwise the measured time would mainly depend on how recently another process used that memory.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    nbytes = min(int(MAX_TOUCHED_FRACTION * free), TOUCHED_PER_MODEL_BYTE * model_bytes)
    touch = "import sys, numpy; numpy.empty(int(sys.argv[1]), numpy.uint8)[::4096] = 1"
    subprocess.run([sys.executable, "-c", touch, str(nbytes)], check=True)


def peak_rss() -> int:
    """Return the largest resident memory of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def fingerprint(model: Any) -> tuple[int, str, str]:
    """Return the bytes of all arrays of `model`, a digest of their values, and one of their shards."""
    import jax
    import numpy as np

    leaves = jax.tree_util.tree_flatten_with_path(model)[0]
    arrays = sorted((jax.tree_util.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, jax.Array))
    values, shards = hashlib.sha256(), hashlib.sha256()
    total = 0
    for path, array in arrays:
        total += array.nbytes
        values.update(f"{path} {array.dtype} {array.shape}".encode())
        values.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        for device, index in sorted(
            array.sharding.devices_indices_map(array.shape).items(), key=lambda item: item[0].id
        ):
            bounds = [part.indices(n)[:2] for part, n in zip(index, array.shape, strict=True)]
            shards.update(f"{path} {device.id} {bounds}".encode())
    return total, values.hexdigest(), shards.hexdigest()


# ---- in the parent


def warm_page_cache(checkpoint: Path) -> None:
    """Read every weight file once, through one small buffer."""
    buffer = bytearray(2**24)
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure_apart(loader: str, checkpoint: Path) -> Measurement:
    """Run `measure` in a fresh process.

    Linux starts a child's peak RSS at that of the process it was forked from: this process must hold little memory.
    """
    warm_page_cache(checkpoint)
    command = [sys.executable, __file__, "--checkpoint", str(checkpoint), "--measure", loader]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        reason = "; killed, probably because the machine ran out of memory" if done.returncode == -9 else ""
        raise SystemExit(f"bench_loader: loading with {loader} ended with status {done.returncode}{reason}")
    return Measurement(**json.loads(done.stdout))


def run_all(checkpoint: Path, runs: int) -> list[dict[str, Measurement]]:
    """Measure all loaders `runs` times, in alternating order."""
    results = []
    for i in range(runs):
        order = LOADERS if i % 2 == 0 else LOADERS[::-1]
        run = {}
        for loader in order:
            load = run[loader] = measure_apart(loader, checkpoint)
            log(f"run {i + 1}/{runs}  {loader}: {load.seconds:.2f} s, peak {load.peak_bytes / GIB:.2f} GiB")
        results.append(run)
    return results


def check_equal(results: list[dict[str, Measurement]]) -> None:
    """Exit with status 1 unless every load returned the same bytes in the same shards."""
    loads = [run[loader] for run in results for loader in MODELS]
    for label, digests in (
        ("values", {load.values_sha256 for load in loads}),
        ("shards", {load.shards_sha256 for load in loads}),
    ):
        if len(digests) > 1:
            raise SystemExit(f"bench_loader: the {label} of the loaded models differ: {', '.join(sorted(digests))}")


def table(results: list[dict[str, Measurement]]) -> str:
    """Format the measurements and ratios as Markdown tables."""
    rows = [
        "| loader | seconds (median) | seconds (each run) | peak RSS, GiB | RSS before the load, GiB | model, GiB |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for loader in LOADERS:
        loads = [run[loader] for run in results]
        seconds = [load.seconds for load in loads]
        sizes = (
            statistics.median(values) / GIB
            for values in zip(*((load.peak_bytes, load.base_bytes, load.model_bytes) for load in loads), strict=True)
        )
        each = ", ".join(f"{value:.2f}" for value in seconds)
        rows.append(
            f"| {loader} | {statistics.median(seconds):.2f} | {each} | " + " | ".join(f"{n:.2f}" for n in sizes) + " |"
        )
    rows += ["", "| within a run | median | each run | target |", "|---|---:|---|---:|"]
    return "\n".join([*rows, *(target.row(results) for target in TARGETS)])


def model_text(config: Mapping[str, Any]) -> str:
    """Describe the shape of the checkpoint's model."""
    return (
        f"{config['model_type']}, {config['num_hidden_layers']} layers, hidden {config['hidden_size']}, intermediate "
        f"{config['intermediate_size']}, {config['num_attention_heads']} heads / {config['num_key_value_heads']} kv "
        f"heads, vocab {config['vocab_size']}, random {DTYPE}"
    )


def page(checkpoint: Path, tables: str, runs: int) -> str:
    """Format the Markdown page."""
    import shardplan

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    versions = {"Python": platform.python_version(), "shardplan": shardplan.__version__}
    versions |= {package: metadata.version(package) for package in PACKAGES}
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    mesh = ", ".join(f"{axis} {size}" for axis, size in MESH.items())
    # a path of this machine means nothing on another
    checkpoint_option = "" if checkpoint == CHECKPOINT else " --checkpoint FOLDER"
    return "\n".join(
        [
            "# Loading a checkpoint: shardplan against its peers",
            "",
            "```",
            f"{COMMAND} --runs {runs}{checkpoint_option}",
            "```",
            "",
            f"Model: {model_text(config)}.",
            f"Mesh: {mesh}, on {DEVICES} virtual CPU devices; all loaders use the plan's parameter mapping.",
            f"Host memory that shardplan may use beyond the model: {BUDGET / GIB:g} GiB.",
            f"Machine: {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB of memory.",
            f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}.",
            "",
            tables,
            "",
            "All loads of shardplan and Levanter returned the same values, bit for bit, in the same shards.",
            "",
            *(f"- {sentence}" for sentence in LIMITATIONS),
            "",
        ]
    )


def ensure_checkpoint(checkpoint: Path) -> None:
    """Make the checkpoint if it does not exist."""
    if not checkpoint.exists():
        script = Path(__file__).with_name("make_llama_checkpoint.py")
        subprocess.run([sys.executable, str(script), "--output", str(checkpoint)], check=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Compare shardplan's loader with its peers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="folder; made if missing")
    parser.add_argument("--runs", type=int, default=3, help="times that all loaders are measured")
    parser.add_argument("--output", type=Path, help="Markdown page to write")
    parser.add_argument("--measure", choices=LOADERS, help=argparse.SUPPRESS)  # for the measuring processes
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs is {args.runs}; it must be at least 1")
    return args


def main() -> int:
    """Measure, compare, report, and return the exit status."""
    args = parse_arguments()
    if args.measure:
        with redirect_stdout(sys.stderr):  # stdout must carry nothing but the measurement
            measurement = measure(args.measure, str(args.checkpoint))
        print(json.dumps(asdict(measurement)))
        return 0
    ensure_checkpoint(args.checkpoint)
    results = run_all(args.checkpoint, args.runs)
    check_equal(results)
    tables = table(results)
    print(tables)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(page(args.checkpoint, tables, args.runs), encoding="utf-8")
    missed = [target.label for target in TARGETS if not target.is_met(results)]
    if missed:
        log(f"bench_loader: targets missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
