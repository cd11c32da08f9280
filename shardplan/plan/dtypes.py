"""The element types of parameters and of computations."""

import numpy as np
from ml_dtypes import bfloat16

DTYPES = ("bfloat16", "float16", "float32")


def itemsize(dtype: str) -> int:
    """Bytes per element of a type in `DTYPES`."""
    return np.dtype(bfloat16 if dtype == "bfloat16" else dtype).itemsize
