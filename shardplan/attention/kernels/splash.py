"""Attention of one device by JAX's splash attention, a Pallas kernel for TPUs, with the blocks of any known pattern.

https://github.com/jax-ml/jax, jax/experimental/pallas/ops/tpu/splash_attention. The kernels of its forward and backward
passes are called one by one, in jax 0.10.2 by names that are not public: only they take the logarithm of the sum of
weights of all keys, which a ring has at its end, and blocks of a mask that follow from which device this is. A mask
made of what a device has would begin at its first query, and be wrong on every device but the first.

JAX's rather than tokamax's, which came of it: that (0.0.12, experimental, names not public either) writes the largest
scores beside the logarithms, each 128 lanes wide, where a ring's memory is for outputs; its one backward pass makes
gradients of queries three times over; its ring takes masks of all pairs; and it is one more dependency.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from shardplan.attention.kernels.kernel import EMPTY, Hop, Rule, Tokens
from shardplan.cost.attention import KERNEL_LANES
from shardplan.errors import ConfigError
from shardplan.hardware import divisors
from shardplan.positions.pattern import PADDING, Pattern
from shardplan.positions.sequence_layout import KERNEL_BLOCK

INTERPRETED = False
"""Whether the kernels are run by JAX's interpreter, as tests on CPUs do."""
MOST_BLOCKS = 2**17
"""Blocks that kernels take at once: a few bytes of each are in scalar memory, of which there is 1 MiB."""
MOST_PARTIAL = 64
"""Different blocks that are neither empty nor full, at most: each is an array of its own."""
NO_BLOCK, PARTIAL, FULL = range(3)
MASKED = kernels.DEFAULT_MASK_VALUE
"""What the kernels have for scores that are not allowed."""


