"""python scripts/bench_sparse_attention.py --output docs/benchmarks/sparse_attention.md

Compiles the branches of Native Sparse Attention by each method for one TPU chip, forward and with gradients, beside
dense splash attention: modelled time, peak memory and temporaries. Needs libtpu, but no TPU. A row takes up to a few
minutes, and is printed when it is there.
"""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardplan.hardware import GIB, Slice, parse_slice
from shardplan.verify.compiler.libtpu import libtpu_environment

os.environ.update(libtpu_environment(parse_slice("v5p-8")))

import haliax as hax
import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from levanter.layers.attention import AttentionMask

from shardplan.attention import dot_product_attention
from shardplan.cost.sparse.kernels import compressed_stages, selected_stages, window_stages
from shardplan.cost.sparse.stage import Stage
from shardplan.cost.sparse.stages import call_stages
from shardplan.cost.sparse.work import SparseWork
from shardplan.decoder import NativeSparseConfig, SelectedMethod
from shardplan.decoder.parts.attention.sparse.branches.compressed_branch import attend_to_compressed
from shardplan.decoder.parts.attention.sparse.branches.query_chunks import QUERIES_PER_CHUNK, map_query_chunks
from shardplan.decoder.parts.attention.sparse.branches.selected_branch import attend_to_selected
from shardplan.decoder.parts.attention.sparse.branches.window_branch import attend_to_windows
from shardplan.decoder.parts.attention.sparse.kernels.compressed_kernel import attend_to_compressed_by_kernel
from shardplan.decoder.parts.attention.sparse.kernels.window.kernel import attend_to_windows_by_kernel
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.plan.attention_plan import SparseKernel
from shardplan.verify.compiler.topology import make_topology_mesh
from shardplan.verify.hlo.collectives import Network
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.timing import model_step

CONFIG = NativeSparseConfig(2560, 4, 16, 128, 128, block=32, stride=16, selection_block=64, selected=16, window=512)
LENGTHS = (8192, 32768, 65536, 262144)
SMALL = "12 heads of 64, 2 groups", NativeSparseConfig(768, 2, 6, 64, 64, 32, 16, 64, 16, 512), (2048, 8192)
"""A layer of the 125M model, for the table of choices."""
DENSE_EFFICIENCY = 0.6
"""Share of peak FLOP/s of dense splash attention: an assumption, as nothing runs here."""
LARGEST_UNION = CONFIG.initial + CONFIG.local + 8 * (CONFIG.selected - CONFIG.initial - CONFIG.local)
"""Blocks of a tile of 8 queries that share no other than forced blocks."""
UNIONS = (24, LARGEST_UNION)
"""Blocks of a tile: of neighbours that select much the same, and of unrelated ones."""
DENSE = "dense splash"


def arrays(length: int, keys: int) -> list[tuple[tuple[int, ...], Any]]:
    """Return shapes and dtypes of queries, keys and values."""
    of_keys = (keys, CONFIG.groups, CONFIG.key_size)
    return [
        ((length, CONFIG.groups, CONFIG.heads_per_group, CONFIG.key_size), jnp.bfloat16),
        *[(of_keys, jnp.bfloat16)] * 2,
    ]


