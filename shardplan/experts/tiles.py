"""Chooses the tiles of grouped matmuls: the rows, inner elements and columns that a kernel multiplies at a time. Pure.

XLA's kernel for `ragged_dot` goes over tiles of columns, within each over tiles of rows, and within each of these over
the inner dimension; that for the gradient of the matrices goes over their tiles, and within each over tiles of rows. A
tile of rows in which groups meet is computed once for each of them, so that tiles of many rows cost FLOPs where groups
are small; tiles of few rows or columns read the other operand more often. The fastest tiles are those with the shortest
roofline among those that fit in the memory of the core.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from shardplan.hardware.generations import Generation

BUFFER_MULTIPLE = 512
"""Divisor of the rows of buffers, so that every possible number of tile rows divides them."""
ROWS = (128, 256, 512)
"""Possible numbers of rows in a tile."""
SIDES = (256, 512, 1024, 2048)
"""Possible inner elements and columns of a tile, besides the whole dimension."""
SUM_BYTES = 4
"""Bytes per element of the accumulated sums."""
USABLE_PART = 0.7
"""Fraction of the kernel's memory that tiles may fill; the compiler keeps its own values in the rest, up to a quarter
on v5p (tests/compiler/test_kernel_tiles.py)."""


class TileShape(NamedTuple):
    """The shape of a tile."""

    rows: int
    inner: int
    columns: int

    def __str__(self) -> str:
        """Format the tile as XLA's attribute `ragged_dot_tiling`."""
        return f"{self.rows},{self.inner},{self.columns}"

    @classmethod
    def parse(cls, text: str) -> "TileShape":
        """Parse the result of `str`.

        >>> TileShape.parse("512,1024,128").columns
        128
        """
        rows, inner, columns = map(int, text.split(","))
        return cls(rows, inner, columns)


@dataclass(frozen=True)
class GroupedMatmul:
    """The sizes of one kernel call: [rows, inner] x [groups, inner, columns], or the gradient of these matrices."""

    rows: float
    """Number of rows that are used."""
    groups: float
    inner: int
    columns: int
    itemsize: int = 2
    """Bytes of an element, the same in all arrays."""
    is_matrix_gradient: bool = False
    """Whether the call computes [inner, rows] x [rows, columns] for the rows of each group."""

    def row_tiles(self, tiles: TileShape) -> float:
        """Return the number of computed tiles of rows: rows / tile, plus one per group that begins within a tile."""
        return max(self.rows / tiles.rows, 1.0) + self.groups - 1

    def flops(self, tiles: TileShape) -> float:
        """Return the FLOPs of all computed tiles, including rows of other groups and padding of the matrices."""
        inner = math.ceil(self.inner / tiles.inner) * tiles.inner
        columns = math.ceil(self.columns / tiles.columns) * tiles.columns
        return 2 * self.row_tiles(tiles) * tiles.rows * inner * columns

    def bytes(self, tiles: TileShape) -> float:
        """Return the bytes that are read from and written to HBM."""
        rows = self.row_tiles(tiles) * tiles.rows
        inputs, outputs, matrices = rows * self.inner, rows * self.columns, self.groups * self.inner * self.columns
        inner_tiles, column_tiles = math.ceil(self.inner / tiles.inner), math.ceil(self.columns / tiles.columns)
        if self.is_matrix_gradient:
            elements = column_tiles * inputs + inner_tiles * outputs + matrices
        else:
            # a tile with all inner elements of a matrix stays while the tiles of rows are of the same group
            reads_of_matrices = 1.0 if inner_tiles == 1 else self.row_tiles(tiles) / self.groups
            elements = column_tiles * inputs + reads_of_matrices * matrices + outputs
        return self.itemsize * elements

    def core_bytes(self, tiles: TileShape) -> float:
        """Return the bytes in the core's memory: two tiles of each array, and the sums."""
        rows, inner, columns = tiles
        summed = inner * columns if self.is_matrix_gradient else rows * columns
        return 2 * self.itemsize * (rows * inner + inner * columns + rows * columns) + SUM_BYTES * summed

    def seconds(self, tiles: TileShape, generation: Generation) -> float:
        """Return max(FLOPs / peak, bytes / HBM bandwidth), in seconds."""
        return max(self.flops(tiles) / generation.flops, self.bytes(tiles) / generation.hbm_bandwidth)


@lru_cache(maxsize=4096)
def fastest_tiles(matmul: GroupedMatmul, generation: Generation) -> TileShape:
    """Return the fastest tiles that fit in the core's memory; among equally fast ones, the largest.

    >>> from shardplan.hardware.generations import GENERATIONS
    >>> of_mixtral = GroupedMatmul(rows=32768, groups=1, inner=4096, columns=14336)
    >>> print(fastest_tiles(of_mixtral, GENERATIONS["v5p"]))
    512,1024,1024
    """
    limit = USABLE_PART * generation.kernel_memory
    fitting = [tiles for tiles in _possible_tiles(matmul) if matmul.core_bytes(tiles) <= limit]
    return min(fitting, key=lambda tiles: (matmul.seconds(tiles, generation), -math.prod(tiles)))


def _possible_tiles(matmul: GroupedMatmul) -> Iterator[TileShape]:
    for shape in product(ROWS, _possible_sides(matmul.inner), _possible_sides(matmul.columns)):
        yield TileShape(*shape)


def _possible_sides(size: int) -> list[int]:
    """Return the possible sides of tiles along a dimension: smaller ones, and the whole dimension."""
    return [*(side for side in SIDES if side < size), size]


def buffer_rows(balanced_rows: float, factor: float) -> int:
    """Return the rows of a receive buffer: `factor` times a balanced load, as a multiple of `BUFFER_MULTIPLE`.

    >>> buffer_rows(balanced_rows=1000, factor=1.25)
    1536
    """
    return math.ceil(balanced_rows * factor / BUFFER_MULTIPLE) * BUFFER_MULTIPLE
