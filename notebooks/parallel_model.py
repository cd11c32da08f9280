"""A model that neither shardplan nor Levanter knows: attention beside the MLP, and axes with names of its own."""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.random
from haliax.nn.scan import Stacked
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention
from levanter.models.lm_model import LmConfig, LmHeadModel


@dataclass(frozen=True)
class ParallelConfig(LmConfig):
    """Sizes of a `ParallelModel`."""

    max_seq_len: int = 128
    width: int = 64
    depth: int = 2
    groups: int = 4
    """Key and value heads, each of `queries` query heads."""
    queries: int = 2
    head_width: int = 16
    ffn: int = 192
    attn_backend: AttentionBackend | None = None
    flash_attention_block_size: int | None = None

    Embed = property(lambda self: hax.Axis("width", self.width))
    Pos = max_Pos = property(lambda self: hax.Axis("position", self.max_seq_len))
    KeyPos = property(lambda self: self.Pos.alias("key_position"))
    Layers = property(lambda self: hax.Axis("depth", self.depth))
    Ffn = property(lambda self: hax.Axis("ffn", self.ffn))
    Group = property(lambda self: hax.Axis("group", self.groups))
    Query = property(lambda self: hax.Axis("query", self.queries))
    Head = property(lambda self: hax.Axis("head", self.head_width))

    @property
    def model_type(self):
        return ParallelModel

    @classmethod
    def from_hf_config(cls, hf_config):
        names = "width", "depth", "groups", "queries", "head_width", "ffn"
        return cls(max_seq_len=hf_config.positions, **{name: getattr(hf_config, name) for name in names})


class Block(eqx.Module):
    """Attention and an MLP, side by side, of the same normed input."""

    norm: hnn.RmsNorm
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    attended: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear
    config: ParallelConfig = eqx.field(static=True)

    @staticmethod
    def init(config, *, key):
        c, keys = config, iter(jax.random.split(key, 6))

        def linear(In, Out):
            return hnn.Linear.init(In, Out, key=next(keys), use_bias=False)

        return Block(
            norm=hnn.RmsNorm.init(c.Embed, use_bias=False),
            query=linear(c.Embed, (c.Group, c.Query, c.Head)),
            key=linear(c.Embed, (c.Group, c.Head)),
            value=linear(c.Embed, (c.Group, c.Head)),
            attended=linear((c.Group, c.Query, c.Head), c.Embed),
            up=linear(c.Embed, c.Ffn),
            down=linear(c.Ffn, c.Embed),
            config=c,
        )

    def __call__(self, x, mask):
        normed = self.norm(x)
        key, value = (layer(normed).rename({"position": "key_position"}) for layer in (self.key, self.value))
        attended = dot_product_attention(
            "position",
            "key_position",
            "head",
            self.query(normed),
            key,
            value,
            mask=mask,
            attn_backend=self.config.attn_backend,
            flash_block_size=self.config.flash_attention_block_size,
        )
        return x + self.attended(attended) + self.down(hnn.gelu(self.up(normed)))


class ParallelModel(LmHeadModel):
    """Blocks between an embedding and a head."""

    embeddings: hnn.Embedding
    blocks: Stacked
    norm: hnn.RmsNorm
    head: hnn.Linear
    own_config: ParallelConfig = eqx.field(static=True)

    @property
    def config(self):
        return self.own_config

    @property
    def Vocab(self):
        return self.embeddings.Vocab

    @classmethod
    def init(cls, Vocab, config, *, key):
        keys = jax.random.split(key, 3)
        blocks = Stacked.init(config.Layers, Block, gradient_checkpointing=True)
        return cls(
            embeddings=hnn.Embedding.init(Vocab, config.Embed, key=keys[0]),
            blocks=blocks(config, key=jax.random.split(keys[1], config.depth)),
            norm=hnn.RmsNorm.init(config.Embed, use_bias=False),
            head=hnn.Linear.init(config.Embed, Vocab, key=keys[2], use_bias=False),
            own_config=config,
        )

    def activations(self, input_ids, attn_mask=None, *, key=None, pos_ids=None):
        return self.norm(self.blocks.fold(self.embeddings(input_ids), attn_mask or AttentionMask.causal()))

    def get_lm_head(self):
        return self.head.weight

    def resize_vocab(self, new_size, key=None):
        raise NotImplementedError
