"""A model that neither shardplan nor Levanter knows, whose blocks have Levanter's `Attention`."""

from dataclasses import dataclass, replace

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
from levanter.layers.attention import Attention, AttentionBackend, AttentionConfig, AttentionWithSink
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from own_model import OwnConfig


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


@dataclass(frozen=True)
class OwnAttentionConfig(OwnConfig):
    """Sizes of the model."""

    has_sinks: bool = False
    """Whether attention has a sink for every head, which makes its module a subclass that does more."""
    attn_backend: AttentionBackend | None = None
    flash_attention_block_size: int | None = None
    block = Block

    @classmethod
    def from_hf_config(cls, hf_config):
        return cls(hf_config.positions, hf_config.width, hf_config.depth, hf_config.has_sinks)

    def attention_config(self):
        return AttentionConfig(
            self.Embed, num_heads=4, num_kv_heads=2, rope=DefaultRotaryEmbeddingsConfig(),
            attn_backend=self.attn_backend, flash_attention_block_size=self.flash_attention_block_size,
        )  # fmt: skip
