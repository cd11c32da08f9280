"""Masks of attention: a static pattern of positions, known while tracing, and arrays for the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.layers.attention import AttentionMask

from shardplan.attention.axes import AxisRoles
from shardplan.errors import ConfigError
from shardplan.positions.pattern import PADDING, Pattern
from shardplan.positions.sequence_layout import SequenceLayout, document_ids

MAX_OFFSET = 2**30
"""Bound of a causal offset, more than any sequence has positions: beyond it a mask is the same, and int32 overflows."""


def structured_mask(mask: AttentionMask | NamedArray | None) -> AttentionMask:
    """Return the mask of an attention as an `AttentionMask` whose causal offset is None, or a named array.

    Levanter's own attention accepts offsets that are numbers, and ignores those of masks that are not causal.

    Raises:
        ConfigError: another type, or a causal offset that is no integer and no named array of integers.
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


def static_pattern(mask: AttentionMask, prefix: int) -> Pattern:
    """Return the part of a mask that is known while tracing.

    A causal offset that is traced, or that is not a single number, is left to `mask_arrays`.

    Args:
        mask: as `structured_mask` returns it.
        prefix: with a causal mask, the number of first positions that all queries may attend to.

    Raises:
        ConfigError: the prefix is not known while tracing.
    """
    if not isinstance(prefix, int | np.integer):
        raise ConfigError(
            "attention: prefix must be one number, known while tracing; use an explicit mask for other prefixes"
        )
    window, radius = mask.sliding_window, mask.bidirectional_window
    if not _has_static_offset(mask):
        return Pattern(window=window, radius=radius)
    offset = 0 if mask.causal_offset is None else int(mask.causal_offset.array)
    return Pattern(mask.is_causal, offset, window, int(prefix), radius)


def mask_arrays(
    mask: AttentionMask, prefix: int, axes: AxisRoles, layouts: Sequence[SequenceLayout]
) -> Mapping[str, NamedArray]:
    """Return the part of a mask that `static_pattern` does not cover, as arrays by name.

    | name | axes | |
    |---|---|---|
    | q_segments, k_segments | batch, QPos or KPos | document ids |
    | max_key_position | batch, QPos | the last position that each query may attend to |
    | explicit | any | an explicit mask, true where attention is allowed |

    Args:
        mask: as `structured_mask` returns it.
        layouts: the layouts of queries and of keys.

    Raises:
        ConfigError: segment ids although the layout has documents, or an explicit mask that is not bool.
    """
    arrays: dict[str, NamedArray] = {}
    segments = mask.segment_ids
    if segments is not None and layouts[0].documents is not None:
        raise ConfigError("attention: documents are given twice, as segment ids and by the layout; leave one out")
    position_axes = axes.queries, axes.keys
    positions = [layout.positions()[: axis.size] for layout, axis in zip(layouts, position_axes, strict=True)]
    if segments is not None:
        arrays["q_segments"] = segments[0]
        arrays["k_segments"] = segments[1].rename({axes.queries.name: axes.keys.name})
    labels = document_ids(layouts[0])
    if labels is not None:
        arrays["q_segments"], arrays["k_segments"] = (
            hax.named(jnp.asarray(np.where(each == PADDING, PADDING, labels[each]), jnp.int32), axis)
            for each, axis in zip(positions, position_axes, strict=True)
        )
    if not _has_static_offset(mask):
        assert mask.causal_offset is not None
        query_positions = hax.named(jnp.asarray(positions[0]), axes.queries)
        last = mask.causal_offset.broadcast_axis(axes.queries) + query_positions
        arrays["max_key_position"] = hax.maximum(last, prefix - 1) if prefix else last
    explicit = mask.explicit_mask
    if explicit is not None:
        if explicit.dtype != jnp.bool_:
            raise ConfigError(
                f"attention: the explicit mask has dtype {explicit.dtype}; it must be bool, true where allowed"
            )
        names = {axis.name for axis in explicit.axes}
        arrays["explicit"] = explicit.broadcast_axis([axis for axis in position_axes if axis.name not in names])
    return arrays


def _has_static_offset(mask: AttentionMask) -> bool:
    """Whether the causal offset is one number, known while tracing, or there is none."""
    if mask.causal_offset is None:
        return True
    return mask.causal_offset.ndim == 0 and not isinstance(mask.causal_offset.array, jax.core.Tracer)
