"""What a mask says: a pattern of positions that is known while tracing, and arrays that go with queries and keys."""

from collections.abc import Mapping, Sequence

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.layers.attention import AttentionMask

from shardplan.attention.axes import Dims
from shardplan.errors import ConfigError
from shardplan.positions.pattern import PADDING, Pattern
from shardplan.positions.sequence_layout import SequenceLayout, labels_of


def pattern_of(mask: AttentionMask, prefix: int) -> Pattern:
    """What is known while tracing of where queries may attend to.

    A causal offset that is not known, or not one for all, is left to `mask_arrays`.

    Raises:
        ConfigError: the prefix is not known.
    """
    if not isinstance(prefix, int | np.integer):
        raise ConfigError("attention: prefix must be one number, known while tracing; make an explicit mask of others")
    if not _has_static_offset(mask):
        return Pattern(window=mask.sliding_window)
    offset = 0 if mask.causal_offset is None else int(mask.causal_offset.array)
    return Pattern(mask.is_causal, offset, mask.sliding_window, int(prefix))


def mask_arrays(
    mask: AttentionMask, prefix: int, dims: Dims, orders: Sequence[SequenceLayout]
) -> Mapping[str, NamedArray]:
    """What there is besides, by name.

    | name | axes | |
    |---|---|---|
    | q_segments, k_segments | batch, QPos or KPos | documents |
    | reach | batch, QPos | the last position that each query may attend to |
    | explicit | any | what is given entry by entry |

    Args:
        orders: the layouts of queries and keys.

    Raises:
        ConfigError: documents that the layout knows beside segment ids, or an explicit mask that is not of bools.
    """
    found: dict[str, NamedArray] = {}
    segments = mask.segment_ids
    if segments is not None and orders[0].documents is not None:
        raise ConfigError("attention: the mask has segment ids, and documents are known beside them; leave one out")
    axes = dims.queries, dims.keys
    placed = [order.order()[: axis.size] for order, axis in zip(orders, axes, strict=True)]
    if segments is not None:
        found["q_segments"] = segments[0]
        found["k_segments"] = segments[1].rename({dims.queries.name: dims.keys.name})
    labels = labels_of(orders[0])
    if labels is not None:
        found["q_segments"], found["k_segments"] = (
            hax.named(jnp.asarray(np.where(order == PADDING, PADDING, labels[order]), jnp.int32), axis)
            for order, axis in zip(placed, axes, strict=True)
        )
    if not _has_static_offset(mask):
        assert mask.causal_offset is not None
        reach = mask.causal_offset.broadcast_axis(dims.queries) + hax.named(jnp.asarray(placed[0]), dims.queries)
        found["reach"] = hax.maximum(reach, prefix - 1) if prefix else reach
    explicit = mask.explicit_mask
    if explicit is not None:
        if explicit.dtype != jnp.bool_:
            raise ConfigError(f"attention: the mask is of {explicit.dtype}; it must be bool, true where allowed")
        has = {axis.name for axis in explicit.axes}
        found["explicit"] = explicit.broadcast_axis([axis for axis in axes if axis.name not in has])
    return found


def _has_static_offset(mask: AttentionMask) -> bool:
    """Whether the mask is not causal, or by an offset that is one number, known while tracing."""
    if not mask.is_causal or mask.causal_offset is None:
        return True
    return mask.causal_offset.ndim == 0 and not isinstance(mask.causal_offset.array, jax.core.Tracer)
