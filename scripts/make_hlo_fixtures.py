"""python scripts/make_hlo_fixtures.py [--output tests/unit/hlo]

Compiles small programs for TPU slices and writes the compiled text, for the tests of its parser: collectives inside of
fusions, a matmul decomposed into a loop, a reduce-scatter, transfers between slices, attention kernels, replica groups
in every notation, and the reports of a program that does not fit. Needs libtpu, and takes ten seconds.

Source locations of this machine are removed from the text, and so are long parts that the parser does not use: most of
`backend_config`, and the code of kernels.
"""

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox.ops import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan.hardware import parse_slice
from shardplan.search.result.compiler_options import ASYNC_COLLECTIVES, NO_WINDOWED_EINSUM
from shardplan.verify.compiler.libtpu import libtpu_environment
from shardplan.verify.compiler.topology import make_topology_mesh

WINDOWED = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"}
KEPT = ("window_config", "barrier_config", "collective_algorithm_config", "async_collective_fusion_config")
"""Keys of `backend_config` that the fixtures keep."""
REPORTS = {
    "too_large": ".after_optimizations.txt",
    "too_large.live-range": "live-range.txt",
    "too_large.usage": "memory-usage-report.txt",
}
"""Fixture -> end of the file name in the compiler's dump."""

Array = tuple[tuple[int, ...], tuple[Any, ...]]
"""Shape and partition spec."""


def compile_text(
    function: Callable[..., Any],
    slice_name: str,
    sizes: Sequence[int],
    arrays: Sequence[Array],
    options: Mapping[str, str] = NO_WINDOWED_EINSUM,
    dtype: Any = jnp.bfloat16,
) -> str:
    """Compile `function` for arrays on a mesh of `sizes` replica x data x model, and return the module's text."""
    mesh = make_topology_mesh(parse_slice(slice_name), dict(zip(("replica", "data", "model"), sizes, strict=True)))
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec))) for shape, spec in arrays]

    def program(*arguments: jax.Array) -> Any:
        return function(mesh, *arguments)

    program.__name__ = function.__name__
    return jax.jit(program).lower(*structs).compile(compiler_options=dict(options)).as_text()


def constrain(mesh: Mesh, array: jax.Array, *spec: Any) -> jax.Array:
    """`array` with its dimensions sharded over mesh axes."""
    return lax.with_sharding_constraint(array, NamedSharding(mesh, P(*spec)))


def mlp(mesh: Mesh, x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Layers of two matmuls; the stored weights are sharded over `data`, and gathered in every layer."""

    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        hidden = constrain(mesh, x @ weights[0], "data", "model")
        return constrain(mesh, hidden @ weights[1], "data", None), None

    return lax.scan(layer, x, (w, v))[0]


def columns(mesh: Mesh, x: jax.Array, w: jax.Array) -> jax.Array:
    """A matmul with each weight of a stack, stored with the contracted dimension sharded."""

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, constrain(mesh, x @ weight, "data", "model")

    return lax.scan(layer, x, w)[1]


def gradient(mesh: Mesh, x: jax.Array, w: jax.Array) -> jax.Array:
    """The gradient of a weight stored sharded over `data`; the batch is sharded over `replica` and `data`."""

    def loss(w: jax.Array) -> jax.Array:
        return (constrain(mesh, x @ w, ("replica", "data"), None).astype(jnp.float32) ** 2).sum()

    return constrain(mesh, jax.grad(loss)(w), "data", None)


def attention(mesh: Mesh, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Gradients of causal splash attention on [batch, heads, position, head_size], with respect to q and k."""
    heads, position = q.shape[1:3]
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((position, position))] * heads)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks = splash_attention_kernel.BlockSizes(**{f"block_{name}": 128 for name in names})
    kernel = splash_attention_kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=blocks)
    spec = P("data")
    # like Levanter
    run = jax.shard_map(jax.vmap(kernel), mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    return jax.grad(lambda q, k: run(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1))(q, k)


def experts(mesh: Mesh, x: jax.Array, w: jax.Array) -> jax.Array:
    """Gradients of a grouped matmul of rows with equally many for each of the matrices `w`."""
    sizes = jnp.full((w.shape[0],), x.shape[0] // w.shape[0], jnp.int32)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return (lax.ragged_dot(x, w, sizes).astype(jnp.float32) ** 2).sum()

    gradients = jax.grad(loss, argnums=(0, 1))
    return jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P()), check_vma=False)(x, w)


def megablox_experts(mesh: Mesh, x: jax.Array, w: jax.Array) -> jax.Array:
    """The gradients of `experts`, by the grouped matmuls of Megablox: `gmm` twice, and `tgmm`."""
    sizes = jnp.full((w.shape[0],), x.shape[0] // w.shape[0], jnp.int32)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return (gmm(x, w, sizes, x.dtype).astype(jnp.float32) ** 2).sum()

    gradients = jax.grad(loss, argnums=(0, 1))
    return jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P()), check_vma=False)(x, w)


