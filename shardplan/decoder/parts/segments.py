"""Divides the layers of a decoder into segments: a segment repeats a block of layers. Pure.

A segment is one loop of the program, so that compiling takes as long for 100 layers as for the layers of a block. In
some families all layers are equal. Gemma 3 27B has 62 layers, and every sixth attends to all positions: 10 times 5 + 1
layers, and 2 more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardplan.decoder.parts.block import LayerConfig

MAX_BLOCK = 16
"""Most layers of a block."""


@dataclass(frozen=True)
class Segment:
    """A block of layers, and how often it is repeated."""

    layers: tuple[LayerConfig, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        """The layers of all repetitions."""
        return len(self.layers) * self.repeats


def divide_layers(layers: Sequence[LayerConfig]) -> tuple[Segment, ...]:
    """Divide layers into segments with as few layers in their blocks as possible, and among those into the fewest."""
    numbers: dict[LayerConfig, int] = {}
    kinds = [numbers.setdefault(layer, len(numbers)) for layer in layers]  # quicker to compare
    best: list[tuple[Segment, ...]] = [()]
    for end in range(1, len(layers) + 1):
        best.append(min(_divisions(layers, kinds[:end], best), key=_cost))
    return best[-1]


def _divisions(
    layers: Sequence[LayerConfig], kinds: Sequence[int], best: Sequence[tuple[Segment, ...]]
) -> Iterator[tuple[Segment, ...]]:
    """Yield the divisions of the first `len(kinds)` layers, each with the best one of what is before its last segment.

    Args:
        kinds: the same number for equal layers.
        best: number of first layers -> the best division of these.
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
    """The layers that are traced, and the number of segments."""
    return sum(len(segment.layers) for segment in segments), len(segments)
