"""Extracts the part of Levanter's `AttentionMask` that is known while tracing, as a `Pattern` of positions.

A trace marks attention with the pattern, and shardplan's own attention skips blocks of scores that it excludes. Both
use this module, so that the cost model estimates what is computed.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.layers.attention import AttentionMask

from shardplan.model.attention.chunked_mask import ChunkedMask
from shardplan.positions.pattern import Pattern


def pattern_of_mask(mask: Any, prefix: int = 0) -> Pattern:
    """Return the part of a mask that is known while tracing; for an array, the pattern that allows all pairs.

    Args:
        prefix: number of first positions that all queries may attend to under a causal mask.
    """
    if not isinstance(mask, AttentionMask):
        return Pattern()
    windows = Pattern(window=mask.sliding_window, radius=mask.bidirectional_window)
    if isinstance(mask, ChunkedMask):
        windows = replace(windows, radius=mask.own_radius, chunk=mask.chunk)
    if not mask.is_causal or not has_static_offset(mask):
        return windows
    return replace(windows, causal=True, causal_offset=int(_offset_array(mask) or 0), prefix=prefix)


def has_static_offset(mask: AttentionMask) -> bool:
    """Return whether the causal offset is absent, or one number that is known while tracing."""
    offset = _offset_array(mask)
    return offset is None or not (isinstance(offset, jax.core.Tracer) or jnp.ndim(offset) > 0)


def _offset_array(mask: AttentionMask) -> Any:
    """Return the causal offset of a mask as a number or an array without names; None if the mask has no offset."""
    offset: Any = mask.causal_offset
    return offset.array if isinstance(offset, NamedArray) else offset
