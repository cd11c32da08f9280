"""Kinds of attention, by which each attention matmul gets its own method and price.

A model may have several: layers with a window beside layers without one, heads of several sizes, sinks. Two calls of
attention are of one kind if their masks, as far as they are known while tracing, and these facts are equal. The trace
marks every call with its kind (`shardplan.program.marked.marked_attention`); nothing else says which layer has which
mask.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardplan.positions.pattern import CAUSAL, Pattern

if TYPE_CHECKING:  # imports Haliax, which whoever only reads verdicts does not need
    from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig


@dataclass(frozen=True)
class AttentionKind:
    """The properties that distinguish one kind of attention in a model from another."""

    pattern: Pattern = CAUSAL
    """The part of the mask that is known while tracing."""
    head_size: int | None = None
    """Elements of a query and of a key; None if the call of attention is not marked."""
    value_head_size: int | None = None
    """Elements of a value."""
    soft_cap: float | None = None
    """Bound of the scores, applied as `cap * tanh(scores / cap)`."""
    has_sinks: bool = False
    """Whether every head has a sink, an additional score without a value."""
    has_bias: bool = False
    """Whether an array is added to the scores."""
    uses_own_kernel: bool = False
    """Whether shardplan's kernel computes it even if positions are not sharded, as in the decoder.

    In other models Levanter's does.
    """
    sparse: "NativeSparseConfig | None" = None
    """The sizes of Native Sparse Attention; None for attention to all keys of the pattern."""

    @property
    def can_shard_positions(self) -> bool:
        """Whether positions can be sharded: only shardplan's attention can do so, and it supports no bias."""
        return self.head_size is not None and not self.has_bias

    @cached_property
    def name(self) -> str:
        """The name of the kind in plans, such as `causal, window 1024, head size 128`."""
        parts = [self.pattern.name]
        if self.sparse is not None:
            sparse = self.sparse
            parts.append(f"native sparse {sparse.selected} x {sparse.selection_block}, window {sparse.window}")
        if self.soft_cap is not None:
            parts.append(f"soft cap {self.soft_cap:g}")
        if self.has_sinks:
            parts.append("sinks")
        if self.has_bias:
            parts.append("bias")
        if self.head_size is not None:
            sizes = {self.head_size: None, self.value_head_size or self.head_size: None}
            parts.append(f"head size {'/'.join(map(str, sizes))}")
        return ", ".join(parts)


UNMARKED = AttentionKind()
"""The kind assumed for attention that no known function computes: causal."""
