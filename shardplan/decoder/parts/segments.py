"""Divides the layers of a decoder into segments, each of which repeats a block of layers. Pure.

A segment is one loop of the program, so compile time grows with the layers of its block, not with the repetitions. In
many families all layers are equal: one segment repeats one layer. Gemma 3 27B has 62 layers, and every sixth attends to
all positions: one segment repeats a block of 6 layers 10 times, and another one repeats 1 layer 2 times. The division
of the first n layers is found from the divisions of fewer layers (dynamic programming).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardplan.decoder.parts.block import LayerConfig

MAX_BLOCK = 16
"""Largest number of layers in a block."""


@dataclass(frozen=True)
class Segment:
    """A block of consecutive layers, and how often a loop repeats it."""

    layers: tuple[LayerConfig, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        """Number of layers in all repetitions."""
        return len(self.layers) * self.repeats


def number_layers(segments: Sequence[Segment], is_meant: Callable[[LayerConfig], bool]) -> list[list[range]]:
    """Return the indices of the layers that `is_meant` accepts: per segment, one range per such layer of its block.

    >>> segments = [Segment(("dense",), 2), Segment(("windowed", "dense"), 3)]
    >>> number_layers(segments, lambda layer: layer == "dense")
    [[range(0, 2)], [range(3, 8, 2)]]
    """
    numbers, first = [], 0
    for segment in segments:
        size, end = len(segment.layers), first + segment.num_layers
        numbers.append([range(first + i, end, size) for i, layer in enumerate(segment.layers) if is_meant(layer)])
        first = end
    return numbers


def divide_layers(layers: Sequence[LayerConfig]) -> tuple[Segment, ...]:
    """Divide layers into segments with the fewest layers in their blocks, and among these with the fewest segments.

    >>> dense, windowed = "dense", "windowed"  # any values that compare as layers do
    >>> [(segment.layers, segment.repeats) for segment in divide_layers([windowed, windowed, dense] * 4)]
    [(('windowed', 'windowed', 'dense'), 4)]
    """
    numbers: dict[LayerConfig, int] = {}
    kinds = [numbers.setdefault(layer, len(numbers)) for layer in layers]  # numbers are faster to compare than layers
    best: list[tuple[Segment, ...]] = [()]
    for end in range(1, len(layers) + 1):
        best.append(min(_divisions(layers, kinds[:end], best), key=_cost))
    return best[-1]


def _divisions(
    layers: Sequence[LayerConfig], kinds: Sequence[int], best: Sequence[tuple[Segment, ...]]
) -> Iterator[tuple[Segment, ...]]:
    """Yield divisions of the first `len(kinds)` layers: the best division of some first layers, then one last segment.

    Args:
        kinds: a number for each layer, the same for equal layers.
        best: n -> the best division of the first n layers.
    """
    end = len(kinds)
    for size in range(1, min(MAX_BLOCK, end) + 1):
        block = kinds[end - size :]
        start, repeats = end - size, 1
        while True:
            yield (*best[start], Segment(tuple(layers[end - size : end]), repeats))
            if start < size or kinds[start - size : start] != block:
                break
            start, repeats = start - size, repeats + 1


def _cost(segments: Sequence[Segment]) -> tuple[int, int]:
    """Return the number of layers in all blocks (only these are traced), and the number of segments."""
    return sum(len(segment.layers) for segment in segments), len(segments)