def exchange(mesh: Mesh, x: jax.Array) -> jax.Array:
    """An exchange of equally many rows between all devices along `data`, by their number."""
    devices = mesh.shape["data"]

    def send(x: jax.Array) -> jax.Array:
        sizes = jnp.full((devices,), x.shape[0] // devices, jnp.int32)
        starts = jnp.arange(devices, dtype=jnp.int32) * sizes
        return lax.ragged_all_to_all(x, jnp.zeros_like(x), starts, sizes, starts, sizes, axis_name="data")

    return jax.shard_map(send, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)


def gathers(mesh: Mesh, x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Two sharded arrays, gathered on every device."""
    return constrain(mesh, x * 2, None, None), constrain(mesh, y * 2, None, None)


def too_large(mesh: Mesh, x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Needs 56 GiB of a device with 31."""
    return jnp.tanh(x @ w) @ v, (x @ w).sum()


def make_fixtures(dump: Path) -> dict[str, str]:
    """Fixture -> text; XLA_FLAGS makes the compiler write its reports to `dump`."""
    side = 32768
    texts = {
        "async_gather": compile_text(
            mlp,
            "v4:4x4x4",
            (1, 16, 4),
            [
                ((65536, 2048), ("data", None)),
                ((5, 2048, 8192), (None, "data", "model")),
                ((5, 8192, 2048), (None, "model", "data")),
            ],
            {**NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES},
        ),
        "windowed": compile_text(
            columns,
            "v4:2x2x4",
            (1, 8, 2),
            [((16384, 512), ("data", None)), ((7, 512, 2048), (None, "data", "model"))],
            WINDOWED,
        ),
        "reduce_scatter": compile_text(
            gradient, "v4:4x4x4", (1, 16, 4), [((8192, 512), ("data", None)), ((512, 1024), (None, None))]
        ),
        "two_slices": compile_text(
            gradient, "2xv4:2x2x2", (2, 4, 2), [((4096, 512), (("replica", "data"), None)), ((512, 1024), ("data",))]
        ),
        "splash": compile_text(attention, "v4-8", (1, 4, 1), [((4, 2, 256, 128), ("data",))] * 3),
        "splash_batch": compile_text(attention, "v4-8", (1, 4, 1), [((8, 2, 256, 128), ("data",))] * 3),
        "groups": compile_text(
            gathers, "v4:2x2x4", (2, 2, 4), [((512, 1024), (("data", "replica"), None)), ((512, 1024), ("replica",))]
        ),
    }
    texts["ragged_dot"] = compile_text(experts, "v5p-8", (1, 4, 1), [((4096, 1024), ()), ((4, 1024, 2048), ())])
    texts["megablox"] = compile_text(megablox_experts, "v5p-8", (1, 4, 1), [((4096, 1024), ()), ((4, 1024, 2048), ())])
    texts["ragged_all_to_all"] = compile_text(exchange, "v5p-8", (1, 4, 1), [((4096, 1024), ("data",))])
    try:
        arrays = [((4 * side, side), ("data",)), ((side, 4 * side), ()), ((4 * side, side), ())]
        compile_text(too_large, "v4-8", (1, 4, 1), arrays, dtype=jnp.float32)
    except jax.errors.JaxRuntimeError as error:
        assert "RESOURCE_EXHAUSTED" in str(error)
    for name, end in REPORTS.items():
        [path] = dump.glob(f"**/*jit_too_large*{end}")
        texts[name] = path.read_text(encoding="utf-8")
    return {name: trim(text) for name, text in texts.items()}


def trim(text: str) -> str:
    """`text` without source locations, and without long parts that the parser does not use."""
    text = re.sub(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*\n*", "", text, flags=re.MULTILINE)
    text = re.sub(r" ?(source_file=\"[^\"]*\"|source_(end_)?(line|column)=\d+|stack_frame_id=\d+)", "", text)
    pieces, position, mark = [], 0, "backend_config="
    while (start := text.find(mark, position)) >= 0:
        start += len(mark)
        pieces.append(text[position:start])
        config, position = text[start:], start
        if config.startswith("{"):
            values, length = json.JSONDecoder().raw_decode(config)
            kept = {key: value for key, value in values.items() if key in KEPT}
            pieces.append(json.dumps(kept, separators=(",", ":")))
            position += length
    return "".join([*pieces, text[position:]]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("tests/unit/hlo"), help="folder; default: %(default)s")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shardplan-fixtures-") as dump:
        os.environ.update(libtpu_environment(parse_slice("v4-8")))
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_too_large"
        texts = make_fixtures(Path(dump))
    for name, text in texts.items():
        (output / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}: {len(text)} characters")


if __name__ == "__main__":
    main()
