"""How long bytes take on the links of a torus. Pure.

A collective takes as long as its most loaded link (https://jax-ml.github.io/scaling-book/sharding): a ring sends both
ways, over two links; a line, or a part of a dimension, has one link each way at its ends; groups that lie interleaved
on a dimension share its links. Over several whole dimensions a collective runs on all of them at once, in rotated
orders; over parts of dimensions on one after the other, for the TPU compiler has one ring for these (docs/log.md).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from shardplan.hardware.slices import Slice

HOP_SECONDS = 1e-6
"""From a chip to its neighbour, however little is sent (https://jax-ml.github.io/scaling-book/tpus)."""
Coordinates = tuple[int, ...]
"""A device's place along every dimension."""


@dataclass(frozen=True)
class Dimension:
    """One dimension of the torus; the devices of a chip are one too."""

    name: str
    size: int
    wraps: bool
    """A ring rather than a line."""
    link_bandwidth: float
    """Bytes per second of a link, one way."""
    sharing: int = 1
    """Devices that share a link."""

    def ways(self, source: int, target: int) -> list[tuple[int, int, float]]:
        """Shortest ways from place to place: direction, links, and the part of the bytes that takes it.

        To the far side of an even ring half go either way.
        """
        distance = target - source
        if not distance:
            return []
        if not self.wraps:
            return [(1 if distance > 0 else -1, abs(distance), 1.0)]
        forth, back = distance % self.size, -distance % self.size
        if forth == back:
            return [(1, forth, 0.5), (-1, back, 0.5)]
        return [(1, forth, 1.0) if forth < back else (-1, back, 1.0)]


class Factor(NamedTuple):
    """A part of a mesh axis on one dimension: `size` places, `stride` apart."""

    dimension: int
    size: int
    stride: int


@dataclass(frozen=True)
class Span:
    """A group of devices along one dimension: the factors of its mesh axes there, the smallest stride first."""

    dimension: Dimension
    factors: tuple[Factor, ...]

    @cached_property
    def size(self) -> int:
        """Devices of the group."""
        return math.prod(factor.size for factor in self.factors)

    @cached_property
    def interleaved(self) -> int:
        """Groups that lie across a link: those that begin before the outermost factor's second place."""
        outermost = self.factors[-1]
        return outermost.stride * outermost.size // self.size

    @cached_property
    def is_whole(self) -> bool:
        """Whether the group has the whole dimension."""
        return self.size == self.dimension.size

    @cached_property
    def hops(self) -> int:
        """Links between the two devices of the group that are furthest from each other."""
        if self.is_whole and self.dimension.wraps:
            return self.size // 2
        return sum((factor.size - 1) * factor.stride for factor in self.factors)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that each device of the group receives from a ring, or a line, of its members."""
        directions = 2 if self.is_whole and self.dimension.wraps else 1
        return directions * self.dimension.link_bandwidth / self.dimension.sharing / self.interleaved

    @cached_property
    def exchange_seconds(self) -> float:
        """Of an all-to-all, for each byte that a device has: half of them cross the middle.

        That is n/4 bytes for a link and direction on a line, and half of it on a ring. A group that is evenly spaced
        around a ring uses all of it, for every byte takes the shortest way.
        """
        evenly = self.factors[0].stride * self.size == self.dimension.size
        directions = 2 if self.dimension.wraps and evenly else 1
        rate = directions * self.dimension.link_bandwidth / self.dimension.sharing / self.interleaved
        return self.size**2 // 4 / self.size / rate


@dataclass(frozen=True)
class Cost:
    """What a transfer costs."""

    seconds_per_byte: float
    """For each byte that a device receives."""
    latency: float
    """Seconds, however little is sent."""
    links: frozenset[str]
    """Directed dimensions that it takes, such as `x+`, and `network`."""

    def seconds(self, received: float, count: int = 1) -> float:
        """Time of `count` transfers of `received` bytes altogether."""
        return received * self.seconds_per_byte + count * self.latency


def dimensions_of(hardware: Slice) -> tuple[Dimension, ...]:
    """The dimensions of one slice, in chips; the devices of a chip come last."""
    generation = hardware.generation
    sharing = generation.devices_per_chip
    chips = [
        Dimension(name, size, wraps, generation.link_bandwidth, sharing)
        for name, size, wraps in zip("xyz", hardware.torus, hardware.wraps, strict=False)
    ]
    cores = [Dimension("core", sharing, False, generation.chip_bandwidth)] if sharing > 1 else []
    return (*chips, *cores)


def links_of(spans: Iterable[Span]) -> frozenset[str]:
    """What collectives along `spans` take: both directions of their dimensions."""
    return frozenset(span.dimension.name + direction for span in spans for direction in "+-")


def gather_seconds(spans: Sequence[Span]) -> float:
    """Of an all-gather or reduce-scatter, for each byte that a device of the group receives.

    Dimension by dimension an all-gather of unit shards brings a_1 - 1 shards along the first, a_1 (a_2 - 1) along the
    second, and so on. Cutting the shards into parts that take different orders, any loads between those of the orders
    can be had. The function f(S) = (product of the sizes in S) - 1 is supermodular, so that those loads are the base
    polytope of f, and the least time for bandwidths w is the maximum over S of f(S) / (sum of w in S) (Edmonds 1970).
    """
    members = math.prod(span.size for span in spans)
    if members == 1:
        return 0.0
    if all(span.is_whole for span in spans):
        subsets = (subset for count in range(1, len(spans) + 1) for subset in combinations(spans, count))
        slowest = max(
            (math.prod(span.size for span in subset) - 1) / sum(span.bandwidth for span in subset) for subset in subsets
        )
        return slowest / (members - 1)
    seconds, held = 0.0, 1
    for span in sorted(spans, key=lambda span: span.bandwidth):  # the slowest while there is least to send
        seconds += held * (span.size - 1) / span.bandwidth
        held *= span.size
    return seconds / (members - 1)


def exchange_seconds(spans: Sequence[Span]) -> float:
    """Of an all-to-all, for each byte that a device of the group has: all dimensions are busy at the same time."""
    return max((span.exchange_seconds for span in spans), default=0.0)


def route(dimensions: Sequence[Dimension], pairs: Iterable[tuple[Coordinates, Coordinates]]) -> Cost:
    """Cost of sending from each pair's first device to its second, all at once.

    Each takes the shortest way, dimension after dimension; the most loaded link decides.
    """
    loads: defaultdict[tuple[int, int, Coordinates], float] = defaultdict(float)
    furthest = 0
    for source, target in pairs:
        here, hops = source, 0
        for number, dimension in enumerate(dimensions):
            ways = dimension.ways(source[number], target[number])
            for direction, links, part in ways:
                for place in _places(here, number, direction, links, dimension.size):
                    # the devices of a chip, which come last, share its links
                    node = place[:-1] if dimension.sharing > 1 else place
                    loads[number, direction, node] += part
            hops += ways[0][1] if ways else 0
            here = (*here[:number], target[number], *here[number + 1 :])
        furthest = max(furthest, hops)
    return Cost(
        max((load / dimensions[number].link_bandwidth for (number, _, _), load in loads.items()), default=0.0),
        furthest * HOP_SECONDS,
        frozenset(dimensions[number].name + ("+" if direction > 0 else "-") for number, direction, _ in loads),
    )


def _places(here: Coordinates, number: int, direction: int, links: int, size: int) -> Iterator[Coordinates]:
    """The device at the beginning of each of the `links` from `here` along one dimension."""
    for link in range(links):
        yield (*here[:number], (here[number] + direction * link) % size, *here[number + 1 :])
