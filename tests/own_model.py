"""What models have in common that neither shardplan nor Levanter knows: an embedding and a head, often with blocks."""

from dataclasses import dataclass
from typing import ClassVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.random
from haliax.nn.scan import Stacked
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmConfig, LmHeadModel


@dataclass(frozen=True)
class OwnConfig(LmConfig):
    """Sizes of an `OwnModel`."""

    max_seq_len: int = 64
    width: int = 32
    depth: int = 2
    block: ClassVar[type[eqx.Module]]
    """The class of its blocks, which take a mask and positions beside the residual stream."""

    Embed = property(lambda self: hax.Axis("width", self.width))
    Pos = max_Pos = property(lambda self: hax.Axis("position", self.max_seq_len))
    Layers = property(lambda self: hax.Axis("depth", self.depth))

    @property
    def model_type(self):
        return OwnModel


class HeadedModel(LmHeadModel):
    """A model with an embedding and a head; a subclass makes them, and computes what is between them."""

    embeddings: hnn.Embedding
    head: hnn.Linear
    own_config: LmConfig = eqx.field(static=True)

    @property
    def config(self):
        return self.own_config

    @property
    def Vocab(self):
        return self.embeddings.Vocab

    def get_lm_head(self):
        return self.head.weight

    def resize_vocab(self, new_size, key=None):
        raise NotImplementedError


class OwnModel(HeadedModel):
    """Blocks between an embedding and a head."""

    blocks: Stacked

    @classmethod
    def init(cls, Vocab, config, *, key):
        keys = jax.random.split(key, 3)
        blocks = Stacked.init(config.Layers, config.block, gradient_checkpointing=True)
        return cls(
            embeddings=hnn.Embedding.init(Vocab, config.Embed, key=keys[0]),
            blocks=blocks(config, key=jax.random.split(keys[1], config.depth)),
            head=hnn.Linear.init(config.Embed, Vocab, key=keys[2], use_bias=False),
            own_config=config,
        )

    def activations(self, input_ids, attn_mask=None, *, key=None, pos_ids=None):
        return self.blocks.fold(self.embeddings(input_ids), attn_mask or AttentionMask.causal(), pos_ids)
