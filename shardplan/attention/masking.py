"""Masks of attention: `MaskSpec` holds a static pattern of positions, known while tracing, and arrays for the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.layers.attention import AttentionMask

from shardplan.attention.axes import AxisRoles
from shardplan.errors import ConfigError
from shardplan.model.attention.chunked_mask import ChunkedMask
from shardplan.model.attention.mask_pattern import has_static_offset, pattern_of_mask
from shardplan.positions.pattern import PADDING, Pattern
from shardplan.positions.sequence_layout import SequenceLayout, document_ids

MAX_OFFSET = 2**30
"""Largest causal offset, longer than any sequence: a larger offset gives the same mask, and would overflow int32."""


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """The mask of an attention: a query may attend to a key if every part of the mask allows it."""

    pattern: Pattern
    """The static part of the mask: a function of positions that is known while tracing.

    With segment ids it has no chunks, which begin wherever a document does; the ids tell chunks apart then.
    """
    prefix: int = 0
    """Number of first positions that all queries may attend to, with a causal mask."""
    documents: tuple[int, ...] | None = None
    """Lengths of the documents of every sequence, if they are known while tracing."""
    segment_ids: tuple[NamedArray, NamedArray] | None = None
    """Document ids {batch, QPos} of queries and of keys."""
    causal_offset: NamedArray | None = None
    """The causal offset where `pattern` cannot hold it, because it is traced or not a single number."""
    explicit: NamedArray | None = None
    """Additional bool mask, true where attention is allowed; it may have any axes of the attention."""

    def kernel_pattern(self, layout: SequenceLayout) -> Pattern:
        """Return the pattern for kernels; chunks are left out if the layout has documents, whose ids separate them."""
        return self.pattern if layout.documents is None else self.pattern.without_chunks()

    def arrays(self, axes: AxisRoles, layouts: Sequence[SequenceLayout]) -> Mapping[str, NamedArray]:
        """Return the part of the mask that `pattern` does not cover, as arrays by name.

        | name | axes | |
        |---|---|---|
        | q_segments, k_segments | batch, QPos or KPos | document ids |
        | max_key_position | batch, QPos | the last position that each query may attend to |
        | explicit | any | an explicit mask, true where attention is allowed |

        Args:
            layouts: the layouts of queries and of keys.

        Raises:
            ConfigError: segment ids although the layout has documents.
        """
        if self.segment_ids is not None and layouts[0].documents is not None:
            raise ConfigError("attention: documents are given twice, as segment ids and by the layout; leave one out")
        arrays: dict[str, NamedArray] = {}
        position_axes = axes.queries, axes.keys
        positions = [layout.positions()[: axis.size] for layout, axis in zip(layouts, position_axes, strict=True)]
        if self.segment_ids is not None:
            arrays["q_segments"] = self.segment_ids[0]
            arrays["k_segments"] = self.segment_ids[1].rename({axes.queries.name: axes.keys.name})
        labels = None if layouts[0].documents is None else document_ids(layouts[0], self.pattern.chunk)
        if labels is not None:
            arrays["q_segments"], arrays["k_segments"] = (
                hax.named(jnp.asarray(np.where(each == PADDING, PADDING, labels[each]), jnp.int32), axis)
                for each, axis in zip(positions, position_axes, strict=True)
            )
        if self.causal_offset is not None:
            query_positions = hax.named(jnp.asarray(positions[0]), axes.queries)
            last = self.causal_offset.broadcast_axis(axes.queries) + query_positions
            arrays["max_key_position"] = hax.maximum(last, self.prefix - 1) if self.prefix else last
        if self.explicit is not None:
            names = {axis.name for axis in self.explicit.axes}
            missing = [axis for axis in position_axes if axis.name not in names]
            arrays["explicit"] = self.explicit.broadcast_axis(missing)
        return arrays


def make_mask_spec(
    mask: AttentionMask | NamedArray | None, prefix: int = 0, documents: Sequence[int] | None = None
) -> MaskSpec:
    """Divide the mask of an attention into a static pattern, known while tracing, and arrays.

    >>> make_mask_spec(AttentionMask.causal(sliding_window=128)).pattern.window
    128

    Args:
        prefix: with a causal mask, the number of first positions that all queries may attend to.
        documents: lengths of the documents of every sequence, if they are known while tracing.

    Raises:
        ConfigError: the mask has another type, the causal offset is neither an integer nor a named array of integers,
            the prefix is not known while tracing, or the explicit mask is not bool.
    """
    structured = _structured_mask(mask)
    if not isinstance(prefix, int | np.integer):
        raise ConfigError(
            "attention: prefix must be one number, known while tracing; use an explicit mask for other prefixes"
        )
    explicit = structured.explicit_mask
    if explicit is not None and explicit.dtype != jnp.bool_:
        raise ConfigError(
            f"attention: the explicit mask has dtype {explicit.dtype}; it must be bool, true where allowed"
        )
    pattern, segment_ids = pattern_of_mask(structured, int(prefix)), structured.segment_ids
    if isinstance(structured, ChunkedMask) and not structured.has_documents:
        segment_ids = None  # they say what the pattern does
    return MaskSpec(
        pattern=pattern if segment_ids is None else pattern.without_chunks(),
        prefix=int(prefix),
        documents=None if documents is None else tuple(documents),
        segment_ids=segment_ids,
        causal_offset=None if has_static_offset(structured) else structured.causal_offset,
        explicit=explicit,
    )


def _structured_mask(mask: AttentionMask | NamedArray | None) -> AttentionMask:
    """Return the mask as an `AttentionMask`; its causal offset is None or a named array.

    Levanter's own attention accepts offsets that are numbers, and ignores the offsets of masks that are not causal.

    Raises:
        ConfigError: the mask has another type, or its causal offset is neither an integer nor a named array of
            integers.
    """
    if mask is None:
        return AttentionMask()
    if isinstance(mask, NamedArray):
        return AttentionMask.explicit(mask)
    if not isinstance(mask, AttentionMask):
        raise ConfigError(
            f"attention: the mask is a {type(mask).__name__}; it must be levanter.layers.attention.AttentionMask, or a "
            "named array of bool"
        )
    offset: Any = mask.causal_offset
    if offset is None or not mask.is_causal:
        return replace(mask, causal_offset=None)
    if isinstance(offset, int):
        offset = max(-MAX_OFFSET, min(offset, MAX_OFFSET))
    if not isinstance(offset, NamedArray):
        values = np.asarray(offset) if isinstance(offset, int | float) else offset
        if getattr(values, "shape", None) != ():
            raise ConfigError(
                f"attention: causal_offset is {offset!r}; it must be an integer, or a named array of integers"
            )
        offset = hax.named(values, ())
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        raise ConfigError(f"attention: causal_offset has dtype {offset.dtype}; it must be an integer")
    return replace(mask, causal_offset=NamedArray(_bounded(offset.array), offset.axes))


def _bounded(offset: Any) -> Any:
    """Return the offsets as int32, bounded by `MAX_OFFSET`; numbers do not become traced values."""
    is_signed = jnp.issubdtype(offset.dtype, jnp.signedinteger)
    lowest = -MAX_OFFSET if is_signed else 0
    if isinstance(offset, jax.core.Tracer):
        return jnp.clip(offset, lowest, MAX_OFFSET).astype(jnp.int32)
    return np.clip(np.asarray(offset), lowest, MAX_OFFSET).astype(np.int32)
