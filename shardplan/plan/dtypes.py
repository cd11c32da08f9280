"""The element types of parameters and of computations."""

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Type -> bytes per element."""
DTYPES = tuple(ITEMSIZES)


def itemsize(dtype: str) -> int:
    """Bytes per element of a type in `DTYPES`."""
    return ITEMSIZES[dtype]
