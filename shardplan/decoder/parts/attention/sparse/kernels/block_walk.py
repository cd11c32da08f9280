"""The walk of a tile of queries over the blocks of its table, shared by the forward kernel and the kernel of dq.

Keys and values stay in HBM. A step copies a few blocks of them to VMEM, while the step before is computed; the last
step of a tile starts the first copies of the next tile, so that no tile waits for memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels.block_tables import BlockTables
from shardplan.decoder.parts.attention.sparse.kernels.launch import divide, indices, quotient, remainder
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles
from shardplan.decoder.parts.attention.sparse.selection_blocks import SelectionBlocks

KEYS_PER_STEP = 512
"""Most keys of a step: as many as keep the matrix unit busy while the next ones are copied."""
BLOCKS_PER_STEP = 8
"""Most blocks of a step: each takes two copies, whose instructions are unrolled."""
CORES = 2
"""Parts of the tiles that the cores of a chip can compute at the same time."""


@dataclass(frozen=True)
class WalkSizes:
    """Static sizes of a walk."""

    tiles: QueryTiles
    selection: SelectionBlocks
    scale: float
    """Factor of scores."""

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.selection.size

    @property
    def unit(self) -> int:
        """Blocks of a step."""
        return max(1, min(BLOCKS_PER_STEP, KEYS_PER_STEP // self.block))

    @property
    def keys(self) -> int:
        """Keys of a step."""
        return self.unit * self.block

    @property
    def query_of_row(self) -> jax.Array:
        """int32[row, 1]: the number of the query in its tile."""
        return divide(indices((self.tiles.rows, 1), 0), self.tiles.heads)


class TileStep(NamedTuple):
    """A step of the kernel's grid, which computes one tile."""

    tile: jax.Array
    is_first: jax.Array
    """Whether it starts its own first copies, because it is the first of its core."""
    has_next: jax.Array

    @classmethod
    def current(cls) -> "TileStep":
        """Return the step; call it outside of loops and conditions, within which the interpreter does not know it."""
        i, tiles = pl.program_id(1), pl.num_programs(1)
        return cls(pl.program_id(0) * tiles + i, i == 0, i + 1 < tiles)


