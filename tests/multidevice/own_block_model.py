"""A model that neither shardplan nor Levanter knows, which calls `attend_to_blocks` with the blocks of MoBA's rule."""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp
import jax.random
from own_model import OwnConfig

from shardplan.attention import attend_to_blocks

BLOCK, CHOSEN = 8, 3
KV_HEAD, Q_HEADS, HEAD_SIZE = hax.make_axes(kv_head=4, q_heads_per_group=1, head_size=8)


def select_blocks(queries, keys):
    """The query's own block, and those before it whose mean key has the largest product with the query."""
    Pos = queries.resolve_axis("position")
    Block = hax.Axis("block", Pos.size // BLOCK)
    means = hax.mean(keys.unflatten_axis("position", (Block, hax.Axis("token", BLOCK))), "token")
    scores = hax.dot(queries, means, axis=(Q_HEADS, HEAD_SIZE))
    numbers, own = hax.arange(Block), (hax.arange(Pos) // BLOCK).broadcast_axis(Block)
    scores = hax.where(numbers < own, scores, hax.where(numbers == own, jnp.inf, -jnp.inf))
    best, blocks = hax.top_k(scores, Block, CHOSEN, "selected")
    return hax.where(best == -jnp.inf, -1, blocks)


class Block(eqx.Module):
    """Attention without an MLP."""

    norm: hnn.RmsNorm
    queries: hnn.Linear
    keys: hnn.Linear
    values: hnn.Linear
    output: hnn.Linear
    method: str = eqx.field(static=True)

    @staticmethod
    def init(config, *, key):
        Embed, of_queries, of_keys = config.Embed, (KV_HEAD, Q_HEADS, HEAD_SIZE), (KV_HEAD, HEAD_SIZE)
        keys = jax.random.split(key, 4)
        return Block(
            hnn.RmsNorm.init(Embed, use_bias=False),
            hnn.Linear.init(Embed, of_queries, key=keys[0], use_bias=False),
            hnn.Linear.init(Embed, of_keys, key=keys[1], use_bias=False),
            hnn.Linear.init(Embed, of_keys, key=keys[2], use_bias=False),
            hnn.Linear.init(of_queries, Embed, key=keys[3], use_bias=False),
            config.method,
        )

    def __call__(self, x, mask, pos_ids):
        normed = self.norm(x)
        queries, keys, values = self.queries(normed), self.keys(normed), self.values(normed)
        blocks = select_blocks(queries, keys)
        return x + self.output(attend_to_blocks(queries, keys, values, blocks, BLOCK, self.method)).rearrange(x.axes)


@dataclass(frozen=True)
class OwnBlockConfig(OwnConfig):
    """Sizes of the model."""

    method: str = "dense_mask"
    block = Block

    @classmethod
    def from_hf_config(cls, hf_config):
        return cls(hf_config.positions, hf_config.width, hf_config.depth, hf_config.method)
