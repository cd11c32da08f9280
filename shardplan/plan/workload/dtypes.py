"""The element types of parameters and of computations."""

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Type -> bytes per element."""
DTYPES = tuple(ITEMSIZES)
DTYPE_SYNONYMS = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "single": "float32", "float": "float32",
}  # fmt: skip
"""Other names of a type -> shardplan's name."""


def itemsize(dtype: str) -> int:
    """Return the bytes per element of a type in `DTYPES`.

    >>> itemsize("bfloat16"), itemsize("float32")
    (2, 4)
    """
    return ITEMSIZES[dtype]
