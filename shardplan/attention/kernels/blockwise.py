"""Attention of one device, block by block: scores exist for one block of queries and keys at a time.

Softmax is carried as (sum of values, largest score, sum of weights) over blocks of keys, in float32 (online softmax,
https://arxiv.org/abs/2205.14135), and its gradient from the logarithm of that sum. Blocks in which nothing may attend
are skipped when they are met. Dimensions: B batch, N key heads, G query heads of each, S positions, K and V head sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from shardplan.attention.kernels.kernel import EMPTY, Hop, Rule, Tokens
from shardplan.positions.pattern import PADDING


@dataclass(frozen=True)
class Blockwise:
    """Attention in XLA, with one block of scores at a time."""

    rule: Rule

    def attend(self, hop: Hop, q: Array, k: Array, v: Array, wants_sums: bool = True) -> tuple[Array, Array]:
        """As `shardplan.attention.kernels.kernel.Kernel.attend`."""
        del wants_sums  # they are there anyway
        rule = self.rule
        blocks = _Blocks(rule, hop, q.shape[3], k.shape[2])
        k_blocks, v_blocks = blocks.of_keys(k, 2), blocks.of_keys(v, 2)

        def row(_: None, inputs: tuple[Any, Array]) -> tuple[None, tuple[Array, Array]]:
            i, q_block = inputs

            def column(carry: tuple[Array, Array, Array], inputs: tuple[Any, Array, Array]) -> tuple[Any, None]:
                j, k_block, v_block = inputs

                def add(carry: tuple[Array, Array, Array], is_allowed: Array) -> tuple[Array, Array, Array]:
                    total, largest, weight = carry
                    scores, _ = _scores(rule, q_block, k_block, is_allowed)
                    new = jnp.maximum(largest, scores.max(-1))
                    base = jnp.where(new == EMPTY, 0.0, new)
                    weights = jnp.exp(scores - base[..., None])
                    kept = jnp.exp(largest - base)
                    added = _product("bngst,bntv->bngsv", weights.astype(v.dtype), v_block)
                    return total * kept[..., None] + added, new, weight * kept + weights.sum(-1)

                return blocks.where_any(i, j, add, carry), None

            shape = q_block.shape[:-1]
            start = jnp.zeros((*shape, v.shape[-1]), jnp.float32), jnp.full(shape, EMPTY), jnp.zeros(shape, jnp.float32)
            (total, largest, weight), _ = jax.lax.scan(column, start, (blocks.columns, k_blocks, v_blocks))
            has_any = weight > 0
            out = total / jnp.where(has_any, weight, 1.0)[..., None]
            return None, (out, jnp.where(has_any, largest + jnp.log(jnp.where(has_any, weight, 1.0)), EMPTY))

        _, (out, logsum) = jax.lax.scan(row, None, (blocks.rows, blocks.of_queries(q, 3)))
        return blocks.joined_queries(out, 3), blocks.joined_queries(logsum, 3)

    def attend_backward(
        self, hop: Hop, q: Array, k: Array, v: Array, logsum: Array, out_gradient: Array, offset: Array
    ) -> tuple[Array, Array, Array]:
        """As `shardplan.attention.kernels.kernel.Kernel.attend_backward`."""
        rule = self.rule
        blocks = _Blocks(rule, hop, q.shape[3], k.shape[2])
        by_query = tuple(blocks.of_queries(x, 3) for x in (q, logsum, out_gradient, offset))

        def column(q_gradient: Array, inputs: tuple[Any, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            j, k_block, v_block = inputs

            def row(carry: tuple[Array, Array], inputs: tuple[Any, ...]) -> tuple[tuple[Array, Array], Array]:
                i, q_block, logsum_block, gradient, offset_block = inputs

                def add(carry: tuple[Any, ...], is_allowed: Array) -> tuple[Any, ...]:
                    k_gradient, v_gradient, _ = carry
                    scores, slope = _scores(rule, q_block, k_block, is_allowed)
                    base = jnp.where(logsum_block == EMPTY, 0.0, logsum_block)
                    weights = jnp.exp(scores - base[..., None])
                    narrow = gradient.astype(v.dtype)
                    v_gradient += _product("bngst,bngsv->bntv", weights.astype(v.dtype), narrow)
                    change = weights * (_product("bngsv,bntv->bngst", narrow, v_block) - offset_block[..., None])
                    change = change * slope * rule.scale  # in float32: narrowed, keys had 1.6 times dense errors
                    k_gradient += _product("bngst,bngsk->bntk", change, q_block)
                    return k_gradient, v_gradient, _product("bngst,bntk->bngsk", change, k_block)

                nothing = jnp.zeros(q_block.shape, jnp.float32)
                k_gradient, v_gradient, mine = blocks.where_any(i, j, add, (*carry, nothing))
                return (k_gradient, v_gradient), mine

            start = jnp.zeros(k_block.shape, jnp.float32), jnp.zeros(v_block.shape, jnp.float32)
            of_keys, of_queries = jax.lax.scan(row, start, (blocks.rows, *by_query))
            return q_gradient + of_queries, of_keys

        start = jnp.zeros(by_query[0].shape, jnp.float32)
        of_queries, of_keys = jax.lax.scan(column, start, (blocks.columns, blocks.of_keys(k, 2), blocks.of_keys(v, 2)))
        of_k, of_v = (blocks.joined_keys(x, 2) for x in of_keys)
        return blocks.joined_queries(of_queries, 3), of_k, of_v


def _scores(rule: Rule, q: Array, k: Array, is_allowed: Array) -> tuple[Array, Array | float]:
    """Scores float32[B, N, G, S, T], `EMPTY` where not allowed, and their slope by what the soft cap is laid on."""
    scores = _product("bngsk,bntk->bngst", q, k) * rule.scale
    slope: Array | float = 1.0
    if rule.soft_cap is not None:
        capped = jnp.tanh(scores / rule.soft_cap)
        scores, slope = capped * rule.soft_cap, 1 - capped * capped
    return jnp.where(is_allowed, scores, EMPTY), slope


_product = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)


class _Blocks:
    """The blocks of a shard's queries and keys, filled up with padding, and where anything is allowed."""

    def __init__(self, rule: Rule, hop: Hop, n_queries: int, n_keys: int) -> None:
        self._pattern, self._n_queries, self._n_keys = rule.pattern, n_queries, n_keys
        self._q_block, self._k_block = min(rule.block, n_queries), min(rule.block, n_keys)
        self.rows = self._tokens(hop.queries, self.of_queries), jnp.arange(-(-n_queries // self._q_block))
        self.columns = self._tokens(hop.keys, self.of_keys), jnp.arange(-(-n_keys // self._k_block))
        self._explicit = hop.explicit
        if hop.explicit is not None:
            self._explicit = _padded(_padded(hop.explicit, 3, self._q_block), 4, self._k_block)

    def of_queries(self, x: Array, axis: int, filling: int = 0) -> Array:
        """`x` with the blocks of its axis of queries in front: [block, ..., position, ...]."""
        return _cut(x, axis, self._q_block, filling)

    def of_keys(self, x: Array, axis: int, filling: int = 0) -> Array:
        """The same of an axis of keys."""
        return _cut(x, axis, self._k_block, filling)

    def joined_queries(self, blocks: Array, axis: int) -> Array:
        """What `of_queries` has cut."""
        return _joined(blocks, axis, self._n_queries)

    def joined_keys(self, blocks: Array, axis: int) -> Array:
        """What `of_keys` has cut."""
        return _joined(blocks, axis, self._n_keys)

    def where_any(self, i: Any, j: Any, add: Callable[[Any, Array], Any], carry: Any) -> Any:
        """`add(carry, is_allowed)` where a query of block i may attend to a key of block j, else `carry`."""
        (queries, row), (keys, column) = i, j
        is_allowed = self._pattern.allowed(queries.positions, keys.positions)[None, None, None]
        if queries.segments is not None:
            same = queries.segments[:, :, None] == keys.segments[:, None, :]
            is_allowed = is_allowed & same[:, None, None]
        if queries.reach is not None:
            within = keys.positions[None, None] <= queries.reach[:, :, None]
            is_allowed = is_allowed & within[:, None, None]
        if self._explicit is not None:
            start = (0, 0, 0, row * self._q_block, column * self._k_block)
            shape = (*self._explicit.shape[:3], self._q_block, self._k_block)
            is_allowed = is_allowed & jax.lax.dynamic_slice(self._explicit, start, shape)
        return jax.lax.cond(is_allowed.any(), add, lambda carry, _: carry, carry, is_allowed)

    def _tokens(self, tokens: Tokens, cut: Callable[..., Array]) -> Tokens:
        segments, reach = (None if x is None else cut(x, 1) for x in (tokens.segments, tokens.reach))
        return Tokens(cut(tokens.positions, 0, PADDING), segments, reach)


def _padded(x: Array, axis: int, block: int, filling: int = 0) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, constant_values=filling)


def _cut(x: Array, axis: int, block: int, filling: int) -> Array:
    padded = _padded(x, axis, block, filling)
    return jnp.moveaxis(padded.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :]), axis, 0)


def _joined(blocks: Array, axis: int, n: int) -> Array:
    found = jnp.moveaxis(blocks, 0, axis)
    found = found.reshape(*found.shape[:axis], -1, *found.shape[axis + 2 :])
    return jax.lax.slice_in_dim(found, 0, n, axis=axis)
