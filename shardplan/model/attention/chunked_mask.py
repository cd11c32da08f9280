"""Masks for chunked attention, as in Llama 4: a query attends only to keys in its own chunk of positions.

Levanter's `AttentionMask` has no chunks. A `ChunkedMask` expresses them as segment ids and a two-sided window, so that
all of Levanter's functions compute it right. It also has the size of a chunk, a number that is known while tracing:
the cost model uses it, and shardplan's own attention skips blocks of scores that chunks exclude.

Chunks are counted from the beginning of a text: of the sequence, or of each document if the mask has segment ids. So
the result for a text does not depend on the texts beside it. transformers counts chunks from the beginning of the row
of tokens, which is the same if a row has one text.
"""

from dataclasses import fields
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask

from shardplan.errors import ConfigError


class ChunkedMask(AttentionMask):
    """A mask that allows only pairs of positions in one chunk; `with_chunks` makes it."""

    chunk: int = eqx.field(static=True, default=0)
    """Positions of a chunk."""
    own_radius: int | None = eqx.field(static=True, default=None)
    """Two-sided window of the mask, apart from its chunks; None if it has no such window."""
    has_documents: bool = eqx.field(static=True, default=False)
    """Whether segment ids separate documents, in addition to chunks."""

    def with_segment_ids(self, segment_ids: NamedArray, kv_segment_ids: NamedArray | None = None) -> AttentionMask:
        """Refuse segment ids, because chunks were counted without them.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a mask with chunks takes no segment ids; give them to the mask before with_chunks")


def with_chunks(
    mask: AttentionMask | NamedArray | None, chunk: int, Pos: Axis, indices: NamedArray | None = None
) -> ChunkedMask:
    """Return `mask` restricted to chunks of `chunk` positions.

    >>> Pos, KPos = hax.make_axes(position=6, key_position=6)
    >>> mask = with_chunks(AttentionMask.causal(), 4, Pos)
    >>> mask.materialize(Pos, KPos).array.astype(int)[3:].tolist()
    [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]]

    Args:
        mask: None for all pairs; an array of bool is true where attention is allowed.
        Pos: the position axis of queries; keys have the same positions.
        indices: int32[..., position], the index of each token in its document; default: its index in its run of equal
            segment ids. Without segment ids the argument is ignored.

    Raises:
        ConfigError: a chunk has less than one position, or the mask has chunks already.
    """
    if chunk < 1:
        raise ConfigError(f"attention: chunk is {chunk}; it must be at least 1")
    if isinstance(mask, ChunkedMask):
        raise ConfigError(f"attention: the mask has chunks of {mask.chunk} positions already")
    if not isinstance(mask, AttentionMask):
        mask = AttentionMask() if mask is None else AttentionMask.explicit(mask)
    radius = mask.bidirectional_window
    inherited: dict[str, Any] = {field.name: getattr(mask, field.name) for field in fields(AttentionMask)}
    changed = {
        "segment_ids": _segments_of_chunks(mask.segment_ids, chunk, Pos, indices),
        "bidirectional_window": chunk - 1 if radius is None else min(radius, chunk - 1),
    }
    has_documents = mask.segment_ids is not None
    return ChunkedMask(**(inherited | changed), chunk=chunk, own_radius=radius, has_documents=has_documents)


def indices_in_documents(segment_ids: NamedArray, Pos: Axis) -> NamedArray:
    """Return the index of each token in its run of equal `segment_ids`, int32[..., position].

    >>> ids = hax.named([5, 5, 5, 2, 2], "position")
    >>> indices_in_documents(ids, ids.axes[0]).array.tolist()
    [0, 1, 2, 0, 1]
    """
    index = hax.arange(Pos)
    is_first = (segment_ids != hax.roll(segment_ids, 1, Pos)) | (index == 0)
    starts = hax.where(is_first, index, 0)
    latest = jax.lax.cummax(starts.array, axis=starts.axes.index(Pos))
    return index - hax.named(latest, starts.axes)


def _segments_of_chunks(
    documents: tuple[NamedArray, NamedArray] | None, chunk: int, Pos: Axis, indices: NamedArray | None
) -> tuple[NamedArray, NamedArray]:
    """Return segment ids such that two tokens less than a chunk apart share an id only within one chunk."""
    if documents is None:
        ids = hax.arange(Pos) // chunk
        return ids, ids
    of_queries, of_keys = documents
    if indices is None:
        indices = indices_in_documents(of_queries, Pos)
    # within a document, tokens less than a chunk apart are in one chunk or in neighbouring ones: two ids are enough
    parity = indices // chunk % 2
    renamed = [axis.name for axis in of_keys.axes if not of_queries.has_axis(axis.name)]
    of_keys = of_keys * 2 + (parity.rename({Pos.name: renamed[0]}) if renamed else parity)
    return of_queries * 2 + parity, of_keys
