"""python scripts/bench_attention.py --output docs/benchmarks/attention.md

Measures sequence-parallel attention on 8 virtual CPU devices against (a) attention in plain JAX, for which the
partitioner gathers keys and values, and (b) haoliuhl/ringattention from its package, forward and with gradients:
ratios of medians of alternating runs. Also counts how evenly sequence layouts distribute blocks over devices.

(b) requires `pip install --no-deps ringattention einops`; without them its rows are left out.
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from bench_page import page_parser, write_page
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from levanter.layers.attention import AttentionMask

from shardplan.attention import dot_product_attention
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import SequenceLayout, count_blocks
from shardplan.positions.sequence_order import SequenceOrder

DEVICES = 8
BATCH, KEY_HEADS, PER_KEY_HEAD, HEAD_SIZE, LENGTH = 1, 2, 4, 64, 4096
WINDOW = 512
BLOCK = 256
RUNS = 5
METHODS = {
    "ring": ("ring", 1, "contiguous"),
    "ring, zigzag": ("ring", 1, "zigzag"),
    "ulysses": ("ulysses", DEVICES, "contiguous"),
    "hybrid 2 x 4, zigzag": ("hybrid", 4, "zigzag"),
    "all_gather": ("all_gather", 1, "contiguous"),
}
NAMES = ("position", "key_position", "head_size")
Q, K = (
    ("batch", "kv_head", "q_heads_per_group", "position", "head_size"),
    ("batch", "kv_head", "key_position", "head_size"),
)
BALANCED, BALANCED_BLOCK = 65536, 512


def documents(length: int) -> tuple[int, ...]:
    """Return lengths of packed documents: the modules of Haliax and Levanter, 4 bytes per token, up to `length`."""
    roots = [Path(str(importlib.util.find_spec(name).origin)).parent for name in ("haliax", "levanter")]
    sizes = [path.stat().st_size // 4 for root in roots for path in sorted(root.rglob("*.py"))]
    ends = np.minimum(np.cumsum(sizes), length)
    return tuple(int(n) for n in np.diff(ends, prepend=0) if n)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, allowed: Callable[[Any, Any], Any]) -> jax.Array:
    """Compute attention of q[B, N, G, S, K], with sharded positions, on replicated k[B, N, T, K]."""
    replicated = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    k, v = (jax.lax.with_sharding_constraint(x, replicated) for x in (k, v))
    scores = jnp.einsum("bngsk,bntk->bngst", q, k) * q.shape[-1] ** -0.5
    positions = jnp.arange(q.shape[3])
    scores = jnp.where(allowed(positions[:, None], positions[None]), scores, -jnp.inf)
    return jnp.einsum("bngst,bntk->bngsk", jax.nn.softmax(scores, -1), v)


def shardplan_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, strategy: str, ulysses: int, layout: str
) -> Any:
    named = (hax.named(x, axes) for x, axes in ((q, Q), (k, K), (v, K)))
    out = dot_product_attention(
        *NAMES, *named, mask, strategy=strategy, ulysses=ulysses, layout=layout, block=BLOCK,
        axis_mapping={"position": "model"},
    )  # fmt: skip
    return out.array


def load_ringattention() -> Callable[..., jax.Array] | None:
    """Load the plain JAX module of haoliuhl/ringattention; the package itself fails to import with jax 0.10."""
    package = importlib.util.find_spec("ringattention")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "ringattention_jax.py"
    spec = importlib.util.spec_from_file_location("ringattention_jax", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError:
        return None
    settings = {
        "causal_block_size": 1, "query_chunk_size": BLOCK, "key_chunk_size": BLOCK, "deterministic": True,
        "dropout_rng": None, "attn_pdrop": 0.0, "dtype": jnp.float32, "precision": None, "prevent_cse": False,
        "policy": jax.checkpoint_policies.nothing_saveable,
    }  # fmt: skip

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Compute causal attention; without groups of query heads, so that keys are repeated for every query head."""
        heads = q.reshape(BATCH, -1, *q.shape[3:])
        k, v = (jnp.repeat(x, PER_KEY_HEAD, axis=1) for x in (k, v))
        spec = PartitionSpec(None, "model", None, None)
        run = partial(module.ring_attention, axis_name="model", float32_logits=True, blockwise_kwargs=settings)
        ring = jax.shard_map(
            lambda q, k, v: run(q, k, v, None, None, None),
            mesh=jax.sharding.get_abstract_mesh(), in_specs=(spec,) * 3, out_specs=spec, check_vma=False,
        )  # fmt: skip
        out = ring(*(x.swapaxes(1, 2) for x in (heads, k, v)))
        return out.swapaxes(1, 2).reshape(q.shape)

    return attend


def median_seconds(functions: dict[str, Callable[..., Any]], inputs: tuple[jax.Array, ...]) -> dict[str, float]:
    """Return the median time of each function; runs of all functions alternate."""
    compiled = {name: jax.jit(function).lower(*inputs).compile() for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for run in range(RUNS + 1):
        for name, function in compiled.items():
            started = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            if run:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in times.items()}


