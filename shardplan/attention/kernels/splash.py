"""Attention of one device by JAX's splash attention, a Pallas kernel for TPUs, for any static pattern of positions.

https://github.com/jax-ml/jax, jax/experimental/pallas/ops/tpu/splash_attention. The kernels of the forward and the
backward pass are called separately, by names that are private (`shardplan.runtime.private_jax`): only these accept the
log-sum-exp over the keys of all hops, which a ring knows at its end, and blocks of a mask that depend on the device
(`shardplan.attention.kernels.splash_blocks`).

JAX's kernel rather than tokamax's, which was derived from it: tokamax's (0.0.12, experimental, private names too)
writes the largest scores and the log-sum-exp, each 128 lanes wide, where a ring needs memory for outputs; its single
backward pass makes gradients of queries three times over; its ring takes masks of all pairs; and it is one more
dependency.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from shardplan.attention.kernels.interface import NEG_INF, Hop, KernelConfig, MaskInputs, OutputGradient
from shardplan.attention.kernels.splash_blocks import EMPTY, BlockGrids, HopPositions, block_size, make_block_grids
from shardplan.hardware import divisors
from shardplan.positions.pattern import PADDING
from shardplan.runtime import private_jax
from shardplan.runtime.private_jax import MASKED_SCORE

INTERPRET = False
"""Whether JAX's interpreter runs the kernels; tests on CPUs set it."""
MAX_BLOCKS = 2**17
"""Maximum number of blocks in one kernel call: scalar memory, of 1 MiB, holds a few bytes of each."""


