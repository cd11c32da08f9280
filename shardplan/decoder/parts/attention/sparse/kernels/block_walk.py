"""The forward kernel's walk: a tile of queries visits the blocks of its table, step by step.

Keys and values stay in HBM. A step copies a few blocks of them to VMEM, while the step before is computed; the last
step of a tile starts the first copies of the next tile, so that no tile waits for memory. Steps start their copies
without any condition, because the compiler overlaps instructions up to the next branch only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels.block_tables import BlockTables
from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    LANES,
    divide,
    indices,
    quotient,
    remainder,
)
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles
from shardplan.decoder.parts.attention.sparse.selection_blocks import SelectionBlocks

BLOCKS_PER_STEP = 16
"""Maximum number of blocks per step, whose copies and additions are unrolled."""
CORES = 2
"""Number of parts of the tiles, which the cores of a chip can compute at the same time."""


@dataclass(frozen=True)
class WalkSizes:
    """Static sizes of a forward kernel that visits the blocks of each tile's table, a few blocks per step."""

    tiles: QueryTiles
    selection: SelectionBlocks
    """The blocks of keys; the compressed branch has no forced blocks."""
    scale: float
    """Factor of the scores."""
    keys_per_step: int
    """Maximum number of keys per step."""
    stride: int = 1
    """Distance of visibility: key i is visible from position i * stride + lag on."""
    lag: int = 0

    @property
    def block(self) -> int:
        """Number of keys per block."""
        return self.selection.size

    @property
    def unit(self) -> int:
        """Number of blocks per step."""
        return max(1, min(BLOCKS_PER_STEP, self.keys_per_step // self.block))

    @property
    def keys(self) -> int:
        """Number of keys per step."""
        return self.unit * self.block

    @property
    def parts(self) -> list[range]:
        """Ranges of a step's blocks, each of which fills the contraction of a matrix unit."""
        size = 1
        while 2 * size * self.block <= LANES:
            size *= 2
        return [range(i, min(i + size, self.unit)) for i in range(0, self.unit, size)]


class TileStep(NamedTuple):
    """A step of the kernel's grid, which computes one tile."""

    tile: jax.Array
    is_first: jax.Array
    """Whether the tile is the first of its core, so that no earlier tile has started its first copies."""
    has_next: jax.Array

    @classmethod
    def current(cls) -> "TileStep":
        """Return the current step; call it outside of loops and conditions, where the interpreter knows the step."""
        i, tiles = pl.program_id(1), pl.num_programs(1)
        return cls(pl.program_id(0) * tiles + i, i == 0, i + 1 < tiles)


@dataclass(frozen=True)
class BlockWalk:
    """Visits the blocks in the table of one tile, a few per step, inside a kernel."""

    sizes: WalkSizes
    step: TileStep
    first_positions: Any
    """Position of each tile's first query, int32[tiles of a sequence], in scalar memory; further references follow in
    the order of `in_specs`."""
    blocks: Any
    next_blocks: Any
    members: Any
    keys: Any
    values: Any
    key_buffer: Any
    """Buffer of keys, [2, key of the step, d]; further references follow in the order of `scratch`."""
    value_buffer: Any
    copied: Any
    slot: Any

    def run(self, compute: Callable[[jax.Array, jax.Array], None]) -> None:
        """Call `compute(step, buffer slot)` for each step of the tile, when its keys and values are in the buffers."""
        unit, size = self.sizes.unit, self.members.shape[-1]
        # members are 0 after the last block
        used = [(self.members[0, 0, i] != 0).astype(jnp.int32) for i in range(unit, size, unit)]
        steps = sum(used, jnp.int32(1))

        @pl.when(self.step.is_first)
        def start_first() -> None:
            self.slot[0] = 0
            for i in range(unit):
                self._start(self.blocks[0, 0, i], self.step.tile, 0, i)

        first_slot = self.slot[0]

        def take_step(step: jax.Array, _: jax.Array) -> jax.Array:
            slot = remainder(first_slot + step, 2)
            self._wait(slot)
            compute(step, slot)
            self._start_next(step, step + 1 == steps, 1 - slot)
            return jnp.int32(0)

        jax.lax.fori_loop(0, steps, take_step, jnp.int32(0))
        self.slot[0] = remainder(first_slot + steps, 2)

        @pl.when(~self.step.has_next)
        def wait_for_last() -> None:
            self._wait(self.slot[0])

    def visible_rows(self, step: jax.Array, i: int) -> jax.Array:
        """Return bool[key, row] for block i of a step: whether the row's query selected it and may attend to a key."""
        sizes, entry = self.sizes, step * self.sizes.unit + i
        query_of_row = divide(indices((1, sizes.tiles.rows), 1), sizes.tiles.heads)
        is_member = (self.members[0, 0, entry] & jnp.left_shift(1, query_of_row)) != 0
        position = self._first_position() - self.blocks[0, 0, entry] * sizes.block + query_of_row
        return indices((sizes.block, 1), 0) <= jnp.where(is_member, position, -1)

    def is_free(self, step: jax.Array, i: int) -> jax.Array:
        """Return 1.0 if block i of a step is free (not forced) for the tile's queries, else 0.0."""
        block = self.blocks[0, 0, step * self.sizes.unit + i]
        own = quotient(self._first_position(), self.sizes.block)
        return ((block >= self.sizes.selection.initial) & (block <= own - self.sizes.selection.local)).astype(
            jnp.float32
        )

    def _first_position(self) -> jax.Array:
        position: jax.Array = self.first_positions[remainder(self.step.tile, self.sizes.tiles.per_sequence)]
        return position

    def _start_next(self, step: jax.Array, is_last: jax.Array, slot: jax.Array) -> None:
        """Start copying the next step's blocks to `slot`, or the first blocks of the next tile after the last step.

        After a core's last tile it starts copies that nothing reads: a condition would keep the compiler from
        overlapping copies and computation.
        """
        unit, size = self.sizes.unit, self.blocks.shape[-1]
        tile = self.step.tile + (is_last & self.step.has_next).astype(jnp.int32)
        for i in range(unit):
            of_tile = self.blocks[0, 0, jnp.minimum((step + 1) * unit + i, size - 1)]
            self._start(jnp.where(is_last, self.next_blocks[0, 0, i], of_tile), tile, slot, i)

    def _start(self, block: jax.Array, tile: jax.Array, slot: jax.Array | int, i: int) -> None:
        """Start copying one block's keys and values from HBM to position i of the buffers in `slot`."""
        sizes, head = self.sizes, quotient(tile, self.sizes.tiles.per_sequence)
        source = pl.ds(pl.multiple_of(block * sizes.block, sizes.block), sizes.block)
        target = pl.ds(i * sizes.block, sizes.block)
        for number, (array, buffer) in enumerate(((self.keys, self.key_buffer), (self.values, self.value_buffer))):
            pltpu.make_async_copy(array.at[head, source], buffer.at[slot, target], self.copied.at[slot, number]).start()

    def _wait(self, slot: jax.Array) -> None:
        for number, buffer in enumerate((self.key_buffer, self.value_buffer)):
            # waits for as many bytes as the buffer has, which all copies of the step have together
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], self.copied.at[slot, number]).wait()


