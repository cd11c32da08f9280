"""Converts Python values to the values that a configuration holds: numbers of NumPy and JAX, dtypes, paths, tuples.

They are recognized by their attributes, because numpy and JAX take long to import.
"""

import os
from typing import Any


def plain_value(value: Any) -> Any:
    """Return a value as YAML would hold it: `np.int64(8)` as 8, `jnp.bfloat16` as "bfloat16", a tuple as a list."""
    match value:
        case str():
            return value if type(value) is str else str(value)
        case bool() | int() | float() | None:
            return value
        case os.PathLike():
            return os.fspath(value)
        case tuple() | list() | set() | frozenset():
            return [plain_value(each) for each in value]
        case type():
            return value.__name__
        case _:
            return _number_or_dtype(value)


def _number_or_dtype(value: Any) -> Any:
    """Convert a number of NumPy or JAX to a Python number, and a dtype of NumPy or PyTorch to its name."""
    if hasattr(value, "shape") and hasattr(value, "tolist"):
        return value.tolist()
    if type(value).__name__ == "dtype":  # torch.bfloat16
        return str(value).rpartition(".")[2]
    if hasattr(value, "itemsize") and isinstance(getattr(value, "name", None), str):  # np.dtype("float32")
        return value.name
    return value
