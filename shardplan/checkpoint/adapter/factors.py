"""Reads the two low-rank matrices of an adapted weight once per process, and caches them as long as they fit.

A weight W {outputs, inputs} becomes W + scaling * B A, where A is {rank, inputs} and B is {outputs, rank}. A weight
that is stored as {inputs, outputs}, and an embedding {vocab, embed}, become W + scaling * (B A)^T.
Source: Hu et al., 2021.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import read_elements
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError

CHUNK = 2**16
"""Number of elements that are computed at a time if they form no box of rows and columns."""


@dataclass(frozen=True)
class Matrices:
    """Both matrices in float32: the change of a weight is `scaling * left @ right`."""

    left: np.ndarray
    """Left factor of the change, {rows, rank}."""
    right: np.ndarray
    """Right factor of the change, {rank, columns}."""
    scaling: float

    @property
    def nbytes(self) -> int:
        """Bytes of both matrices."""
        return self.left.nbytes + self.right.nbytes

    def change(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return elements of `scaling * left @ right`, in float64.

        A library of matrix products chooses the order of sums by the shape of the matrices, which depends on how a
        weight is divided among reads. In float64 that order is far below the rounding to float32 that follows.

        Args:
            rows, columns: the row and the column of every element, in arrays that broadcast.
        """
        shape = np.broadcast_shapes(rows.shape, columns.shape)
        if all(1 in pair for pair in zip(rows.shape, columns.shape, strict=True)):
            left = self.left[rows.ravel()].astype(np.float64) * self.scaling
            box = left @ self.right[:, columns.ravel()].astype(np.float64)
            rank = len(shape)
            order: list[int] = []
            for dimension in range(rank):  # one of each pair has one element
                order += (dimension, rank + dimension)
            return box.reshape(*rows.shape, *columns.shape).transpose(order).reshape(shape)
        all_rows, all_columns = (np.broadcast_to(each, shape).ravel() for each in (rows, columns))
        result = np.empty(all_rows.shape, np.float64)
        for start in range(0, result.size, CHUNK):
            part = slice(start, start + CHUNK)
            left, right = self.left[all_rows[part]], self.right.T[all_columns[part]]
            result[part] = np.einsum("nr,nr->n", left, right, dtype=np.float64) * self.scaling
        return result.reshape(shape)


@dataclass
class _KeptMatrices:
    """Cached matrices, and the lock that a thread holds while it reads them."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    matrices: Matrices | None = None


class MatrixCache:
    """Keeps the most recently used matrices, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _KeptMatrices] = OrderedDict()

    def get(self, factors: "Factors") -> Matrices:
        """Return the matrices of a weight; on a miss one thread reads them, and the others wait for it.

        Raises:
            CheckpointError: the matrices cannot be read, or a number is not finite.
        """
        with self._lock:
            entry = self._entries.setdefault(factors.name, _KeptMatrices())
            self._entries.move_to_end(factors.name)
        with entry.lock:
            if entry.matrices is None:
                entry.matrices = factors.read()
            matrices = entry.matrices
        with self._lock:
            while len(self._entries) > 1 and self._kept_bytes() > self._max_bytes:
                self._entries.popitem(last=False)
        return matrices

    def _kept_bytes(self) -> int:
        return sum(entry.matrices.nbytes for entry in self._entries.values() if entry.matrices is not None)


@dataclass(frozen=True, eq=False)
class Factors:
    """The two matrices of a weight, not yet read."""

    name: str
    """Name of the weight in the adapter."""
    a: Tensor
    """The adapter's matrix A, {rank, inputs}."""
    b: Tensor
    """The adapter's matrix B, {outputs, rank}."""
    a_name: str
    b_name: str
    scaling: float
    is_transposed: bool
    """Whether the weight is stored as {inputs, outputs}."""
    cache: MatrixCache

    @property
    def shape(self) -> Shape:
        """Shape of the weight."""
        shape = self.b.shape[0], self.a.shape[1]
        return shape[::-1] if self.is_transposed else shape

    def matrices(self) -> Matrices:
        """Return both matrices; see `MatrixCache.get`."""
        return self.cache.get(self)

    def read(self) -> Matrices:
        """Read both matrices.

        Raises:
            CheckpointError: the matrices cannot be read, or a number is not finite.
        """
        a, b = (
            read_elements(tensor, 0, tensor.shape[0] * tensor.shape[1]).astype(np.float32).reshape(tensor.shape)
            for tensor in (self.a, self.b)
        )
        for name, tensor, values in ((self.a_name, self.a, a), (self.b_name, self.b, b)):
            if not np.isfinite(values).all():
                raise CheckpointError(
                    f"{tensor.file.name}: {name} has a number that is not finite; download the adapter again, or train "
                    "it again"
                )
        left, right = (a.T, b.T) if self.is_transposed else (b, a)
        return Matrices(left, right, self.scaling)

    def changes_nothing(self) -> bool:
        """Return whether one of the two matrices is zero, as before any training."""
        matrices = self.matrices()
        return not matrices.left.any() or not matrices.right.any()
