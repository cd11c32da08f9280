"""Tiles of grouped matmuls, against a count of what the kernel's loops compute and read, tile by tile."""

import math

import pytest

from shardplan.experts.tiles import GroupedMatmul, TileShape, buffer_rows, fastest_tiles
from shardplan.hardware.generations import GENERATIONS

SIZES = [100, 700, 110, 370]
"""Rows of each group: ten tiles of 128 rows, in three of which two groups meet."""


def visited_tiles(tile_rows):
    """(group, index of the tile of rows) in the order in which the kernel computes them."""
    visited, end = [], 0
    for group, size in enumerate(SIZES):
        start, end = end, end + size
        visited += [(group, tile) for tile in range(start // tile_rows, math.ceil(end / tile_rows))]
    return visited


def loaded_blocks(blocks):
    """How many of consecutive blocks are loaded: those that differ from the one before."""
    return sum(block != before for block, before in zip(blocks, [None, *blocks], strict=False))


@pytest.mark.parametrize("tiles", [TileShape(128, 512, 256), TileShape(128, 2048, 512), TileShape(128, 1024, 1024)])
def test_bytes_are_those_of_the_kernels_loops(tiles):
    """Columns outermost, then tiles of rows, then the inner dimension; a block that stays is not loaded again."""
    matmul = GroupedMatmul(rows=sum(SIZES), groups=len(SIZES), inner=2048, columns=1024)
    visited = visited_tiles(tiles.rows)
    left, right = [], []
    for column in range(1024 // tiles.columns):
        for group, row in visited:
            for inner in range(2048 // tiles.inner):
                left.append((row, inner))
                right.append((group, inner, column))
    read = loaded_blocks(left) * tiles.rows * tiles.inner + loaded_blocks(right) * tiles.inner * tiles.columns
    written = math.ceil(sum(SIZES) / tiles.rows) * tiles.rows * 1024
    # what stays for the second of two groups that meet in a tile is counted as if it were loaded and written again
    again = (
        (len(visited) - sum(SIZES) / tiles.rows)
        * tiles.rows
        * (1024 + 2048 * (tiles.inner == 2048) * 1024 / tiles.columns)
    )
    assert matmul.bytes(tiles) == 2 * (read + written + again)
    assert matmul.flops(tiles) == 2 * len(visited) * tiles.rows * 2048 * 1024


def test_what_tiles_hold_beyond_the_matrices_is_computed():
    matmul = GroupedMatmul(rows=1024, groups=1, inner=768, columns=1000)
    assert matmul.flops(TileShape(128, 512, 256)) == 2 * 1024 * 1024 * 1024
    assert matmul.flops(TileShape(128, 768, 1000)) == 2 * 1024 * 768 * 1000


@pytest.mark.parametrize("is_gradient", [False, True])
@pytest.mark.parametrize("name", GENERATIONS)
def test_no_possible_tiles_are_faster(name, is_gradient):
    generation = GENERATIONS[name]
    matmul = GroupedMatmul(16384, 8, 2048, 1536, is_matrix_gradient=is_gradient)
    chosen = matmul.seconds(fastest_tiles(matmul, generation), generation)
    for rows in (128, 256, 512):
        for inner in (256, 512, 1024, 2048):
            for columns in (256, 512, 1024, 1536):
                tiles = TileShape(rows, inner, columns)
                fits = matmul.core_bytes(tiles) <= 0.7 * generation.kernel_memory
                assert not fits or matmul.seconds(tiles, generation) >= chosen


def test_buffers_have_whole_tiles():
    assert buffer_rows(1000, 1.25) == 1536 and buffer_rows(2048, 1.0) == 2048