@dataclass(frozen=True)
class BlockWalk:
    """The walk of one tile, inside a kernel."""

    sizes: WalkSizes
    step: TileStep
    first_positions: Any
    """int32[tiles of a sequence], in scalar memory; the other references follow in the order of `in_specs`."""
    blocks: Any
    next_blocks: Any
    members: Any
    keys: Any
    values: Any
    key_buffer: Any
    """[2, key of the step, d]; the other references follow in the order of `scratch`."""
    value_buffer: Any
    copied: Any
    slot: Any

    def run(self, compute: Callable[[jax.Array, jax.Array, jax.Array], None]) -> None:
        """Call `compute(step, keys [k, d], values [k, d])` for all steps of the tile, at least one."""
        tile, unit, size = self.step.tile, self.sizes.unit, self.members.shape[-1]
        # members are 0 after the last block
        used = [(self.members[0, 0, i] != 0).astype(jnp.int32) for i in range(unit, size, unit)]
        steps = sum(used, jnp.int32(1))

        @pl.when(self.step.is_first)
        def start_first() -> None:
            self.slot[0] = 0
            self._start(self.blocks, 0, tile, 0)

        first_slot = self.slot[0]

        def take_step(step: jax.Array, _: jax.Array) -> jax.Array:
            slot, is_last = remainder(first_slot + step, 2), step + 1 == steps

            @pl.when(~is_last)
            def start_next_step() -> None:
                self._start(self.blocks, step + 1, tile, 1 - slot)

            @pl.when(is_last & self.step.has_next)
            def start_next_tile() -> None:
                self._start(self.next_blocks, 0, tile + 1, 1 - slot)

            for number, buffer in enumerate((self.key_buffer, self.value_buffer)):
                # waits for as many bytes as the buffer has, which all copies of the step have together
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], self.copied.at[slot, number]).wait()
            compute(step, self.key_buffer[slot], self.value_buffer[slot])
            return jnp.int32(0)

        jax.lax.fori_loop(0, steps, take_step, jnp.int32(0))
        self.slot[0] = remainder(first_slot + steps, 2)

    def is_visible(self, step: jax.Array) -> jax.Array:
        """Return bool[row, key]: whether the row's query has selected the key's block and is not before the key."""
        sizes = self.sizes
        lanes = indices((1, sizes.keys), 1)
        block_of_lane = divide(lanes, sizes.block)
        starts, members = jnp.zeros_like(lanes), jnp.zeros_like(lanes)
        for i in range(sizes.unit):
            is_block, entry = block_of_lane == i, step * sizes.unit + i
            # minus the lane's offset of the block, so that starts + lanes are tokens
            starts = jnp.where(is_block, (self.blocks[0, 0, entry] - i) * sizes.block, starts)
            members = jnp.where(is_block, self.members[0, 0, entry], members)
        bits = jnp.left_shift(1, sizes.query_of_row)
        return ((members & bits) != 0) & (starts + lanes <= self._first_position() + sizes.query_of_row)

    def is_free(self, step: jax.Array) -> jax.Array:
        """Return float32[1, key]: 1 for keys whose block is not forced for the queries of the tile, else 0."""
        sizes = self.sizes
        own = quotient(self._first_position(), sizes.block)
        block_of_lane = divide(indices((1, sizes.keys), 1), sizes.block)
        result = jnp.zeros(block_of_lane.shape, jnp.float32)
        for i in range(sizes.unit):
            block = self.blocks[0, 0, step * sizes.unit + i]
            is_free = (block >= sizes.selection.initial) & (block <= own - sizes.selection.local)
            result = jnp.where(block_of_lane == i, is_free.astype(jnp.float32), result)
        return result

    def _first_position(self) -> jax.Array:
        position: jax.Array = self.first_positions[remainder(self.step.tile, self.sizes.tiles.per_sequence)]
        return position

    def _start(self, blocks: Any, step: jax.Array | int, tile: jax.Array, slot: jax.Array | int) -> None:
        """Start the copies of a step's blocks of keys and of values."""
        sizes, head = self.sizes, quotient(tile, self.sizes.tiles.per_sequence)
        for i in range(sizes.unit):
            block = blocks[0, 0, step * sizes.unit + i]
            source = pl.ds(pl.multiple_of(block * sizes.block, sizes.block), sizes.block)
            target = pl.ds(i * sizes.block, sizes.block)
            for number, (array, buffer) in enumerate(((self.keys, self.key_buffer), (self.values, self.value_buffer))):
                pltpu.make_async_copy(
                    array.at[head, source], buffer.at[slot, target], self.copied.at[slot, number]
                ).start()


def in_specs(tables: BlockTables) -> list[pl.BlockSpec]:
    """Return the specs of blocks, the next tile's blocks, members, keys and values."""
    tiles, size = len(tables.blocks), tables.blocks.shape[-1]

    def of_tile(width: int, distance: int = 0) -> pl.BlockSpec:
        def index(core: jax.Array, i: jax.Array, _: Any) -> tuple[jax.Array, int, int]:
            return jnp.minimum(core * (tiles // CORES) + i + distance, tiles - 1), 0, 0

        return pl.BlockSpec((1, 1, width), index, memory_space=pltpu.SMEM)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return [of_tile(size), of_tile(size, 1), of_tile(size), in_hbm, in_hbm]


def arguments(tables: BlockTables, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays of `in_specs`; keys and values are [b * g, s, d] of complete blocks."""
    return tables.blocks, tables.blocks, tables.members, keys, values


def scratch(sizes: WalkSizes, keys: jax.Array, values: jax.Array) -> list[Any]:
    """Return the buffers of keys and values, the semaphores of their copies, and the slot of the next step."""
    return [
        pltpu.VMEM((2, sizes.keys, keys.shape[-1]), keys.dtype),
        pltpu.VMEM((2, sizes.keys, values.shape[-1]), values.dtype),
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.SMEM((1,), jnp.int32),
    ]


def rows_spec(rows: int, size: int, tiles: int) -> pl.BlockSpec:
    """Return the spec of an array [tile, rows, size]: every grid step has its own tile."""
    return pl.BlockSpec((1, rows, size), lambda core, i, _: (core * (tiles // CORES) + i, 0, 0))


def grid(tables: BlockTables) -> tuple[int, int]:
    """Return the grid of a walk: a part of the tiles per core, and the tiles of a part."""
    return CORES, len(tables.blocks) // CORES
