"""Settings of Native Sparse Attention, checked, and the sizes and axes that follow from them.

Source: https://arxiv.org/abs/2502.11089, section 3; docstrings give the paper's symbols.
"""

from dataclasses import dataclass
from enum import StrEnum

from haliax import Axis

from shardplan.decoder.parts.attention.frequencies import unscaled
from shardplan.decoder.parts.attention.rotary import Rotary
from shardplan.decoder.parts.attention.sparse.selection_blocks import SelectionBlocks
from shardplan.errors import ConfigError, nearest

SIZES = (
    "embed", "groups", "heads_per_group", "key_size", "value_size", "block", "stride", "selection_block", "selected",
    "window", "local",
)  # fmt: skip
"""Settings that must be at least 1."""


class Compression(StrEnum):
    """The function that compresses a block of tokens to one key or value: phi in the paper."""

    MEAN = "mean"
    LINEAR = "linear"
    """A linear map of all channels of all tokens of the block."""
    MLP = "mlp"
    """Two layers with ReLU between them; the first one is as in `LINEAR`."""


class CompressedRope(StrEnum):
    """The position by which compressed keys are rotated."""

    BLOCK_START = "block_start"
    """The position of the block's first token."""
    NONE = "none"
    """Neither compressed keys nor the queries that attend to them are rotated."""


@dataclass(frozen=True)
class NativeSparseConfig:
    """The settings of a layer with Native Sparse Attention: its sizes, its blocks, and how keys are compressed.

    Example, the layer of the paper:

    >>> paper = NativeSparseConfig(
    ...     embed=2560, groups=4, heads_per_group=16, key_size=192, value_size=128,
    ...     block=32, stride=16, selection_block=64, selected=16, window=512,
    ... )
    >>> paper.compressed_blocks(8192), paper.selection_blocks(8192)
    (511, 128)
    """

    embed: int
    """Channels of the residual stream."""
    groups: int
    """Number of key and value heads; all query heads of a group select the same blocks."""
    heads_per_group: int
    """Number of query heads per key head."""
    key_size: int
    """Channels of a head of queries and keys, d_k."""
    value_size: int
    """Channels of a head of values, d_v."""
    block: int
    """Tokens of a compressed block, l."""
    stride: int
    """Tokens from the start of a compressed block to the start of the next one, d."""
    selection_block: int
    """Tokens of a block that queries select, l'."""
    selected: int
    """Number of blocks that a query selects, n, initial and local ones included."""
    window: int
    """Tokens in the window, w, the query's own included."""
    initial: int = 1
    """Number of blocks at the start of the sequence that every query selects."""
    local: int = 2
    """Number of blocks, up to and including a query's own, that every query selects."""
    compression: Compression = Compression.MLP
    hidden: int | None = None
    """Hidden size of the MLPs that compress; None or 0 for twice the channels of their output."""
    compressed_rope: CompressedRope = CompressedRope.BLOCK_START
    theta: float | None = 10000.0
    """Base of the rotary frequencies; None or 0 for no rotary embedding."""

    def __post_init__(self) -> None:
        """Check the settings, and convert the names of choices.

        Raises:
            ConfigError: a setting is not valid, or contradicts another one.
        """
        for name, kind in (("compression", Compression), ("compressed_rope", CompressedRope)):
            value = getattr(self, name)
            if value not in [*kind]:
                raise ConfigError(f"{name} is {value!r}; {nearest(str(value), kind)}")
            object.__setattr__(self, name, kind(value))
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("initial", "hidden", "theta"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("block", "selection_block"):
            if getattr(self, name) % self.stride:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a multiple of stride, {self.stride}")
        if self.block > self.selection_block:
            raise ConfigError(f"block is {self.block}; it must be at most selection_block, {self.selection_block}")
        if self.initial + self.local > self.selected:
            least = f"initial + local, {self.initial} + {self.local}"
            raise ConfigError(f"selected is {self.selected}; it must be at least {least}")
        if self.theta and self.key_size % 2:
            raise ConfigError(
                f"key_size is {self.key_size}; it must be even, or theta None, to rotate pairs of channels"
            )

    def compressed_blocks(self, positions: int) -> int:
        """Return the number of compressed blocks of a sequence."""
        return max(0, (positions - self.block) // self.stride + 1)

    def selection_blocks(self, positions: int) -> int:
        """Return the number of selection blocks of a sequence; the last one may be shorter."""
        return self.selection.count(positions)

    def hidden_size(self, size: int) -> int:
        """Return the hidden size of the MLP that compresses heads with `size` channels."""
        return self.hidden or 2 * size

    @property
    def selection(self) -> SelectionBlocks:
        """Return the description of the blocks that queries select."""
        return SelectionBlocks(self.selection_block, self.initial, self.local)

    @property
    def strides_per_block(self) -> int:
        """Return block / stride, the number of compressed blocks that contain a token far from the sequence's ends."""
        return self.block // self.stride

    @property
    def scale(self) -> float:
        """Return the factor of scores, key_size ** -0.5."""
        return float(self.key_size**-0.5)

    @property
    def rotary(self) -> Rotary | None:
        """Return the rotary embedding of all channels of queries and keys, or None if there is none."""
        return Rotary(unscaled(self.theta, self.key_size)) if self.theta else None

    @property
    def Embed(self) -> Axis:
        """The axis of the residual stream's channels."""
        return Axis("embed", self.embed)

    @property
    def KVHeads(self) -> Axis:
        """The axis of key heads."""
        return Axis("kv_head", self.groups)

    @property
    def QHeadsPerGroup(self) -> Axis:
        """The axis of query heads per key head."""
        return Axis("q_heads_per_group", self.heads_per_group)

    @property
    def HeadSize(self) -> Axis:
        """The axis of a query or key head's channels."""
        return Axis("head_size", self.key_size)

    @property
    def ValueHeadSize(self) -> Axis:
        """The axis of a value head's channels, and of the head's output."""
        return Axis("head_size" if self.value_size == self.key_size else "value_head_size", self.value_size)

    @property
    def Gates(self) -> Axis:
        """The axis of a query head's gates, one per branch: compressed, selected, window."""
        return Axis("gate", 3)

    @property
    def Selected(self) -> Axis:
        """The axis of the blocks that a query selects."""
        return Axis("selected", self.selected)