@dataclass(frozen=True, eq=False)
class SplashKernel:
    """Attention by the splash kernels; see `shardplan.attention.kernels.interface.AttentionKernel`."""

    config: KernelConfig
    positions: HopPositions

    def attend(self, hop: Hop, q: Array, k: Array, v: Array, save_lse: bool = True) -> tuple[Array, Array]:
        """See `shardplan.attention.kernels.interface.AttentionKernel.attend`."""
        if len(self._chunks) > 1:
            results = [chunk.attend(chunk_hop, q, k, v, save_lse) for chunk, chunk_hop, q in self._split(hop, q)]
            outs, lses = zip(*results, strict=True)
            return jnp.concatenate(outs, axis=3), jnp.concatenate(lses, axis=3)
        info = self._mask_info(hop)
        if self._has_keys_for_all(hop):
            if save_lse:
                out, (lse,) = self._forward(info, hop, q, k, v, save_residuals=True)
            else:  # the kernel writes less
                out, lse = self._forward(info, hop, q, k, v, save_residuals=False), jnp.zeros(q.shape[:-1], jnp.float32)
            return out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])

        def run() -> tuple[Array, Array]:
            out, (lse,) = self._forward(info, hop, q, k, v, save_residuals=True)
            has_keys = lse > MASKED_SCORE / 2
            out = jnp.where(has_keys[..., None], out.astype(jnp.float32), 0.0)
            return out.reshape(*q.shape[:-1], -1), jnp.where(has_keys, lse, NEG_INF).reshape(q.shape[:-1])

        def skip() -> tuple[Array, Array]:
            return jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32), jnp.full(q.shape[:-1], NEG_INF)

        return self._run_if_any_block(hop, info, run, skip)

    def attend_backward(
        self, hop: Hop, q: Array, k: Array, v: Array, output: OutputGradient
    ) -> tuple[Array, Array, Array]:
        """See `shardplan.attention.kernels.interface.AttentionKernel.attend_backward`."""
        if len(self._chunks) > 1:
            results = [
                chunk.attend_backward(chunk_hop, q, k, v, OutputGradient(*of_output))
                for chunk, chunk_hop, q, *of_output in self._split(hop, q, *output)
            ]
            q_gradients, k_gradients, v_gradients = zip(*results, strict=True)
            return (
                jnp.concatenate(q_gradients, axis=3),
                sum(k_gradients[1:], k_gradients[0]),
                sum(v_gradients[1:], v_gradients[0]),
            )
        scaled, block = self._scale(q), self._block_sizes
        b, heads = scaled.shape[:2]
        if not self._has_keys_for_all(hop):
            # of a query without keys every score of the kernels is far below 0, so that its weights are 0
            output = output._replace(lse=jnp.where(output.lse == NEG_INF, 0.0, output.lse))
        output = output._replace(gradient=output.gradient.astype(v.dtype))
        by_head = OutputGradient(*(x.reshape(b, heads, *x.shape[3:]) for x in output))
        settings: dict[str, Any] = {
            "is_mqa": False, "mask_value": MASKED_SCORE, "attn_logits_soft_cap": self.config.soft_cap,
            "mask_function": None, "interpret": INTERPRET, "bq": block.block_q, "bkv": block.block_kv,
            "q_layout": block.q_layout, "k_layout": block.k_layout, "v_layout": block.v_layout,
        }  # fmt: skip

        def run() -> tuple[Array, Array, Array]:
            """Run the backward kernels over the batch: one for queries, and one for keys and values."""

            def backward(q: Array, k: Array, v: Array, output: OutputGradient, ids: Any) -> Any:
                arrays = (q, k, v, ids, None, *output)
                q_gradient = private_jax.splash_query_gradient(*arrays, mask_info=info, **settings)
                _, k_gradient, v_gradient = private_jax.splash_key_value_gradients(
                    *arrays, bkv_compute=block.block_kv, mask_info=info_by_keys, use_fused_bwd_kernel=False, **settings
                )
                return q_gradient, k_gradient, v_gradient

            gradients = self._map_batch(backward, (scaled, k, v, by_head), hop)
            q_gradient, k_gradient, v_gradient = (x.astype(jnp.float32) for x in gradients)
            return q_gradient.reshape(q.shape) * self.config.scale, k_gradient, v_gradient

        def skip() -> tuple[Array, Array, Array]:
            q_gradient, k_gradient, v_gradient = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
            return q_gradient, k_gradient, v_gradient

        info, info_by_keys = self._mask_info(hop), self._mask_info(hop, by_keys=True)
        return self._run_if_any_block(hop, info, run, skip)

    def _forward(self, info: Any, hop: Hop, q: Array, k: Array, v: Array, save_residuals: bool) -> Any:
        """Run the forward kernel over the batch; with `save_residuals` it returns the log-sum-exp too."""

        def attend(q: Array, k: Array, v: Array, ids: Any) -> Any:
            return private_jax.splash_forward(
                info, q, k, v, ids, None, MASKED_SCORE, False, self._block_sizes, None, save_residuals, None,
                attn_logits_soft_cap=self.config.soft_cap, interpret=INTERPRET,
            )  # fmt: skip

        return self._map_batch(attend, (self._scale(q), k, v), hop)

    def _has_keys_for_all(self, hop: Hop) -> bool:
        """Return whether it is certain, while tracing, that every query attends to some key."""
        return self._includes_own_keys and hop.queries.segments is None

    @cached_property
    def _includes_own_keys(self) -> bool:
        """Whether all keys are present at once and the pattern lets every query attend to its own position."""
        queries, keys = self.positions.queries, self.positions.keys
        is_present = (queries != PADDING).all() and np.isin(queries, keys).all()
        return bool(len(keys) == 1 and is_present and self.config.pattern.causal_offset >= 0)

    def _scale(self, q: Array) -> Array:
        """Scale queries and merge their head dimensions: [B, N, G, S, K] -> [B, N x G, S, K]."""
        b, n, g, s, size = q.shape
        return (q * self.config.scale).astype(q.dtype).reshape(b, n * g, s, size)

    @cached_property
    def _block_sizes(self) -> Any:
        q, k = (block_size(x.shape[1]) for x in (self.positions.queries, self.positions.keys))
        return private_jax.SplashBlockSizes(block_q=q, block_kv=k, block_kv_compute=k)

    @cached_property
    def _chunks(self) -> list["SplashKernel"]:
        """Kernels for equal chunks of the queries, each of at most `MAX_BLOCKS` blocks."""
        queries, keys = self.positions.queries, self.positions.keys
        rows = queries.shape[1] // self._block_sizes.block_q
        max_rows = max(1, MAX_BLOCKS * self._block_sizes.block_kv // keys.shape[1])
        count = next(n for n in divisors(rows) if rows // n <= max_rows)
        chunks = np.split(queries, count, axis=1)
        return [SplashKernel(self.config, replace(self.positions, queries=chunk)) for chunk in chunks]

    def _split(self, hop: Hop, *arrays: Array) -> Iterator[tuple[Any, ...]]:
        """Yield each kernel of `_chunks`, with the part of `hop` and the parts of `arrays` that belong to its queries.

        Arrays are [B, N, G, S, ...] and are divided along S.
        """
        indices = np.split(np.arange(self.positions.queries.shape[1]), len(self._chunks))
        for chunk, index in zip(self._chunks, indices, strict=True):
            part = slice(index[0], index[-1] + 1)
            positions, *by_batch = hop.queries
            queries = MaskInputs(positions[part], *(x if x is None else x[:, part] for x in by_batch))
            yield chunk, hop._replace(queries=queries), *(x[:, :, :, part] for x in arrays)

    @cached_property
    def _grids(self) -> BlockGrids:
        sizes = self._block_sizes
        return make_block_grids(self.config.pattern, self.positions, sizes.block_q, sizes.block_kv)

    def _mask_info(self, hop: Hop, by_keys: bool = False) -> Any:
        """Return the blocks of a hop in the form that JAX's splash kernels take.

        Args:
            by_keys: whether the kernel is the one for gradients of keys and values, which loops over queries.
        """
        grids = self._grids
        grid = jnp.asarray(grids.grid)[hop.query_shard, self.positions.distances.index(hop.distance)]
        kinds = jnp.asarray(grids.kinds)[grid]
        if hop.queries.segments is not None and hop.keys.segments is not None:
            may_share = self._may_share_documents(hop.queries.segments, hop.keys.segments)
            kinds = jnp.where(may_share, kinds, EMPTY).astype(kinds.dtype)
        next_blocks = grids.queries_next if by_keys else grids.keys_next
        partial_masks = grids.partial_masks.swapaxes(1, 2) if by_keys else grids.partial_masks
        data_next, mask_next = (jnp.asarray(x)[grid][None] for x in (next_blocks, grids.mask_next))
        return private_jax.SplashMaskInfo(data_next, mask_next, kinds[None], jnp.asarray(partial_masks), None)

    def _run_if_any_block(self, hop: Hop, info: Any, run: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Return `run()`, or `skip()` if every block of the hop is empty on this device."""
        grid = self._grids.grid[:, self.positions.distances.index(hop.distance)]
        if hop.queries.segments is None and self._grids.kinds[grid].any((1, 2)).all():
            return run()
        return jax.lax.cond((info.block_mask != EMPTY).any(), run, skip)

    def _may_share_documents(self, queries: Array, keys: Array) -> Array:
        """Return which pairs of blocks may share a document in some sequence, bool[q block, k block].

        Args:
            queries: document ids int32[B or 1, S]; keys: document ids int32[B or 1, T].
        """
        bounds = []
        for documents, size in ((queries, self._block_sizes.block_q), (keys, self._block_sizes.block_kv)):
            blocks = documents.reshape(documents.shape[0], -1, size)
            bounds.append((blocks.min((0, 2)), blocks.max((0, 2))))
        (q_min, q_max), (k_min, k_max) = bounds
        return (q_min[:, None] <= k_max) & (k_min <= q_max[:, None])

    def _map_batch(self, function: Any, arrays: tuple[Any, ...], hop: Hop) -> Any:
        """Call `function(*arrays, segment_ids)` for every sequence of the batch."""
        queries, keys = hop.queries.segments, hop.keys.segments
        if queries is None or keys is None:
            return jax.vmap(lambda *each: function(*each, None))(*arrays)
        b = arrays[0].shape[0]
        ids = private_jax.SplashSegmentIds(*(jnp.broadcast_to(x, (b, x.shape[1])) for x in (queries, keys)))
        return jax.vmap(function)(*arrays, ids)
