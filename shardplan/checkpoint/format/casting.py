"""Copy values into memory of another floating-point type, and refuse those that the type is too small for.

A cast makes such a value infinite, or NaN in types without infinity, and a model with one such weight has no logits.
Infinite values and NaN of the source are copied: they are what the checkpoint holds.
"""

from typing import Any

import ml_dtypes
import numpy as np

from shardplan.checkpoint.mapping.views import Piece, Shape
from shardplan.errors import ConfigError


def copy_cast(target: np.ndarray, values: np.ndarray, piece: Piece, shape: Shape) -> None:
    """Copy `values` into `target`, which has the same shape and possibly another type.

    Args:
        piece: the elements of a tensor that the values are, for the message.
        shape: that of the tensor.

    Raises:
        ConfigError: a finite value is too large for the type of `target`; the message names its tensor and index.
    """
    with np.errstate(over="ignore"):  # the error below says more than numpy's warning
        np.copyto(target, values, casting="unsafe")
    if not _fits(values, target):
        lost = np.isfinite(values) & ~np.isfinite(target)
        if lost.any():
            raise _overflow_error(values, target.dtype, np.argwhere(lost)[0], piece, shape)


def _fits(values: np.ndarray, target: np.ndarray) -> bool:
    """Whether all values are known to be finite in `target`; False if both must be compared one by one."""
    if values.dtype == target.dtype or not values.size:
        return True
    limit = float(ml_dtypes.finfo(target.dtype).max)
    if float(ml_dtypes.finfo(values.dtype).max) <= limit:
        return True
    if values.dtype in (np.float32, np.float64):  # numpy reads these several times as fast as it does 16-bit types
        return bool(values.max() <= limit and values.min() >= -limit)  # a NaN compares as False
    return bool(np.isfinite(target).all())


def _overflow_error(values: np.ndarray, dtype: np.dtype, at: np.ndarray, piece: Piece, shape: Shape) -> ConfigError:
    """Return the error for the element `at` of `values`."""
    element = piece.offset + sum(int(i) * k for i, k in zip(at, piece.strides, strict=True))
    index: Any = [int(i) for i in np.unravel_index(element, shape)] if shape else []
    limit = float(ml_dtypes.finfo(dtype).max)
    wider = "float32" if dtype == ml_dtypes.bfloat16 else "bfloat16 or float32"
    value = float(values[tuple(at)])
    return ConfigError(
        f"{piece.tensor}{index} is {value:g}, which {dtype} cannot hold (at most {limit:g}); use {wider}"
    )
