"""The architecture of a decoder: its layers, and what is before and behind them."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from haliax import Axis
from levanter.layers.attention import AttentionBackend
from levanter.models.lm_model import LmConfig

from shardplan.decoder.parts.attention import POSITION, Kernel
from shardplan.decoder.parts.norm import NormConfig
from shardplan.decoder.parts.segments import Segment


@dataclass(frozen=True)
class PositionTable:
    """A learned embedding of each position; it is added to the embedding of the token."""

    rows: int
    """Rows of the table."""
    first: int = 0
    """Row of the first position."""

    @property
    def Rows(self) -> Axis:
        """The axis of the table's rows."""
        return Axis("position_row", self.rows)


@dataclass(frozen=True)
class Architecture(LmConfig):
    """A decoder, as a family reads it from a config.json (`shardplan.decoder.families`)."""

    max_seq_len: int
    """Positions that the model has."""
    embed: int
    """Elements of the residual stream."""
    segments: tuple[Segment, ...]
    """The layers."""
    norm: NormConfig | None
    """The norm behind the layers."""
    is_tied: bool
    """Whether the output head is the embedding."""
    hf_config: str
    """The config.json that this was made of, as JSON."""
    has_head_bias: bool = False
    """Whether the output head has a bias."""
    position_table: PositionTable | None = None
    token_embed: int | None = None
    """Elements of the embedding of a token, and of what the output head reads.

    They are projected to the residual stream and back. None where the two have one size.
    """
    embedding_multiplier: float = 1.0
    """What the embeddings of tokens are multiplied by."""
    logit_multiplier: float = 1.0
    """What the input of the output head is multiplied by."""
    logit_soft_cap: float | None = None
    """Bound of the logits, applied as `cap * tanh(logits / cap)`."""
    attn_backend: AttentionBackend | None = None
    """What computes attention where no plan does."""
    flash_attention_block_size: int | None = None
    gradient_checkpointing: Any = True

    @property
    def num_layers(self) -> int:
        """The layers of all segments."""
        return sum(segment.num_layers for segment in self.segments)

    @property
    def Embed(self) -> Axis:
        """The axis of the residual stream."""
        return Axis("embed", self.embed)

    @property
    def TokenEmbed(self) -> Axis:
        """The axis of the embedding of a token."""
        return self.Embed if self.token_embed is None else Axis("token_embed", self.token_embed)

    @property
    def Layers(self) -> tuple[Axis, ...]:
        """The axis of each segment, along which its repetitions are stacked."""
        names = ["layers"] if len(self.segments) == 1 else [f"layers_{i}" for i in range(len(self.segments))]
        return tuple(Axis(name, segment.repeats) for name, segment in zip(names, self.segments, strict=True))

    @property
    def max_Pos(self) -> Axis:
        """The axis of positions, with all that the model has."""
        return Axis(POSITION, self.max_seq_len)

    @property
    def Pos(self) -> Axis:
        """The same, by the name that some of Levanter's code asks for."""
        return self.max_Pos

    @property
    def kernel(self) -> Kernel:
        """What computes attention where no plan does."""
        return Kernel(self.attn_backend, self.flash_attention_block_size)

    @cached_property
    def family(self) -> str:
        """The Hugging Face `model_type`."""
        name: str = json.loads(self.hf_config)["model_type"]
        return name