def time_table() -> str:
    """Return the table of times on CPU devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(1, DEVICES), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    by_position = NamedSharding(mesh, PartitionSpec(None, None, None, "model"))
    by_key = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    shape = (BATCH, KEY_HEADS, PER_KEY_HEAD, LENGTH, HEAD_SIZE)
    q = jax.device_put(jnp.asarray(rng.normal(size=shape), jnp.float32), by_position)
    k, v = (
        jax.device_put(jnp.asarray(rng.normal(size=(*shape[:2], *shape[3:])), jnp.float32), by_key) for _ in range(2)
    )
    masks = {
        "causal": (AttentionMask.causal(), lambda i, j: j <= i),
        f"causal, window of {WINDOW}": (
            AttentionMask.causal(sliding_window=WINDOW), lambda i, j: (j <= i) & (i - j < WINDOW),
        ),
    }  # fmt: skip
    lines = ["| mask | method | forward | forward and gradients |", "| --- | --- | --- | --- |"]
    ringattention = load_ringattention()
    with jax.set_mesh(mesh):
        for name, (mask, allowed) in masks.items():
            methods: dict[str, Callable[..., jax.Array]] = {"plain JAX": partial(plain_attention, allowed=allowed)}
            if ringattention is not None and name == "causal":
                methods["ringattention"] = ringattention
            methods |= {
                method: partial(shardplan_attention, mask=mask, strategy=strategy, ulysses=ulysses, layout=layout)
                for method, (strategy, ulysses, layout) in METHODS.items()
            }
            expected = jax.jit(methods["plain JAX"])(q, k, v)
            for method, function in methods.items():
                if "zigzag" not in method:  # in another order it is a different sequence
                    np.testing.assert_allclose(jax.jit(function)(q, k, v), expected, atol=1e-4)
            forward = median_seconds(methods, (q, k, v))
            gradients = {
                method: jax.grad(partial(sum_of_squares, function), argnums=(0, 1, 2))
                for method, function in methods.items()
            }
            backward = median_seconds(gradients, (q, k, v))
            for method in methods:
                cells = (f"{each['plain JAX'] / each[method]:.2f}" for each in (forward, backward))
                lines.append(f"| {name} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sum_of_squares(function: Callable[..., jax.Array], *inputs: jax.Array) -> jax.Array:
    return (function(*inputs) ** 2).sum()


def balance_table() -> str:
    """Return the table of how evenly sequence layouts distribute the blocks that are not fully masked."""
    lines = ["| mask | layout | hops | blocks | slowest : mean | hop by hop |", "| --- | --- | --- | --- | --- | --- |"]
    packed = documents(BALANCED)
    masks: tuple[tuple[str, Pattern, tuple[int, ...] | None], ...] = (
        ("causal", Pattern(causal=True), None),
        ("window of 4096", Pattern(causal=True, window=4096), None),
        (f"{len(packed)} documents", Pattern(causal=True), packed),
        ("8 documents of 8192", Pattern(causal=True), (8192,) * 8),
    )
    for name, pattern, lengths in masks:
        for kind in SequenceOrder:
            layout = SequenceLayout(BALANCED, DEVICES, 1, kind, lengths)
            work = count_blocks(layout, layout, pattern, BALANCED_BLOCK)
            mean, hops = work.sum(1).mean(), int((work.max(0)[1:] > 0).sum())
            ratios = (f"{each / mean:.2f}" for each in (work.sum(1).max(), work.max(0).sum()))
            lines.append(f"| {name} | {kind} | {hops} | {work.sum()} | {' | '.join(ratios)} |")
    return "\n".join(lines)


TEMPLATE = """# Sequence-parallel attention

Made by `python scripts/bench_attention.py --output docs/benchmarks/attention.md` on a CPU machine with 2 cores.

## Time on 8 virtual CPU devices

{length} positions over 8 devices, {heads} query heads, {keys} key heads of size {size}, float32, blocks of {block}:
speed relative to attention in plain JAX, for which the partitioner gathers keys and values (medians of {runs}
alternating runs). The devices share 2 cores, so that the ratios show the amount of work, not its balance: fully masked
blocks are not computed. ringattention needs as many key heads as query heads; key heads are repeated for it.

{times}

tokamax's ring is a Pallas kernel for TPUs that does not run on CPUs, and is not compared.

## Balance

{balanced} positions over a ring of 8 devices, blocks of {balanced_block}: number of hops beyond a device's own keys,
number of blocks that are not fully masked, the slowest device's blocks divided by the mean of all devices, and the same
ratio if every hop waits for its slowest device.

{balance}
"""


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    output = page_parser(__doc__).parse_args().output
    text = TEMPLATE.format(
        length=LENGTH, heads=KEY_HEADS * PER_KEY_HEAD, keys=KEY_HEADS, size=HEAD_SIZE, block=BLOCK, runs=RUNS,
        times=time_table(), balanced=BALANCED, balanced_block=BALANCED_BLOCK, balance=balance_table(),
    )  # fmt: skip
    write_page(text, output)


if __name__ == "__main__":
    main()
