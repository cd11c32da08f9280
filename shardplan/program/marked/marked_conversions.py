"""Marks conversions of kept weights while a program is traced, so that each is one operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
from haliax import NamedArray
from jax.core import ShapedArray
from jax.extend.core import Primitive

from shardplan.model.dtypes.kept_weights import KeptWeight, convert_weight

CONVERSION = "shardplan_conversion"
"""Name of the primitive that decodes codes with their scales, in the order of the codes."""

_conversion_p = Primitive(CONVERSION)


@contextmanager
def mark_conversions() -> Iterator[None]:
    """Trace every conversion of a kept weight as one operation."""
    with convert_weight.replaced_by(_mark):
        yield


def _mark(weight: KeptWeight, dtype: Any) -> NamedArray:
    numbers = _conversion_p.bind(weight.codes.array, weight.scales.array, dtype=jnp.dtype(dtype))
    return NamedArray(numbers, weight.codes.axes)


_conversion_p.def_abstract_eval(lambda codes, scales, dtype: ShapedArray(codes.shape, dtype))
