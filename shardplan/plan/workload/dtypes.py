"""The element types of parameters and of computations."""

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Type -> bytes per element."""
DTYPES = tuple(ITEMSIZES)
DTYPE_SYNONYMS = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "single": "float32", "float": "float32",
}  # fmt: skip
"""What else users call a type -> its name here."""


def itemsize(dtype: str) -> int:
    """Bytes per element of a type in `DTYPES`.

    >>> itemsize("bfloat16"), itemsize("float32")
    (2, 4)
    """
    return ITEMSIZES[dtype]
