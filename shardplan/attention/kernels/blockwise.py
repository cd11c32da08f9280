"""Blockwise attention in XLA: scores exist for one block of queries and one block of keys at a time.

The forward pass carries (sum of values, largest score, sum of weights) over blocks of keys in float32 (online softmax,
https://arxiv.org/abs/2205.14135); the backward pass recomputes weights from their log-sum-exp. A block in which the
mask allows no pair is skipped at run time. Dimensions: as in `shardplan.attention.kernels.interface`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from shardplan.attention.kernels.interface import NEG_INF, Hop, KernelConfig, MaskInputs, OutputGradient
from shardplan.positions.pattern import PADDING


@dataclass(frozen=True)
class BlockwiseKernel:
    """Attention in XLA, one block of scores at a time."""

    config: KernelConfig

    def attend(self, hop: Hop, q: Array, k: Array, v: Array, save_lse: bool = True) -> tuple[Array, Array]:
        """See `shardplan.attention.kernels.interface.AttentionKernel.attend`."""
        del save_lse  # computed in any case
        config = self.config
        blocks = _Blocks(config, hop, q.shape[3], k.shape[2])
        k_blocks, v_blocks = blocks.split_keys(k, 2), blocks.split_keys(v, 2)

        def attend_row(_: None, inputs: tuple[Any, Array]) -> tuple[None, tuple[Array, Array]]:
            """Attend from one block of queries to all blocks of keys."""
            i, q_block = inputs

            def attend_block(carry: tuple[Array, Array, Array], inputs: tuple[Any, Array, Array]) -> tuple[Any, None]:
                """Attend from the block of queries to one block of keys, unless the mask allows no pair."""
                j, k_block, v_block = inputs

                def add_key_block(carry: tuple[Array, Array, Array], is_allowed: Array) -> tuple[Array, Array, Array]:
                    """Fold the attention to one block of keys into the carry; called only if the mask allows some pair.

                    Args:
                        carry: sum of values, largest score and sum of weights, as in the docstring of the module.
                        is_allowed: as for `_scores`.
                    """
                    value_sum, max_score, weight_sum = carry
                    scores, _slope = _scores(config, q_block, k_block, is_allowed)
                    new_max = jnp.maximum(max_score, scores.max(-1))
                    base = jnp.where(new_max == NEG_INF, 0.0, new_max)
                    weights = jnp.exp(scores - base[..., None])
                    rescale = jnp.exp(max_score - base)
                    values = _einsum("bngst,bntv->bngsv", weights.astype(v.dtype), v_block)
                    return value_sum * rescale[..., None] + values, new_max, weight_sum * rescale + weights.sum(-1)

                return blocks.apply_if_allowed(i, j, add_key_block, carry), None

            shape = q_block.shape[:-1]
            start = (
                jnp.zeros((*shape, v.shape[-1]), jnp.float32), jnp.full(shape, NEG_INF), jnp.zeros(shape, jnp.float32),
            )  # fmt: skip
            (value_sum, max_score, weight_sum), _ = jax.lax.scan(
                attend_block, start, (blocks.columns, k_blocks, v_blocks)
            )
            has_keys = weight_sum > 0
            weight_sum = jnp.where(has_keys, weight_sum, 1.0)
            return None, (
                value_sum / weight_sum[..., None],
                jnp.where(has_keys, max_score + jnp.log(weight_sum), NEG_INF),
            )

        _, (out, lse) = jax.lax.scan(attend_row, None, (blocks.rows, blocks.split_queries(q, 3)))
        return blocks.join_queries(out, 3), blocks.join_queries(lse, 3)

    def attend_backward(
        self, hop: Hop, q: Array, k: Array, v: Array, output: OutputGradient
    ) -> tuple[Array, Array, Array]:
        """See `shardplan.attention.kernels.interface.AttentionKernel.attend_backward`."""
        config = self.config
        blocks = _Blocks(config, hop, q.shape[3], k.shape[2])
        by_query_block = tuple(blocks.split_queries(x, 3) for x in (q, *output))

        def backward_column(q_gradients: Array, inputs: tuple[Any, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            """Sum the gradients of one block of keys over all blocks of queries.

            Args:
                q_gradients: gradients of all blocks of queries from the blocks of keys so far.
            """
            j, k_block, v_block = inputs

            def backward_block(
                carry: tuple[Array, Array], inputs: tuple[Any, ...]
            ) -> tuple[tuple[Array, Array], Array]:
                """Return the gradients of one block of queries and one of keys; zeros if the mask allows no pair."""
                i, q_block, lse_block, gradient, delta_block = inputs

                def add_gradients(carry: tuple[Any, ...], is_allowed: Array) -> tuple[Any, ...]:
                    """Add the gradients of one pair of blocks to the carry; called only if the mask allows some pair.

                    Args:
                        carry: gradients of the keys, of the values and, still zero, of the queries.
                        is_allowed: as for `_scores`.
                    """
                    k_gradient, v_gradient, _ = carry
                    scores, slope = _scores(config, q_block, k_block, is_allowed)
                    base = jnp.where(lse_block == NEG_INF, 0.0, lse_block)
                    weights = jnp.exp(scores - base[..., None])
                    narrow = gradient.astype(v.dtype)
                    v_gradient += _einsum("bngst,bngsv->bntv", weights.astype(v.dtype), narrow)
                    score_gradient = weights * (_einsum("bngsv,bntv->bngst", narrow, v_block) - delta_block[..., None])
                    # stays in float32: narrowed to v's dtype, gradients of keys had 1.6 times the dense error
                    score_gradient = score_gradient * slope * config.scale
                    k_gradient += _einsum("bngst,bngsk->bntk", score_gradient, q_block)
                    return k_gradient, v_gradient, _einsum("bngst,bntk->bngsk", score_gradient, k_block)

                zeros = jnp.zeros(q_block.shape, jnp.float32)
                k_gradient, v_gradient, q_gradient = blocks.apply_if_allowed(i, j, add_gradients, (*carry, zeros))
                return (k_gradient, v_gradient), q_gradient

            start = jnp.zeros(k_block.shape, jnp.float32), jnp.zeros(v_block.shape, jnp.float32)
            kv_gradient, q_gradient = jax.lax.scan(backward_block, start, (blocks.rows, *by_query_block))
            return q_gradients + q_gradient, kv_gradient

        start = jnp.zeros(by_query_block[0].shape, jnp.float32)
        q_gradients, kv_gradients = jax.lax.scan(
            backward_column, start, (blocks.columns, blocks.split_keys(k, 2), blocks.split_keys(v, 2))
        )
        k_gradient, v_gradient = (blocks.join_keys(x, 2) for x in kv_gradients)
        return blocks.join_queries(q_gradients, 3), k_gradient, v_gradient


def _scores(config: KernelConfig, q: Array, k: Array, is_allowed: Array) -> tuple[Array, Array | float]:
    """Return the scores float32[B, N, G, S, T], `NEG_INF` where masked, and their derivative by the uncapped scores.

    B batch, N key heads, G query heads per key head, S and T queries and keys of the pair of blocks.

    Args:
        is_allowed: the mask, bool, broadcastable to [B, N, G, S, T].
    """
    scores = _einsum("bngsk,bntk->bngst", q, k) * config.scale
    slope: Array | float = 1.0
    if config.soft_cap is not None:
        capped = jnp.tanh(scores / config.soft_cap)
        scores, slope = capped * config.soft_cap, 1 - capped * capped
    return jnp.where(is_allowed, scores, NEG_INF), slope


_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)


class _Blocks:
    """A shard's queries and keys in blocks, padded to complete blocks, and the mask of each pair of blocks."""

    def __init__(self, config: KernelConfig, hop: Hop, n_queries: int, n_keys: int) -> None:
        self._pattern, self._n_queries, self._n_keys = config.pattern, n_queries, n_keys
        self._q_block, self._k_block = min(config.block, n_queries), min(config.block, n_keys)
        self.rows = self._split_inputs(hop.queries, self.split_queries), jnp.arange(-(-n_queries // self._q_block))
        self.columns = self._split_inputs(hop.keys, self.split_keys), jnp.arange(-(-n_keys // self._k_block))
        self._explicit = hop.explicit
        if hop.explicit is not None:
            self._explicit = _pad_to_blocks(_pad_to_blocks(hop.explicit, 3, self._q_block), 4, self._k_block)

    def split_queries(self, x: Array, axis: int, fill: int = 0) -> Array:
        """Split an axis of queries into blocks in a new leading axis: [block, ..., position, ...]."""
        return _split(x, axis, self._q_block, fill)

    def split_keys(self, x: Array, axis: int, fill: int = 0) -> Array:
        """Split an axis of keys into blocks in a new leading axis: [block, ..., position, ...]."""
        return _split(x, axis, self._k_block, fill)

    def join_queries(self, blocks: Array, axis: int) -> Array:
        """Undo `split_queries`."""
        return _join(blocks, axis, self._n_queries)

    def join_keys(self, blocks: Array, axis: int) -> Array:
        """Undo `split_keys`."""
        return _join(blocks, axis, self._n_keys)

    def apply_if_allowed(self, i: Any, j: Any, update: Callable[[Any, Array], Any], carry: Any) -> Any:
        """Return `update(carry, is_allowed)` if the mask allows any pair of row i and column j, else `carry`."""
        (queries, row), (keys, column) = i, j
        is_allowed = self._pattern.mask(queries.positions, keys.positions)[None, None, None]
        if queries.segments is not None:
            is_same = queries.segments[:, :, None] == keys.segments[:, None, :]
            is_allowed = is_allowed & is_same[:, None, None]
        if queries.max_key_position is not None:
            is_reached = keys.positions[None, None] <= queries.max_key_position[:, :, None]
            is_allowed = is_allowed & is_reached[:, None, None]
        if self._explicit is not None:
            start = (0, 0, 0, row * self._q_block, column * self._k_block)
            shape = (*self._explicit.shape[:3], self._q_block, self._k_block)
            is_allowed = is_allowed & jax.lax.dynamic_slice(self._explicit, start, shape)
        return jax.lax.cond(is_allowed.any(), update, lambda carry, _: carry, carry, is_allowed)

    def _split_inputs(self, inputs: MaskInputs, split: Callable[..., Array]) -> MaskInputs:
        by_batch = (None if x is None else split(x, 1) for x in (inputs.segments, inputs.max_key_position))
        return MaskInputs(split(inputs.positions, 0, PADDING), *by_batch)


def _pad_to_blocks(x: Array, axis: int, block: int, fill: int = 0) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, constant_values=fill)


def _split(x: Array, axis: int, block: int, fill: int) -> Array:
    padded = _pad_to_blocks(x, axis, block, fill)
    return jnp.moveaxis(padded.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :]), axis, 0)


def _join(blocks: Array, axis: int, n: int) -> Array:
    joined = jnp.moveaxis(blocks, 0, axis)
    joined = joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined, 0, n, axis=axis)
