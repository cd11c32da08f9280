"""Calls Levanter's `dot_product_attention`, also for value heads of another size than key heads.

Levanter's kernels and gradients require heads of one size. The smaller heads are padded with channels of zeros, which
add nothing to scores; the padding of the output is sliced off.
"""

from typing import Any

import haliax as hax
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask
from levanter.layers.attention import dot_product_attention as levanter_attention


def dot_product_attention(
    QPos: str,
    KPos: str,
    Key: Axis,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: AttentionMask | NamedArray | None,
    **settings: Any,
) -> NamedArray:
    """Compute attention with Levanter's function of this name, for value heads of any size.

    Args:
        query: {..., heads, QPos, Key}; axes that `key` does not have are query heads that share a key head.
        key: {..., key heads, KPos, Key}.
        value: {..., key heads, KPos, Key}, or with another axis of any size in place of `Key`.
        settings: further arguments of Levanter's function.

    Returns:
        The axes of `query`, with the channel axis of `value` in place of `Key`.
    """
    of_values = [axis for axis in value.axes if not key.has_axis(axis.name)]
    if not of_values:
        result: NamedArray = levanter_attention(QPos, KPos, Key, query, key, value, mask, **settings)
        return result
    (Value,) = of_values
    Both = Key.resize(max(Key.size, Value.size))
    # Levanter's default would follow from the padded size
    settings = {"scaling_factor": Key.size**-0.5, **settings}
    query, key, value = (_widen(x, Both) for x in (query, key, value.rename({Value.name: Key.name})))
    result = levanter_attention(QPos, KPos, Both, query, key, value, mask, **settings)
    return result[Key.name, : Value.size].rename({Key.name: Value.name})


def _widen(x: NamedArray, Both: Axis) -> NamedArray:
    """Pad an axis of `x` with zeros to the size of `Both`, the axis of the same name."""
    missing = Both.size - x.axis_size(Both.name)
    if missing == 0:
        return x
    zeros = hax.zeros([axis.resize(missing) if axis.name == Both.name else axis for axis in x.axes], x.dtype)
    return hax.concatenate(Both.name, [x, zeros])
