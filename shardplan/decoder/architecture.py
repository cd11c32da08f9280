"""The architecture of a decoder: its embeddings, its layers, the last norm and the output head.

It imports no family, so that families can import it; `shardplan.decoder.config.DecoderConfig` adds the methods that
need the families and the model.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from haliax import Axis
from levanter.layers.attention import AttentionBackend
from levanter.models.lm_model import LmConfig

from shardplan.decoder.parts.attention.grouped_attention import POSITION, Kernel
from shardplan.decoder.parts.norm import NormConfig
from shardplan.decoder.parts.segments import Segment
from shardplan.errors import ConfigError
from shardplan.model.huggingface.quantization import ByteCodes


@dataclass(frozen=True)
class PositionTable:
    """Learned position embeddings, which are added to the token embeddings."""

    rows: int
    """Number of rows."""
    first: int = 0
    """Row of position 0."""

    @property
    def Rows(self) -> Axis:
        """The axis of the table's rows."""
        return Axis("position_row", self.rows)


@dataclass(frozen=True)
class Architecture(LmConfig):
    """The architecture of a decoder, which a family reads from a config.json (`shardplan.decoder.families`)."""

    max_seq_len: int
    """Number of positions of the model."""
    embed: int
    """Size of the residual stream."""
    segments: tuple[Segment, ...]
    """The layers, as repeated blocks."""
    norm: NormConfig | None
    """The norm after the last layer; None for models without it."""
    is_tied: bool
    """Whether the output head and the token embedding share one weight."""
    hf_config: str
    """The config.json from which the architecture was read, as JSON."""
    has_head_bias: bool = False
    """Whether the output head has a bias."""
    position_table: PositionTable | None = None
    token_embed: int | None = None
    """Size of token embeddings and of the output head's input; None for `embed`.

    If it is given, one projection leads to the residual stream, and one back.
    """
    embedding_multiplier: float = 1.0
    """Factor of the token embeddings."""
    logit_multiplier: float = 1.0
    """Factor of the output head's input."""
    logit_soft_cap: float | None = None
    """Bound of the logits, applied as `cap * tanh(logits / cap)`."""
    kept: ByteCodes | None = None
    """How layer weights are stored if they stay codes on the devices; None if they are decoded at loading."""
    index_topk: int | None = None
    """Positions that the indexer of sparse attention chooses for a query; None for a model without one.

    Attention to all positions is the same up to as many, and longer sequences are refused.
    """
    attn_backend: AttentionBackend | None = None
    """Levanter's attention backend, for attention that no plan computes."""
    flash_attention_block_size: int | None = None
    gradient_checkpointing: Any = field(default=True, hash=False)  # a policy of Haliax has lists of names
    expert_statistics: bool = False
    """Whether the mean loss comes with statistics of routed experts, for the trackers of Levanter's Trainer."""
    selection_statistics: bool = False
    """Whether the mean loss comes with statistics of the blocks that Native Sparse Attention selects."""

    @property
    def num_layers(self) -> int:
        """Number of layers in all segments."""
        return sum(segment.num_layers for segment in self.segments)

    @property
    def Embed(self) -> Axis:
        """The axis of the residual stream."""
        return Axis("embed", self.embed)

    @property
    def TokenEmbed(self) -> Axis:
        """The axis of token embeddings."""
        return self.Embed if self.token_embed is None else Axis("token_embed", self.token_embed)

    @property
    def Layers(self) -> tuple[Axis, ...]:
        """One axis per segment, which stacks the parameters of the segment's repetitions."""
        names = ["layers"] if len(self.segments) == 1 else [f"layers_{i}" for i in range(len(self.segments))]
        return tuple(Axis(name, segment.repeats) for name, segment in zip(names, self.segments, strict=True))

    @property
    def max_Pos(self) -> Axis:
        """The position axis, with all positions of the model."""
        return Axis(POSITION, self.max_seq_len)

    @property
    def Pos(self) -> Axis:
        """The position axis, under the name that some of Levanter's code uses."""
        return self.max_Pos

    @property
    def kernel(self) -> Kernel:
        """Levanter's attention kernel, used without a plan."""
        return Kernel(self.attn_backend, self.flash_attention_block_size)

    def check_length(self, length: int, key: str) -> None:
        """Check that a sequence is short enough for the model's indexer to choose all of its positions.

        Args:
            key: name of the length, for the message.

        Raises:
            ConfigError: the indexer would leave out positions.
        """
        if self.index_topk is not None and length > self.index_topk:
            raise ConfigError(
                f"{key} is {length}, and the indexer of a {self.family} chooses {self.index_topk} positions for each "
                f"query (index_topk), which is not supported where it does not choose all; use at most "
                f"{self.index_topk}"
            )

    @cached_property
    def family(self) -> str:
        """The Hugging Face `model_type`."""
        name: str = json.loads(self.hf_config)["model_type"]
        return name
