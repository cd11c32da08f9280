"""The blocks of a parameter whose elements share a scale, if its checkpoint stores codes.

The rules of a parameter move blocks of tensors into it: transposed, divided among heads, and cut by slices. Along each
dimension of the parameter, elements from a multiple of the block's length on share a scale. The length follows from the
rule by arithmetic; it is the length of the tensor's blocks, or a divisor of it where the parameter cuts blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.decoder.names import Rule, Shape, StoredTensor, evaluate
from shardplan.model.huggingface.quantization import ByteCodes


@dataclass(frozen=True)
class Blocked:
    """The shape of an array, and the lengths of its blocks that share a scale."""

    shape: Shape
    blocks: Shape


def blocks_of_rule(rule: Rule, codes: ByteCodes, shape: Shape) -> Shape:
    """Return the lengths of a parameter's blocks that share a scale.

    Args:
        rule: the loading rule of the parameter.
        codes: how its tensors are stored.
        shape: shape of the parameter.

    >>> weight = StoredTensor("q_proj.weight", (8 * 192, 512))
    >>> blocks_of_rule(weight, ByteCodes("fp8", (), "float8_e4m3fn", (128, 128)), (8, 192, 512))
    (1, 64, 128)
    """

    def read(stored: StoredTensor) -> Blocked:
        return Blocked(stored.shape, _blocks_of_tensor(stored.shape, codes))

    return BLOCKS.reshape(evaluate(rule, read, BLOCKS), shape).blocks


def _blocks_of_tensor(shape: Shape, codes: ByteCodes) -> Shape:
    """Return the lengths of a tensor's blocks that share a scale; without a block size, each row has one scale."""
    *others, rows, columns = shape
    if codes.block is None:
        return (*[1] * len(others), 1, columns)
    return (*[1] * len(others), math.gcd(codes.block[0], rows), math.gcd(codes.block[1], columns))


class _BlockLengths:
    """Applies loading rules to lengths of blocks, in place of arrays."""

    def reshape(self, value: Blocked, shape: Shape) -> Blocked:
        blocks: list[int] = []
        for old, new in _runs(value.shape, shape):
            length = _flat_length(value.shape[old], value.blocks[old])
            blocks += _split_length(length, shape[new])
        return Blocked(shape, tuple(blocks))

    def transpose(self, value: Blocked, permutation: Sequence[int]) -> Blocked:
        return Blocked(tuple(value.shape[i] for i in permutation), tuple(value.blocks[i] for i in permutation))

    def slice(self, value: Blocked, dimension: int, start: int, stop: int) -> Blocked:
        shape, blocks = list(value.shape), list(value.blocks)
        shape[dimension] = stop - start
        # a slice that begins or ends within a block leaves only shorter ones
        blocks[dimension] = math.gcd(blocks[dimension], start, stop - start)
        return Blocked(tuple(shape), tuple(blocks))

    def concatenate(self, values: Sequence[Blocked], dimension: int) -> Blocked:
        shape = list(values[0].shape)
        shape[dimension] = sum(value.shape[dimension] for value in values)
        return Blocked(tuple(shape), _common(values))

    def stack(self, values: Sequence[Blocked]) -> Blocked:
        return Blocked((len(values), *values[0].shape), (1, *_common(values)))


BLOCKS = _BlockLengths()


def _common(values: Sequence[Blocked]) -> Shape:
    """Return the greatest common divisor of all values' block lengths, for each dimension."""
    return tuple(math.gcd(*lengths) for lengths in zip(*(value.blocks for value in values), strict=True))


def _runs(old: Shape, new: Shape) -> list[tuple[slice, slice]]:
    """Match the dimensions of two shapes in the shortest runs whose sizes have the same product."""
    runs = []
    i = j = 0
    while i < len(old) or j < len(new):
        first = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (sizes := (math.prod(old[first[0] : i]), math.prod(new[first[1] : j])))[0] != sizes[1]:
            i, j = (i + 1, j) if sizes[0] < sizes[1] else (i, j + 1)
        runs.append((slice(first[0], i), slice(first[1], j)))
    return runs


def _flat_length(shape: Shape, blocks: Shape) -> int:
    """Return the length of runs of row-major elements that share a scale; each starts at a multiple of the length."""
    length = 1
    for n, block in zip(reversed(shape), reversed(blocks), strict=True):
        length *= block
        if block < n:  # elements of the next index of an outer dimension have other scales
            break
    return length


def _split_length(length: int, shape: Shape) -> list[int]:
    """Return the lengths of blocks along each dimension of `shape`, for blocks of `length` row-major elements.

    >>> _split_length(128, (8, 192)), _split_length(128, (4, 32))
    ([1, 64], [4, 32])
    """
    blocks = []
    for n in reversed(shape):
        block = math.gcd(length, n)
        blocks.append(block)
        length = length // block if block == n else 1
    return blocks[::-1]
