"""Copies values into memory of another floating-point type; refuses finite values that would become infinite.

A cast makes such a value infinite, or NaN in types without infinity, and a model with one such weight has no logits.
Infinite values and NaN of the source are copied: they are what the checkpoint holds.
"""

from typing import Any

import ml_dtypes
import numpy as np

from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import ConfigError
from shardplan.plan.workload.dtypes import DTYPE_SYNONYMS, DTYPES


def float_dtype(function: str, dtype: Any) -> np.dtype | None:
    """Return the numpy type for a floating-point type, given as a name such as bf16 or as a type; None for None.

    >>> float_dtype("load_pretrained", "bf16")
    dtype(bfloat16)

    Args:
        function: name of the public function that received the argument, for the message.

    Raises:
        ConfigError: the argument is not a floating-point type.
    """
    if dtype is None:
        return None
    try:
        result = np.dtype(DTYPE_SYNONYMS.get(dtype.lower(), dtype.lower()) if isinstance(dtype, str) else dtype)
        ml_dtypes.finfo(result)
        is_float = result.kind != "c"
    except (TypeError, ValueError):  # no type, and one that is not of floating-point numbers
        is_float = False
    if not is_float:
        raise ConfigError(f"{function}: dtype is {dtype!r}; it must be a floating-point type: {', '.join(DTYPES)}")
    return result


def copy_cast(target: np.ndarray, values: np.ndarray, piece: StridedPiece, shape: Shape) -> None:
    """Copy `values` into `target`, an array of the same shape, and cast them if its type differs.

    >>> piece, target = StridedPiece((0,), (2,), "w", 0, (1,)), np.zeros(2, np.float16)
    >>> copy_cast(target, np.array([1.0, 2.0], np.float32), piece, (2,))
    >>> target.tolist()
    [1.0, 2.0]
    >>> copy_cast(target, np.array([1.0, 1e6], np.float32), piece, (2,))
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: w[1] is 1e+06, which float16 cannot hold (at most 65504); use bfloat16 or float32

    Args:
        piece: which elements of a tensor the values are, for the message.
        shape: shape of the tensor.

    Raises:
        ConfigError: a finite value is too large for the type of `target`; the message names its tensor and index.
    """
    with np.errstate(over="ignore"):  # the error below says more than numpy's warning
        if target.ndim and target.strides[-1] != target.itemsize:
            # a cast into memory of another order takes several times as long as a cast and then a copy
            np.copyto(target, values.astype(target.dtype, copy=False))
        else:
            np.copyto(target, values, casting="unsafe")
    if not _fits(values, target):
        lost = np.isfinite(values) & ~np.isfinite(target)
        if lost.any():
            raise _overflow_error(values, target.dtype, np.argwhere(lost)[0], piece, shape)


def _fits(values: np.ndarray, target: np.ndarray) -> bool:
    """Return True if all values certainly stay finite in `target`; False if each value has to be checked."""
    if values.dtype == target.dtype or not values.size:
        return True
    limit = float(ml_dtypes.finfo(target.dtype).max)
    if float(ml_dtypes.finfo(values.dtype).max) <= limit:
        return True
    if values.dtype in (np.float32, np.float64):  # numpy reads these several times as fast as it does 16-bit types
        return bool(values.max() <= limit and values.min() >= -limit)  # a NaN compares as False
    return bool(np.isfinite(target).all())


def _overflow_error(
    values: np.ndarray, dtype: np.dtype, at: np.ndarray, piece: StridedPiece, shape: Shape
) -> ConfigError:
    """Return the error for the element of `values` at index `at`."""
    element = piece.offset + sum(int(i) * k for i, k in zip(at, piece.strides, strict=True))
    index: Any = [int(i) for i in np.unravel_index(element, shape)] if shape else []
    limit = float(ml_dtypes.finfo(dtype).max)
    wider = "float32" if dtype == ml_dtypes.bfloat16 else "bfloat16 or float32"
    value = float(values[tuple(at)])
    return ConfigError(
        f"{piece.tensor}{index} is {value:g}, which {dtype} cannot hold (at most {limit:g}); use {wider}"
    )