@dataclass(frozen=True, eq=False)
class Splash:
    """Attention by the kernels; see `shardplan.attention.kernels.kernel.Kernel`."""

    rule: Rule
    queries: np.ndarray
    """int[place, S]: the positions of the queries of every place."""
    keys: np.ndarray
    """int[ring, T]: the positions of the keys of every ring index."""
    distances: tuple[int, ...]
    """How many ring indices back keys come from; see `shardplan.attention.strategies.ring.Ring`."""

    @cached_property
    def _sees_itself(self) -> bool:
        """Whether all keys are there at once, and every query may attend to itself, so that none has no keys."""
        is_there = (self.queries != PADDING).all() and np.isin(self.queries, self.keys).all()
        return bool(len(self.keys) == 1 and is_there and self.rule.pattern.offset >= 0)

    def _forward(self, info: Any, hop: Hop, q: Array, k: Array, v: Array, saves: bool) -> Any:
        forward: Any = kernels._splash_attention_forward

        def one(q: Array, k: Array, v: Array, ids: Any) -> Any:
            return forward(
                info, q, k, v, ids, None, MASKED, False, self._sizes, None, saves, None,
                attn_logits_soft_cap=self.rule.soft_cap, interpret=INTERPRETED,
            )  # fmt: skip

        return self._over_batch(one, (self._scaled(q), k, v), hop)

    def attend(self, hop: Hop, q: Array, k: Array, v: Array, wants_sums: bool = True) -> tuple[Array, Array]:
        """As `shardplan.attention.kernels.kernel.Kernel.attend`."""
        if len(self._parts) > 1:
            found = [part.attend(part_hop, q, k, v, wants_sums) for part, part_hop, q in self._in_parts(hop, q)]
            outs, logsums = zip(*found, strict=True)
            return jnp.concatenate(outs, axis=3), jnp.concatenate(logsums, axis=3)
        info = self._info(hop)
        if not wants_sums and self._sees_itself and hop.queries.segments is None:
            # without sums there is less to write
            out = self._forward(info, hop, q, k, v, saves=False)
            return out.reshape(*q.shape[:-1], -1), jnp.zeros(q.shape[:-1], jnp.float32)

        def run() -> tuple[Array, Array]:
            out, (logsum,) = self._forward(info, hop, q, k, v, saves=True)
            has_any = logsum > MASKED / 2
            out = jnp.where(has_any[..., None], out.astype(jnp.float32), 0.0)
            return out.reshape(*q.shape[:-1], -1), jnp.where(has_any, logsum, EMPTY).reshape(q.shape[:-1])

        def nothing() -> tuple[Array, Array]:
            return jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32), jnp.full(q.shape[:-1], EMPTY)

        return self._where_any(hop, info, run, nothing)

    def attend_backward(
        self, hop: Hop, q: Array, k: Array, v: Array, logsum: Array, out_gradient: Array, offset: Array
    ) -> tuple[Array, Array, Array]:
        """As `shardplan.attention.kernels.kernel.Kernel.attend_backward`."""
        if len(self._parts) > 1:
            found = [
                part.attend_backward(part_hop, q, k, v, *rest)
                for part, part_hop, q, *rest in self._in_parts(hop, q, logsum, out_gradient, offset)
            ]
            of_qs, of_ks, of_vs = zip(*found, strict=True)
            return jnp.concatenate(of_qs, axis=3), sum(of_ks[1:], of_ks[0]), sum(of_vs[1:], of_vs[0])
        scaled, block = self._scaled(q), self._sizes
        b, heads = scaled.shape[:2]
        # where nothing is attended to, every score of the kernels is far below 0
        logsum = jnp.where(logsum == EMPTY, 0.0, logsum)
        by_head = (out_gradient.astype(v.dtype), logsum, offset)
        change, logsum, offset = (x.reshape(b, heads, *x.shape[3:]) for x in by_head)
        layouts = {"q_layout": block.q_layout, "k_layout": block.k_layout, "v_layout": block.v_layout}
        same: dict[str, Any] = {
            "is_mqa": False, "mask_value": MASKED, "attn_logits_soft_cap": self.rule.soft_cap, "mask_function": None,
            "interpret": INTERPRETED, **layouts,
        }  # fmt: skip

        def run() -> tuple[Array, Array, Array]:
            def one(q: Array, k: Array, v: Array, logsum: Array, change: Array, offset: Array, ids: Any) -> Any:
                given = (q, k, v, ids, None, logsum, change, offset)
                of_q = kernels._splash_attention_bwd_dq(
                    *given, bq=block.block_q, bkv=block.block_kv, mask_info=info, **same
                )
                _, of_k, of_v = kernels._splash_attention_bwd_dkv(
                    *given, bq=block.block_q, bkv=block.block_kv, bkv_compute=block.block_kv, mask_info=transposed,
                    use_fused_bwd_kernel=False, **same,
                )  # fmt: skip
                return of_q, of_k, of_v

            found = self._over_batch(one, (scaled, k, v, logsum, change, offset), hop)
            of_q, of_k, of_v = (x.astype(jnp.float32) for x in found)
            return of_q.reshape(q.shape) * self.rule.scale, of_k, of_v

        def nothing() -> tuple[Array, Array, Array]:
            of_q, of_k, of_v = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
            return of_q, of_k, of_v

        info, transposed = self._info(hop), self._info(hop, by_keys=True)
        return self._where_any(hop, info, run, nothing)

    def _scaled(self, q: Array) -> Array:
        """[B, N, G, S, K] -> [B, N x G, S, K]."""
        b, n, g, s, size = q.shape
        return (q * self.rule.scale).astype(q.dtype).reshape(b, n * g, s, size)

    @cached_property
    def _sizes(self) -> Any:
        q, k = (block_of(x.shape[1]) for x in (self.queries, self.keys))
        return kernels.BlockSizes(block_q=q, block_kv=k, block_kv_compute=k)

    @cached_property
    def _parts(self) -> list["Splash"]:
        """The same for parts of the queries, each of few enough blocks."""
        rows = self.queries.shape[1] // self._sizes.block_q
        most = max(1, MOST_BLOCKS * self._sizes.block_kv // self.keys.shape[1])
        count = next(n for n in divisors(rows) if rows // n <= most)
        parts = np.split(self.queries, count, axis=1)
        return [Splash(self.rule, part, self.keys, self.distances) for part in parts]

    def _in_parts(self, hop: Hop, *arrays: Array) -> Iterator[tuple[Any, ...]]:
        """Each of `_parts` with its queries' hop, and arrays [B, N, G, S, ...] of them."""
        places = np.split(np.arange(self.queries.shape[1]), len(self._parts))
        for part, place in zip(self._parts, places, strict=True):
            mine = slice(place[0], place[-1] + 1)
            positions, *others = hop.queries
            queries = Tokens(positions[mine], *(x if x is None else x[:, mine] for x in others))
            yield part, hop._replace(queries=queries), *(x[:, :, :, mine] for x in arrays)

    @cached_property
    def _grids(self) -> "_Grids":
        return _grids(self.rule.pattern, self.queries, self.keys, self.distances, self._sizes)

    def _info(self, hop: Hop, by_keys: bool = False) -> Any:
        """The blocks of a hop, for kernels that go along keys, or along queries."""
        grids = self._grids
        which = jnp.asarray(grids.which)[hop.place, self.distances.index(hop.distance)]
        kinds = jnp.asarray(grids.kinds)[which]
        if hop.queries.segments is not None and hop.keys.segments is not None:
            is_shared = self._share_documents(hop.queries.segments, hop.keys.segments)
            kinds = jnp.where(is_shared, kinds, NO_BLOCK).astype(kinds.dtype)
        following = grids.following_queries if by_keys else grids.following
        partial = grids.partial.swapaxes(1, 2) if by_keys else grids.partial
        data_next, mask_next = (jnp.asarray(x)[which][None] for x in (following, grids.masks))
        return MaskInfo(data_next, mask_next, kinds[None], jnp.asarray(partial), None)

    def _where_any(self, hop: Hop, info: Any, run: Callable[[], Any], nothing: Callable[[], Any]) -> Any:
        """`run()`, but `nothing()` where no block of the hop is to be computed."""
        met = self._grids.which[:, self.distances.index(hop.distance)]
        if hop.queries.segments is None and self._grids.kinds[met].any((1, 2)).all():
            return run()
        return jax.lax.cond((info.block_mask != NO_BLOCK).any(), run, nothing)

    def _share_documents(self, queries: Array, keys: Array) -> Array:
        """bool[block of queries, block of keys]: whether any sequence may have a document in both.

        Args:
            queries: documents int32[B or 1, S]; keys: int32[B or 1, T].
        """
        ends = []
        for documents, size in ((queries, self._sizes.block_q), (keys, self._sizes.block_kv)):
            blocks = documents.reshape(documents.shape[0], -1, size)
            ends.append((blocks.min((0, 2)), blocks.max((0, 2))))
        (q_least, q_most), (k_least, k_most) = ends
        return (q_least[:, None] <= k_most) & (k_least <= q_most[:, None])

    def _over_batch(self, function: Any, arrays: tuple[Array, ...], hop: Hop) -> Any:
        """`function(*arrays, documents)` of every sequence."""
        queries, keys = hop.queries.segments, hop.keys.segments
        if queries is None or keys is None:
            return jax.vmap(lambda *given: function(*given, None))(*arrays)
        b = arrays[0].shape[0]
        ids = kernels.SegmentIds(*(jnp.broadcast_to(x, (b, x.shape[1])) for x in (queries, keys)))
        return jax.vmap(function)(*arrays, ids)


def block_of(length: int) -> int:
    """Side of the kernels' blocks: the largest multiple of their lanes that divides the positions of a ring index.

    Raises:
        ConfigError: there is none.
    """
    for size in range(KERNEL_BLOCK, 0, -KERNEL_LANES):
        if length % size == 0:
            return size
    raise ConfigError(
        f"attention kernel splash: each ring index has {length} positions, which must be a multiple of {KERNEL_LANES}; "
        "another length, another number of devices along it, or the kernel blockwise"
    )


@dataclass(frozen=True, eq=False)
class _Grids:
    """Blocks of queries x keys of all places at all hops; what is alike is there once."""

    which: np.ndarray
    """int[place, distance]: the grid of each."""
    kinds: np.ndarray
    """int8[grid, q, k]: NO_BLOCK, PARTIAL or FULL."""
    masks: np.ndarray
    """int[grid, q, k]: of a partial block its mask, of others the one that is there already."""
    following: np.ndarray
    """int[grid, q, k]: the block of keys to have by then; of an empty one that which is there already."""
    following_queries: np.ndarray
    """The same of queries, going along these."""
    partial: np.ndarray
    """bool[mask, S of a block, T of a block]."""


def _grids(pattern: Pattern, queries: np.ndarray, keys: np.ndarray, distances: tuple[int, ...], sizes: Any) -> _Grids:
    """See `_Grids`.

    Raises:
        ConfigError: more different partial blocks than `MOST_PARTIAL`.
    """
    q_blocks = queries.reshape(len(queries), -1, sizes.block_q)
    k_blocks = keys.reshape(len(keys), -1, sizes.block_kv)
    masks: dict[bytes, int] = {}
    grids: dict[bytes, int] = {}
    found: list[tuple[np.ndarray, np.ndarray]] = []
    which = np.zeros((len(queries), len(distances)), np.int32)
    for place, column in np.ndindex(which.shape):
        source = (place - distances[column]) % len(keys) if len(keys) > 1 else 0
        kinds = _kinds(pattern, q_blocks[place], k_blocks[source])
        ids = np.zeros(kinds.shape, np.int32)
        for i, j in np.argwhere(kinds == PARTIAL):
            allowed = pattern.allowed(q_blocks[place, i], k_blocks[source, j])
            if not allowed.any():
                kinds[i, j] = NO_BLOCK
            else:
                ids[i, j] = masks.setdefault(np.packbits(allowed).tobytes(), len(masks))
        if len(masks) > MOST_PARTIAL:
            raise ConfigError(
                f"attention kernel splash: the mask and the layout have more than {MOST_PARTIAL} different blocks that "
                "are neither empty nor full; use the kernel blockwise, or another layout"
            )
        key = kinds.tobytes() + ids.tobytes()
        if key not in grids:
            grids[key] = len(found)
            found.append((kinds, ids))
        which[place, column] = grids[key]
    kinds, ids = (np.stack(each) for each in zip(*found, strict=True))
    shape = sizes.block_q, sizes.block_kv
    bits = np.array([np.frombuffer(mask, np.uint8) for mask in masks] or [np.zeros(np.prod(shape) // 8, np.uint8)])
    rows, columns = np.indices(kinds.shape)[1:]
    return _Grids(
        which,
        kinds,
        _small(_carried(ids, kinds == PARTIAL, 2)),
        _small(_carried(columns, kinds != NO_BLOCK, 2)),
        _small(_carried(rows, kinds != NO_BLOCK, 1)),
        np.unpackbits(bits, axis=1).reshape(-1, *shape).astype(bool),
    )


def _kinds(pattern: Pattern, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """int8[q, k] of blocks of positions: PARTIAL also where only a closer look tells."""
    (q_least, q_most, q_whole), (k_least, k_most, k_whole) = (_ends(blocks) for blocks in (queries, keys))
    every, some = pattern.between(q_least[:, None], q_most[:, None], k_least, k_most)
    kinds = np.where(some, np.where(every & q_whole[:, None] & k_whole, FULL, PARTIAL), NO_BLOCK)
    return kinds.astype(np.int8)


def _ends(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The least and the last position of every block, and whether it has no padding."""
    is_padding = blocks == PADDING
    high = np.iinfo(np.int64).max // 4
    return np.where(is_padding, high, blocks).min(1), np.where(is_padding, -high, blocks).max(1), ~is_padding.any(1)


def _carried(values: np.ndarray, is_kept: np.ndarray, axis: int) -> np.ndarray:
    """`values` where they are kept, else the last that was kept before along an axis, or the first after."""
    places = np.arange(values.shape[axis]).reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    last = np.maximum.accumulate(np.where(is_kept, places, -1), axis)
    first = np.argmax(is_kept, axis=axis, keepdims=True)
    return np.take_along_axis(values, np.where(last < 0, first, last), axis)


def _small(values: np.ndarray) -> np.ndarray:
    """In as few bytes as will do, for they go to scalar memory."""
    return values.astype(next(kind for kind in (np.int8, np.int16, np.int32) if values.max() <= np.iinfo(kind).max))
