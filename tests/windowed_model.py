"""A model with windows in some layers: groups of layers with a window, each followed by one layer without."""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.random
from haliax.nn.scan import Stacked
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig, LlamaDecoderLayer
from own_model import HeadedModel


@dataclass(frozen=True)
class WindowedConfig(LlamaConfig):
    """Sizes of a `WindowedModel`: `groups` x (`local` + 1) + `tail` layers."""

    window: int = 8
    local: int = 5
    groups: int = 1
    tail: int = 0

    @property
    def model_type(self):
        return WindowedModel

    @classmethod
    def from_hf_config(cls, hf_config):
        names = (
            "hidden_dim", "intermediate_dim", "num_heads", "num_kv_heads", "head_dim",
            "window", "local", "groups", "tail",
        )  # fmt: skip
        return cls(max_seq_len=hf_config.positions, **{name: getattr(hf_config, name) for name in names})


def layers(config, axis, key):
    """Stacked layers along an axis."""
    stack = Stacked.init(axis, LlamaDecoderLayer, gradient_checkpointing=True)
    return stack(config, key=jax.random.split(key, axis.size))


class Group(eqx.Module):
    """Layers with a window, then one without."""

    local: Stacked
    full: LlamaDecoderLayer

    @staticmethod
    def init(config, *, key):
        first, second = jax.random.split(key)
        return Group(
            layers(config, hax.Axis("local_layer", config.local), first), LlamaDecoderLayer.init(config, key=second)
        )

    def __call__(self, x, mask, pos_ids=None):
        x = self.local.fold(x, mask.with_sliding_window(self.full.config.window), pos_ids=pos_ids)
        return self.full(x, mask, pos_ids=pos_ids)


class WindowedModel(HeadedModel):
    """Groups and further layers with a window, between an embedding and a head."""

    groups: Stacked
    tail: Stacked | None
    norm: hnn.RmsNorm

    @classmethod
    def init(cls, Vocab, config, *, key):
        keys = jax.random.split(key, 4)
        groups = Stacked.init(hax.Axis("group", config.groups), Group, gradient_checkpointing=True)
        return cls(
            embeddings=hnn.Embedding.init(Vocab, config.Embed, key=keys[0]),
            groups=groups(config, key=jax.random.split(keys[1], config.groups)),
            tail=layers(config, hax.Axis("tail_layer", config.tail), keys[2]) if config.tail else None,
            norm=hnn.RmsNorm.init(config.Embed, use_bias=False),
            head=hnn.Linear.init(config.Embed, Vocab, key=keys[3], use_bias=False),
            own_config=config,
        )

    def activations(self, input_ids, attn_mask=None, *, key=None, pos_ids=None):
        mask = attn_mask or AttentionMask.causal()
        x = self.groups.fold(self.embeddings(input_ids), mask, pos_ids=pos_ids)
        if self.tail is not None:
            x = self.tail.fold(x, mask.with_sliding_window(self.own_config.window), pos_ids=pos_ids)
        return self.norm(x)
