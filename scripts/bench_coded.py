"""python scripts/bench_coded.py [--runs 3] [--folder build/coded] [--output docs/benchmarks/coded.md]

Loads checkpoints of 1.3 to 2 GiB in bfloat16, fp8 and MXFP4 onto a mesh of virtual CPU devices, and reads the same
files bare. The checkpoints are made if the folder does not have them. Every measurement is a process of its own, as
those of bench_loader.py.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from bench_loader import BUDGET, GIB, Measurement, log, measure_apart
from bench_page import page_parser, write_page
from safetensors.numpy import save_file

from shardplan.checkpoint.format.index import INDEX
from shardplan.checkpoint.mapping.state_dict_program import expected_tensors
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import build_model

COMMAND = "python scripts/bench_coded.py --runs {runs} --output docs/benchmarks/coded.md"
BLOCK, MX_GROUP = 128, 32
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FILE_BYTES = 2**28
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """A way to store weights, and a model of which 2 GiB are stored so."""

    name: str
    config: str
    """Name of a bundled configuration."""
    changes: Mapping[str, object]
    """Keys of its config.json that differ, for its size."""
    stored: Callable[[np.random.Generator, str, tuple[int, ...]], Tensors]
    """Makes what is stored for a tensor."""


def plain(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Tensors:
    """Return numbers in bfloat16."""
    return {name: (random.standard_normal(shape, np.float32) * 0.02).astype(BFLOAT16)}


def fp8(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Tensors:
    """Return codes in fp8 with a scale for each block, of linear projections."""
    if len(shape) != 2 or "embed" in name or "lm_head" in name:
        return plain(random, name, shape)
    codes = random.integers(0, 0x7F, shape, np.uint8)  # without NaN
    scales = random.uniform(0.5, 2, [-(-n // BLOCK) for n in shape]).astype(np.float32)
    return {name: codes.view(FP8), f"{name}_scale_inv": scales}


def mxfp4(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Tensors:
    """Return codes of four bits with a power of two for each group, of experts."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return plain(random, name, shape)
    experts, inner, outer = shape
    blocks = random.integers(0, 256, (experts, outer, inner // MX_GROUP, MX_GROUP // 2), np.uint8)
    scales = random.integers(120, 124, blocks.shape[:-1], np.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 2048, "num_attention_heads": 16, "head_dim": 128}
KINDS = (
    Kind("bfloat16", "llama-3.1-8b", {**LLAMA, "num_hidden_layers": 23}, plain),
    Kind("fp8", "llama-3.1-8b", {
        **LLAMA, "num_hidden_layers": 46,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    }, fp8),
    Kind("MXFP4", "gpt-oss-20b", {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "vocab_size": 2048, "quantization_config": {"quant_method": "mxfp4"},
    }, mxfp4),
)  # fmt: skip


def make_checkpoint(folder: Path, kind: Kind) -> None:
    """Write a checkpoint of random numbers."""
    config = {**read_config(kind.config, None), **kind.changes}
    plain_config = {key: value for key, value in config.items() if key != "quantization_config"}
    shapes = expected_tensors(build_model(plain_config, 256).template)
    folder.mkdir(parents=True)
    weight_map = {}
    for number, tensors in enumerate(files_of(kind, shapes)):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def files_of(kind: Kind, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensors]:
    """Yield the tensors of each file."""
    random, tensors = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        tensors |= kind.stored(random, name, shape)
        if sum(each.nbytes for each in tensors.values()) > FILE_BYTES:
            yield tensors
            tensors = {}
    if tensors:
        yield tensors


def row(kind: Kind, stored: int, loads: list[Measurement], reads: list[Measurement]) -> str:
    """Return the line of a kind."""
    seconds = statistics.median(load.seconds for load in loads)
    ratio = statistics.median(load.seconds / read.seconds for load, read in zip(loads, reads, strict=True))
    beyond = statistics.median(load.peak_bytes - load.model_bytes for load in loads)
    cells = [
        kind.name, f"{stored / GIB:.2f}", f"{loads[0].model_bytes / GIB:.2f}", f"{seconds:.2f}",
        f"{stored / GIB / seconds:.2f}", f"{loads[0].model_bytes / 2 / seconds / 1e9:.2f}", f"{ratio:.1f}",
        f"{beyond / GIB:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build/coded"))
    arguments = parser.parse_args()
    loads: dict[str, list[Measurement]] = {kind.name: [] for kind in KINDS}
    reads: dict[str, list[Measurement]] = {kind.name: [] for kind in KINDS}
    for kind in KINDS:
        if not (arguments.folder / kind.name).exists():
            make_checkpoint(arguments.folder / kind.name, kind)
    for i in range(arguments.runs):
        for kind in KINDS if i % 2 == 0 else KINDS[::-1]:
            for loader, results in (("preadv", reads), ("shardplan", loads)):
                found = measure_apart(loader, arguments.folder / kind.name)
                results[kind.name].append(found)
                log(f"run {i + 1}/{arguments.runs}  {kind.name}, {loader}: {found.seconds:.2f} s")
    rows = []
    for kind in KINDS:
        stored = sum(path.stat().st_size for path in (arguments.folder / kind.name).glob("*.safetensors"))
        rows.append(row(kind, stored, loads[kind.name], reads[kind.name]))
    lines = [
        "# Loading codes",
        "",
        f"```\n{COMMAND.format(runs=arguments.runs)}\n```",
        "",
        "Random checkpoints of 1.3 to 2 GiB, loaded in bfloat16 onto 8 virtual CPU devices of one process (data 2",
        "x model 4), from the page cache, on a machine of 2 cores. Bare reads are those of the same files by as many",
        "threads. A byte has half a number in bfloat16, one in fp8 and two in MXFP4. Every number is computed in",
        "float32 on the host. Memory beyond the model is the peak of the whole process, Python and libraries included,",
        f"less the model; the loader's budget is {BUDGET / GIB:.2f} GiB.",
        "",
        "| stored as | files, GiB | model, GiB | seconds | GiB of files/s | billion numbers/s | seconds / bare reads "
        "| memory beyond the model, GiB |",
        f"|{'---|' + '---:|' * 7}",
        *rows,
    ]
    write_page("\n".join(lines) + "\n", arguments.output)


if __name__ == "__main__":
    main()