def selected(method: SelectedMethod, length: int) -> tuple[Callable[..., jax.Array], list[Any]]:
    """Return the selected branch, and its arrays."""

    def attend(blocks: jax.Array, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        positions = jnp.arange(length)
        selection = CONFIG.selection
        return attend_to_selected(selection, method, QUERIES_PER_CHUNK, positions, queries, blocks, keys, values).output

    return attend, [((length, CONFIG.groups, CONFIG.selected), jnp.int32), *arrays(length, length)]


def compressed(by_kernel: bool, length: int) -> tuple[Callable[..., Any], list[Any]]:
    """Return the compressed branch with the importance of blocks, and its arrays."""
    blocks = CONFIG.selection_blocks(length)

    def attend(queries: jax.Array, keys: jax.Array, values: jax.Array) -> Any:
        if by_kernel:
            return attend_to_compressed_by_kernel(CONFIG, blocks, jnp.arange(length), queries, keys, values)

        def run(positions: jax.Array, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
            return attend_to_compressed(CONFIG, positions, queries, keys, values, blocks)

        return map_query_chunks(run, QUERIES_PER_CHUNK, jnp.arange(length), queries)

    return attend, arrays(length, CONFIG.compressed_blocks(length))


def window(by_kernel: bool, length: int) -> tuple[Callable[..., jax.Array], list[Any]]:
    """Return the window branch, and its arrays."""

    def attend(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        if by_kernel:
            return attend_to_windows_by_kernel(CONFIG, jnp.int32(0), queries, keys, values)
        return attend_to_windows(CONFIG, jnp.int32(0), queries, keys, values, QUERIES_PER_CHUNK)

    return attend, arrays(length, length + CONFIG.window - 1)


def dense(length: int) -> tuple[Callable[..., jax.Array], list[Any]]:
    """Return dense causal attention by splash, and its arrays."""
    names = ("batch", "kv_head", "q_heads_per_group", "position", "head_size")

    def attend(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        q = hax.named(queries, names)
        k, v = (hax.named(x, ("batch", "kv_head", "key_position", "head_size")) for x in (keys, values))
        output = dot_product_attention(
            "position", "key_position", "head_size", q, k, v, AttentionMask.causal(), strategy="none", kernel="splash"
        )
        return output.array

    of_keys = (CONFIG.groups, length, CONFIG.key_size)
    of_queries = (CONFIG.groups, CONFIG.heads_per_group, length, CONFIG.key_size)
    return attend, [(of_queries, jnp.bfloat16), *[(of_keys, jnp.bfloat16)] * 2]


def with_gradients(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return the function that computes gradients of queries, keys and values, and its arrays."""
    queries, _, values = inputs[-3:]
    gradient = (*queries[0][:-1], values[0][-1]), jnp.bfloat16

    def backward(*arguments: jax.Array) -> Any:
        *before, queries, keys, values, of_output = arguments

        def run(*differentiated: jax.Array) -> jax.Array:
            results = function(*before, *differentiated)
            return results[0] if isinstance(results, tuple) else results

        return jax.vjp(run, queries, keys, values)[1](of_output)

    return backward, [*inputs, gradient]


def compile_for(hardware: Slice, function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[float, float, float]:
    """Return modelled seconds without kernels, peak GiB, and GiB of temporaries, of one device with one sequence.

    The compiler chooses the layouts of inputs and outputs, as it does where the layer's projections are before and
    after them.
    """
    mesh = make_topology_mesh(hardware, {"device": hardware.devices})
    spec = PartitionSpec("device")
    layout = Format(Layout.AUTO, NamedSharding(mesh, spec))
    structs = [jax.ShapeDtypeStruct((hardware.devices, *shape), dtype) for shape, dtype in inputs]
    run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(run, in_shardings=layout, out_shardings=layout).lower(*structs).compile()
    network = Network({"device": hardware.devices}, hardware, [0] * hardware.devices)
    timing = model_step(parse(compiled.as_text()), network, hardware)
    memory = compiled.memory_analysis()
    return timing.seconds, memory.peak_memory_in_bytes / GIB, memory.temp_size_in_bytes / GIB


def dense_seconds(hardware: Slice, length: int, is_backward: bool) -> float:
    """Seconds = matmuls * 2 * heads * head size * length^2 / 2 / (60 % of peak): 2 matmuls forward, 7 backward."""
    heads = CONFIG.groups * CONFIG.heads_per_group
    flops = (7 if is_backward else 2) * heads * CONFIG.key_size * length**2
    return flops / (DENSE_EFFICIENCY * hardware.generation.flops)


def kernel_seconds(hardware: Slice, stages: Iterable[Stage]) -> float:
    """Seconds of kernels, one after the other."""
    return sum(stage.seconds(hardware.generation) for stage in stages)


def work_of(
    hardware: Slice,
    length: int,
    method: SparseKernel = SparseKernel.KERNEL,
    config: NativeSparseConfig = CONFIG,
) -> SparseWork:
    """Return one sequence of a device with all groups."""
    memory = hardware.generation.core_memory
    return SparseWork(config, method, 2, 1, config.groups, PositionParts(length), (), (), memory)


def rows(hardware: Slice, length: int) -> Iterator[str]:
    """Yield the rows of the table for one length, with the time of dense attention over each time."""
    branches: dict[str, tuple[Callable[..., Any], list[Any]]] = {
        DENSE: dense(length),
        "selected, kernel": selected(SelectedMethod.KERNEL, length),
        "compressed and importance, kernel": compressed(True, length),
        "window, kernel": window(True, length),
        "window, XLA": window(False, length),
        "compressed and importance, XLA": compressed(False, length),
        "selected, gathered blocks, XLA": selected(SelectedMethod.GATHERED_BLOCKS, length),
        "selected, dense mask, XLA": selected(SelectedMethod.DENSE_MASK, length),
    }
    for name, (function, inputs) in branches.items():
        for is_backward in (False, True):
            program = with_gradients(function, inputs) if is_backward else (function, inputs)
            direction = "backward" if is_backward else "forward"
            label = f"| {hardware.generation.name} | {length // 1024}K | {direction} | {name}"
            try:
                in_xla, peak, temporaries = compile_for(hardware, *program)
            except jax.errors.JaxRuntimeError as error:
                yield f"{label} | does not compile: {str(error).splitlines()[0][:80]} | | | |"
                continue
            times = kernel_times(hardware, name, length, is_backward) or {"": 0.0}
            if name == DENSE:  # the reading of the module has its kernels, at peak
                in_xla = 0.0
            for of_what, by_kernels in times.items():
                seconds = in_xla + by_kernels
                ratio = dense_seconds(hardware, length, is_backward) / seconds
                yield f"{label}{of_what} | {1e3 * seconds:.1f} | {ratio:.2f} | {peak:.2f} | {temporaries:.2f} |"


def kernel_times(hardware: Slice, name: str, length: int, is_backward: bool) -> dict[str, float]:
    """Label -> seconds of the kernels of a branch, as plans price them; empty if it has none."""
    work = work_of(hardware, length)
    match name:
        case "dense splash":
            return {"": dense_seconds(hardware, length, is_backward)}
        case "selected, kernel":
            times = {}
            for union in UNIONS:
                blocks = min(union, CONFIG.selection_blocks(length))
                stages = selected_stages(work, blocks, is_backward)
                times[f", unions of {union}"] = kernel_seconds(hardware, stages)
            return times
        case "compressed and importance, kernel":
            return {"": kernel_seconds(hardware, compressed_stages(work, is_backward))}
        case "window, kernel":
            return {"": kernel_seconds(hardware, window_stages(work, is_backward))}
        case _:
            return {}


def kernel_table(hardware: Slice) -> str:
    """Return the times of kernels for all lengths, which need no compiler."""
    kernels = ("selected, kernel", "compressed and importance, kernel", "window, kernel")
    lines = []
    for length in LENGTHS:
        for is_backward in (False, True):
            of_dense = dense_seconds(hardware, length, is_backward)
            times = [
                seconds for name in kernels for seconds in kernel_times(hardware, name, length, is_backward).values()
            ]
            cells = [f"{1e3 * each:.1f} ({of_dense / each:.1f})" for each in times]
            direction = "backward" if is_backward else "forward"
            lines.append(f"| {length // 1024}K | {direction} | {1e3 * of_dense:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def choice_table(hardware: Slice) -> str:
    """Return the times of all methods as plans price them, which need no compiler."""
    lines = []
    for label, config, lengths in (("64 heads of 128, 4 groups", CONFIG, (2048, *LENGTHS)), SMALL):
        for length in lengths:
            cells, times = [], {}
            for method in SparseKernel:
                work = work_of(hardware, length, method, config)
                forward, backward = (
                    1e3 * kernel_seconds(hardware, call_stages(work, is_backward)) for is_backward in (False, True)
                )
                cells.append(f"{forward:.1f} + {backward:.1f}")
                times[method.value] = forward + backward
            lines.append(f"| {label} | {length:,} | {' | '.join(cells)} | `{min(times, key=times.__getitem__)}` |")
    return "\n".join(lines)


TEMPLATE = """# Native Sparse Attention, by the TPU compiler

Made by `python scripts/bench_sparse_attention.py {arguments}--output docs/benchmarks/sparse_attention.md`
with libtpu on a CPU machine with 2 cores. Nothing ran on a TPU.

One sequence on one chip: 64 query heads, 4 groups, heads of size 128, bfloat16; blocks of 32 with stride 16, 16
selected blocks of 64, window of 512. Times are modelled:

- XLA: the compiler's cycles, and gathers at HBM bandwidth, as in `shardplan.verify`. Backward programs compute the
  output again, chunk by chunk. Work without cycles counts by its bytes, so that the dense mask is a lower bound.
- Kernels of the sparse branches: the larger of their cycles, by the compiler's schedule for v5p, and their copies at
  80% of HBM bandwidth; and the compiler's cycles for tables, without sorts. Backward rows have the time of the backward
  kernels alone, and the memory of a program that computes the output first. A tile's blocks are spread evenly over the
  ranges of keys of the backward kernel.
- Dense splash: 2 matmuls forward and 7 backward at 60% of peak; the compiler gives no cycles.

"Unions" are the blocks that the 8 queries of a tile select together: 24 where neighbours select much the same,
{largest} if they share forced blocks only. A ratio is the time of dense splash over the method's.

## Kernels on v5p

Milliseconds, and ratios; the compressed branch has the importance of blocks in its forward pass.

| length | pass | dense splash | selected, unions of 24 | selected, unions of {largest} | compressed | window |
| --- | --- | --- | --- | --- | --- | --- |
{kernels}

## Which method a plan chooses

Milliseconds of one call on v5p, forward and with its gradient, as `shardplan.cost.sparse` prices it: three branches,
choice of blocks and compression, with unions of 24. What the compiler says of XLA's branches is in the table below, and
for 64K tokens in [the log](../log.md#native-sparse-attention).

| layer | tokens | dense mask | gathered blocks | kernels | chosen |
| --- | --- | --- | --- | --- | --- |
{choices}

Compiled at 2,048 tokens, forward, with earlier kernels: 2 groups of 6 heads of size 64 take 1.03 ms by XLA, with a
dense mask, and 0.49 ms by kernels, of which 0.26 ms is what XLA computes beside them; 12 groups of one head 1.46 and
1.17 ms, of which 0.51 ms. The present kernels' own time is shorter (0.18 and 0.55 ms). The rest is copies between
layouts for the most part, which plans leave out.

## Compiled programs

| chip | length | pass | method | ms | dense / this | peak GiB | temporaries GiB |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", nargs="+", default=["v5p-8"], help="slices of one chip generation each")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--output", help="Markdown file to write; default: the rows on stdout only")
    options = parser.parse_args()
    lines: list[str] = []
    for name in options.slices:
        for length in options.lengths:
            for line in rows(parse_slice(name), length):
                print(line, flush=True)
                lines.append(line)
                if options.output:
                    write(Path(options.output), options.slices, options.lengths, lines)


def write(path: Path, slices: Sequence[str], lengths: Sequence[int], lines: Sequence[str]) -> None:
    """Write the page with the rows so far."""
    arguments = f"--slices {' '.join(slices)} --lengths {' '.join(map(str, lengths))} "
    v5p = parse_slice("v5p-8")
    text = TEMPLATE.format(
        arguments=arguments,
        largest=LARGEST_UNION,
        kernels=kernel_table(v5p),
        choices=choice_table(v5p),
        rows="\n".join(lines),
    )
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
