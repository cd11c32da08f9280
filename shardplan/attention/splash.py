"""JAX's splash attention on a TPU, where one device has all keys of its queries.

https://github.com/jax-ml/jax, jax/experimental/pallas/ops/tpu/splash_attention. The mask is that of the whole sequence,
and each device gets the rows of its own queries: a mask made of what a device has would begin at its first query, and
be wrong on every device but the first.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from shardplan.attention.blockwise import Rule
from shardplan.attention.pattern import Pattern
from shardplan.plan.partition import KERNEL_BLOCK, KERNEL_LANES

INTERPRETED = False
"""Whether the kernel is run by JAX's interpreter, as tests on CPUs do."""


def splash_kernel(rule: Rule, heads: int, queries: int, keys: int, shards: int) -> Any:
    """The kernel for the whole mask, a tree of arrays; a device takes the part that `manual_sharding_spec` says.

    Args:
        heads: query heads of a device.
        queries: positions of all queries, and `keys` of all keys.
        shards: devices along the queries.
    """
    shape = (queries, keys)
    q_block, k_block = min(KERNEL_BLOCK, queries // shards), min(KERNEL_BLOCK, keys)
    sizes = kernels.BlockSizes(
        block_q=q_block,
        block_kv=k_block,
        block_kv_compute=k_block,
        block_q_dkv=q_block,
        block_kv_dkv=k_block,
        block_kv_dkv_compute=k_block,
        block_q_dq=q_block,
        block_kv_dq=k_block,
    )
    return kernels.make_splash_mha(
        masks.MultiHeadMask([_mask(rule.pattern, shape)] * heads),
        head_shards=1,
        q_seq_shards=shards,
        block_sizes=sizes,
        attn_logits_soft_cap=rule.soft_cap,
        interpret=INTERPRETED,
    )


def serves(pattern: Pattern, head_size: int, value_size: int, queries: int, keys: int) -> bool:
    """Whether the kernel can do a mask and sizes; `queries` are those of one device."""
    fitting = all(n % KERNEL_LANES == 0 and n % min(KERNEL_BLOCK, n) == 0 for n in (queries, keys))
    return fitting and head_size % KERNEL_LANES == 0 and value_size % KERNEL_LANES == 0 and not pattern.prefix


def splash_attention(
    rule: Rule, kernel: Any, q: Array, k: Array, v: Array, segments: tuple[Array, Array] | None
) -> Array:
    """Attention of q[B, N, G, S, K] on k[B, N, T, K] and v[B, N, T, V] -> [B, N, G, S, V]; rows of no key are not 0.

    Args:
        segments: documents of queries and keys, int32[B or 1, S] and [B or 1, T].
    """
    b, n, g, s, _ = q.shape
    scaled = (q * rule.scale).astype(q.dtype).reshape(b, n * g, s, -1)
    if segments is None:
        out = jax.vmap(kernel)(scaled, k, v)
    else:
        ids = kernels.SegmentIds(*(jnp.broadcast_to(x, (b, x.shape[1])) for x in segments))
        out = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, segment_ids=ids))(scaled, k, v, ids)
    return out.reshape(b, n, g, s, -1)


def _mask(pattern: Pattern, shape: tuple[int, int]) -> Any:
    if pattern.window is not None:
        window = masks.LocalMask(shape, (pattern.window - 1, 0), 0)
        return window if not pattern.causal or pattern.offset >= 0 else window & masks.CausalMask(shape, pattern.offset)
    return masks.CausalMask(shape, pattern.offset) if pattern.causal else masks.FullMask(shape)
