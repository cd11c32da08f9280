"""Levanter's `dot_product_attention`, for heads of values that have another size than those of queries and keys.

Levanter's kernels, and its gradients, take values of the size of keys alone. Channels of zeros make the two sizes one:
they add nothing to scores, and those of the output are left out.
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
    """Compute attention by Levanter's function of this name.

    Args:
        query: {..., heads, QPos, Key}; axes that `key` does not have are query heads of one key head.
        key: {..., key heads, KPos, Key}.
        value: {..., key heads, KPos, Key}, or with another axis in place of `Key`, of any size.
        settings: further arguments of Levanter's function.

    Returns:
        The axes of `query`, with that of values in place of `Key`.
    """
    of_values = [axis for axis in value.axes if not key.has_axis(axis.name)]
    if not of_values:
        result: NamedArray = levanter_attention(QPos, KPos, Key, query, key, value, mask, **settings)
        return result
    (Value,) = of_values
    Both = Key.resize(max(Key.size, Value.size))
    settings = {"scaling_factor": Key.size**-0.5, **settings}
    query, key, value = (_widen(x, Both) for x in (query, key, value.rename({Value.name: Key.name})))
    result = levanter_attention(QPos, KPos, Both, query, key, value, mask, **settings)
    return result[Key.name, : Value.size].rename({Key.name: Value.name})


def _widen(x: NamedArray, Both: Axis) -> NamedArray:
    """Return `x` with channels of zeros behind its own, so that it has the size of the axis `Both`."""
    missing = Both.size - x.axis_size(Both.name)
    if missing == 0:
        return x
    zeros = hax.zeros([axis.resize(missing) if axis.name == Both.name else axis for axis in x.axes], x.dtype)
    return hax.concatenate(Both.name, [x, zeros])
