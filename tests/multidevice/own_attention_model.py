"""A model that neither shardplan nor Levanter knows, whose blocks have Levanter's `Attention`."""

from dataclasses import dataclass, replace

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.random
from haliax.nn.scan import Stacked
from levanter.layers.attention import Attention, AttentionBackend, AttentionConfig, AttentionMask, AttentionWithSink
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.lm_model import LmConfig, LmHeadModel


@dataclass(frozen=True)
class OwnAttentionConfig(LmConfig):
    """Sizes of an `OwnAttentionModel`."""

    max_seq_len: int = 64
    width: int = 32
    depth: int = 2
    has_sinks: bool = False
    """Whether attention has a sink for every head, which makes its module a subclass that does more."""
    attn_backend: AttentionBackend | None = None
    flash_attention_block_size: int | None = None

    Embed = property(lambda self: hax.Axis("width", self.width))
    Pos = max_Pos = property(lambda self: hax.Axis("position", self.max_seq_len))
    Layers = property(lambda self: hax.Axis("depth", self.depth))

    @property
    def model_type(self):
        return OwnAttentionModel

    @classmethod
    def from_hf_config(cls, hf_config):
        return cls(hf_config.positions, hf_config.width, hf_config.depth, hf_config.has_sinks)

    def attention_config(self):
        return AttentionConfig(
            self.Embed, num_heads=4, num_kv_heads=2, rope=DefaultRotaryEmbeddingsConfig(),
            attn_backend=self.attn_backend, flash_attention_block_size=self.flash_attention_block_size,
        )  # fmt: skip


class Block(eqx.Module):
    """Attention without an MLP."""

    norm: hnn.RmsNorm
    attention: Attention

    @staticmethod
    def init(config, *, key):
        kind = AttentionWithSink if config.has_sinks else Attention
        attention = kind.init(config.attention_config(), key=key)
        if config.has_sinks:
            attention = replace(attention, sinks=hax.random.normal(key, attention.sinks.axes))
        return Block(norm=hnn.RmsNorm.init(config.Embed, use_bias=False), attention=attention)

    def __call__(self, x, mask, pos_ids):
        return x + self.attention(self.norm(x), mask, pos_ids=pos_ids)


class OwnAttentionModel(LmHeadModel):
    """Blocks between an embedding and a head."""

    embeddings: hnn.Embedding
    blocks: Stacked
    head: hnn.Linear
    own_config: OwnAttentionConfig = eqx.field(static=True)

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
            head=hnn.Linear.init(config.Embed, Vocab, key=keys[2], use_bias=False),
            own_config=config,
        )

    def activations(self, input_ids, attn_mask=None, *, key=None, pos_ids=None):
        return self.blocks.fold(self.embeddings(input_ids), attn_mask or AttentionMask.causal(), pos_ids)

    def get_lm_head(self):
        return self.head.weight

    def resize_vocab(self, new_size, key=None):
        raise NotImplementedError
