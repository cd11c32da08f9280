"""python scripts/bench_attention.py --output docs/benchmarks/attention.md

Sequence-parallel attention on 8 virtual CPU devices against (a) attention in plain JAX whose keys and values the
partitioner gathers and (b) haoliuhl/ringattention from its package, forward and with gradients: medians of runs that
take turns, as ratios. And, by arithmetic, how evenly layouts share the blocks that masks leave.

(b) wants `pip install --no-deps ringattention einops`; without these its rows are left out.
"""

import argparse
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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from levanter.layers.attention import AttentionMask

from shardplan.attention.dot_product import dot_product_attention
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import KINDS, SequenceLayout, blocks

DEVICES = 8
BATCH, KEY_HEADS, PER_KEY_HEAD, HEAD_SIZE, LENGTH = 1, 2, 4, 64, 4096
WINDOW = 512
BLOCK = 256
RUNS = 5
WAYS = {
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
    """Lengths of packed documents: the modules of Haliax and Levanter, four bytes a token, until they fill it."""
    roots = [Path(str(importlib.util.find_spec(name).origin)).parent for name in ("haliax", "levanter")]
    sizes = [path.stat().st_size // 4 for root in roots for path in sorted(root.rglob("*.py"))]
    ends = np.minimum(np.cumsum(sizes), length)
    return tuple(int(n) for n in np.diff(ends, prepend=0) if n)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, allowed: Callable[[Any, Any], Any]) -> jax.Array:
    """q[B, N, G, S, K] on k[B, N, T, K]: what a model does whose positions are cut, and keys wanted whole."""
    whole = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    k, v = (jax.lax.with_sharding_constraint(x, whole) for x in (k, v))
    scores = jnp.einsum("bngsk,bntk->bngst", q, k) * q.shape[-1] ** -0.5
    places = jnp.arange(q.shape[3])
    scores = jnp.where(allowed(places[:, None], places[None]), scores, -jnp.inf)
    return jnp.einsum("bngst,bntk->bngsk", jax.nn.softmax(scores, -1), v)


def mine(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, strategy: str, ulysses: int, layout: str
) -> Any:
    named = (hax.named(x, axes) for x, axes in ((q, Q), (k, K), (v, K)))
    out = dot_product_attention(
        *NAMES, *named, mask, strategy=strategy, ulysses=ulysses, layout=layout, block=BLOCK,
        axis_mapping={"position": "model"},
    )  # fmt: skip
    return out.array


def peer() -> Callable[..., jax.Array] | None:
    """haoliuhl/ringattention in plain JAX; the package itself fails to import with jax 0.10."""
    found = importlib.util.find_spec("ringattention")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / "ringattention_jax.py"
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
        """Causal; it has no groups of query heads, so that every one gets a key head."""
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


def seconds(functions: dict[str, Callable[..., Any]], inputs: tuple[jax.Array, ...]) -> dict[str, float]:
    """Medians; all functions once, then all again."""
    compiled = {name: jax.jit(function).lower(*inputs).compile() for name, function in functions.items()}
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for run in range(RUNS + 1):
        for name, function in compiled.items():
            started = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            if run:
                taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in taken.items()}


def times() -> str:
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
    lines = ["| mask | way | forward | forward and gradients |", "| --- | --- | --- | --- |"]
    theirs = peer()
    with jax.set_mesh(mesh):
        for name, (mask, allowed) in masks.items():
            ways: dict[str, Callable[..., jax.Array]] = {"plain JAX": partial(plain, allowed=allowed)}
            if theirs is not None and name == "causal":
                ways["ringattention"] = theirs
            ways |= {
                way: partial(mine, mask=mask, strategy=strategy, ulysses=ulysses, layout=layout)
                for way, (strategy, ulysses, layout) in WAYS.items()
            }
            right = jax.jit(ways["plain JAX"])(q, k, v)
            for way, function in ways.items():
                if "zigzag" not in way:  # in another order it is another sequence
                    np.testing.assert_allclose(jax.jit(function)(q, k, v), right, atol=1e-4)
            forward = seconds(ways, (q, k, v))
            gradients = {way: jax.grad(partial(total, function), argnums=(0, 1, 2)) for way, function in ways.items()}
            backward = seconds(gradients, (q, k, v))
            for way in ways:
                cells = (f"{each['plain JAX'] / each[way]:.2f}" for each in (forward, backward))
                lines.append(f"| {name} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def total(function: Callable[..., jax.Array], *inputs: jax.Array) -> jax.Array:
    return (function(*inputs) ** 2).sum()


def balance() -> str:
    lines = ["| mask | layout | hops | blocks | slowest : mean | hop by hop |", "| --- | --- | --- | --- | --- | --- |"]
    packed = documents(BALANCED)
    masks: tuple[tuple[str, Pattern, tuple[int, ...] | None], ...] = (
        ("causal", Pattern(causal=True), None),
        ("window of 4096", Pattern(causal=True, window=4096), None),
        (f"{len(packed)} documents", Pattern(causal=True), packed),
        ("8 documents of 8192", Pattern(causal=True), (8192,) * 8),
    )
    for name, pattern, lengths in masks:
        for kind in KINDS:
            layout = SequenceLayout(BALANCED, DEVICES, 1, kind, lengths)
            work = blocks(layout, layout, pattern, BALANCED_BLOCK)
            mean, made = work.sum(1).mean(), int((work.max(0)[1:] > 0).sum())
            ratios = (f"{each / mean:.2f}" for each in (work.sum(1).max(), work.max(0).sum()))
            lines.append(f"| {name} | {kind} | {made} | {work.sum()} | {' | '.join(ratios)} |")
    return "\n".join(lines)


TEMPLATE = """# Sequence-parallel attention

Made by `python scripts/bench_attention.py --output docs/benchmarks/attention.md` on a CPU machine with 2 cores.

## Time on 8 virtual CPU devices

{length} positions over 8 devices, {heads} query heads on {keys} key heads of {size}, float32, blocks of {block}: how
many times as fast as attention in plain JAX, whose keys and values the partitioner gathers (medians of {runs} runs that
take turns). The devices share 2 cores, so that this is work done, not balance: what a mask leaves out is not computed.
ringattention has as many key heads as query heads: each is repeated for it.

{times}

tokamax's ring is a Pallas kernel for TPUs, without a form for CPUs, and is not compared.

## Balance

{balanced} positions over a ring of 8, blocks of {balanced_block}: hops besides a device's own, blocks that are not
empty, the slowest device's over the mean device's, and the same where every hop waits for its slowest.

{balance}
"""


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="Markdown file to write; default: stdout")
    output = parser.parse_args().output
    text = TEMPLATE.format(
        length=LENGTH, heads=KEY_HEADS * PER_KEY_HEAD, keys=KEY_HEADS, size=HEAD_SIZE, block=BLOCK, runs=RUNS,
        times=times(), balanced=BALANCED, balanced_block=BALANCED_BLOCK, balance=balance(),
    )  # fmt: skip
    if output:
        Path(output).write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