def in_specs(tables: BlockTables) -> list[pl.BlockSpec]:
    """Return the block specs of the tile's blocks, the next tile's blocks, members, keys and values.

    With 8 tiles, core 1 computes tiles 4 to 7. Its step 2 reads the tables of tile 6, and the blocks of tile 7:

    >>> specs = in_specs(BlockTables(blocks=jnp.zeros((8, 1, 16)), members=jnp.zeros((8, 1, 16))))
    >>> [spec.index_map(1, 2, None)[0].item() for spec in specs[:3]]
    [6, 7, 6]
    """
    tiles, size = len(tables.blocks), tables.blocks.shape[-1]

    def of_tile(width: int, distance: int = 0) -> pl.BlockSpec:
        def index(core: jax.Array, i: jax.Array, _: Any) -> tuple[jax.Array, int, int]:
            return jnp.minimum(core * (tiles // CORES) + i + distance, tiles - 1), 0, 0

        return pl.BlockSpec((1, 1, width), index, memory_space=pltpu.SMEM)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return [of_tile(size), of_tile(size, 1), of_tile(size), in_hbm, in_hbm]


def arguments(tables: BlockTables, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays for `in_specs`; keys and values are [b * g, s, d] of complete blocks.

    >>> tables = BlockTables(blocks=jnp.zeros((8, 1, 16)), members=jnp.zeros((8, 1, 16)))
    >>> [x is tables.blocks for x in arguments(tables, jnp.zeros((2, 64, 8)), jnp.zeros((2, 64, 8)))]
    [True, True, False, False, False]
    """
    return tables.blocks, tables.blocks, tables.members, keys, values


def scratch(sizes: WalkSizes, keys: jax.Array, values: jax.Array) -> list[Any]:
    """Return the scratch shapes: buffers of keys and values, semaphores of their copies, and the slot of the next step.

    >>> sizes = WalkSizes(QueryTiles.of(64, 8192, 16), SelectionBlocks(64), scale=0.1, keys_per_step=512)
    >>> keys, values = (jax.ShapeDtypeStruct((4, 8192, size), jnp.bfloat16) for size in (128, 64))
    >>> [each.shape for each in scratch(sizes, keys, values)]
    [(2, 512, 128), (2, 512, 64), (2, 2), (1,)]
    """
    return [
        pltpu.VMEM((2, sizes.keys, keys.shape[-1]), keys.dtype),
        pltpu.VMEM((2, sizes.keys, values.shape[-1]), values.dtype),
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.SMEM((1,), jnp.int32),
    ]


def rows_spec(rows: int, size: int, tiles: int) -> pl.BlockSpec:
    """Return the block spec of an array [tile, rows, size], with one tile per grid step.

    >>> spec = rows_spec(rows=128, size=64, tiles=8)
    >>> spec.block_shape, spec.index_map(1, 2, None)
    ((1, 128, 64), (6, 0, 0))
    """
    return pl.BlockSpec((1, rows, size), lambda core, i, _: (core * (tiles // CORES) + i, 0, 0))


def grid(tables: BlockTables) -> tuple[int, int]:
    """Return the kernel's grid: the number of cores, and the number of tiles per core.

    >>> grid(BlockTables(blocks=jnp.zeros((8, 1, 16)), members=jnp.zeros((8, 1, 16))))
    (2, 4)
    """
    return CORES, len(tables.blocks) // CORES
