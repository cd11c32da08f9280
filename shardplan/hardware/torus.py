"""Transfer times on the links of a torus. Pure arithmetic.

A collective takes as long as its most loaded link (https://jax-ml.github.io/scaling-book/sharding). A ring sends both
ways, over two links; a line, or a part of a dimension, has one link each way at its ends; groups that are interleaved
on one dimension share its links. Over several complete dimensions a collective runs on all of them at the same time, in
rotated orders; over parts of dimensions it runs on one after the other, because the TPU compiler makes one ring of
these (docs/log.md).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from shardplan.hardware.slices import Slice

HOP_LATENCY_S = 1e-6
"""Seconds from a chip to its neighbour, even for an empty message (https://jax-ml.github.io/scaling-book/tpus)."""
Coordinates = tuple[int, ...]
"""Index of a device along every torus dimension."""


@dataclass(frozen=True)
class TorusDimension:
    """One dimension of the torus; the devices of one chip are a dimension too."""

    name: str
    size: int
    wraps: bool
    """Whether the dimension is a ring rather than a line."""
    link_bandwidth: float
    """Bytes per second of a link, one way."""
    devices_per_link: int = 1
    """Number of devices that share a link."""

    def shortest_routes(self, source: int, target: int) -> list[tuple[int, int, float]]:
        """Return (direction, number of links, fraction of the bytes) for each shortest route between two indices.

        To the opposite side of an even ring, half of the bytes go in each direction.
        """
        distance = target - source
        if not distance:
            return []
        if not self.wraps:
            return [(1 if distance > 0 else -1, abs(distance), 1.0)]
        forward, backward = distance % self.size, -distance % self.size
        if forward == backward:
            return [(1, forward, 0.5), (-1, backward, 0.5)]
        return [(1, forward, 1.0) if forward < backward else (-1, backward, 1.0)]


class TorusFactor(NamedTuple):
    """The part of a mesh axis that lies on one torus dimension: `size` devices, `stride` apart."""

    dimension: int
    size: int
    stride: int


@dataclass(frozen=True)
class GroupSpan:
    """The devices of one collective group along one torus dimension."""

    dimension: TorusDimension
    factors: tuple[TorusFactor, ...]
    """The parts of mesh axes that make up the group, smallest stride first."""

    @cached_property
    def size(self) -> int:
        """Number of devices of the group along the dimension."""
        return math.prod(factor.size for factor in self.factors)

    @cached_property
    def groups_per_link(self) -> int:
        """Number of interleaved groups that share one link."""
        outermost = self.factors[-1]
        return outermost.stride * outermost.size // self.size

    @cached_property
    def covers_dimension(self) -> bool:
        """Whether the group contains every device of the dimension."""
        return self.size == self.dimension.size

    @cached_property
    def hops(self) -> int:
        """Number of links between the two devices of the group that are farthest apart."""
        if self.covers_dimension and self.dimension.wraps:
            return self.size // 2
        return sum((factor.size - 1) * factor.stride for factor in self.factors)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that each device receives in a ring or line of the group's devices."""
        directions = 2 if self.covers_dimension and self.dimension.wraps else 1
        return directions * self.dimension.link_bandwidth / self.dimension.devices_per_link / self.groups_per_link

    @cached_property
    def all_to_all_seconds_per_byte(self) -> float:
        """Seconds of an all-to-all per byte on a device; half of the bytes cross the middle of the group.

        On a line, n/4 bytes cross each link in each direction; on a ring, half as many. A group that is evenly spaced
        around a ring uses all of the ring, because every byte takes the shortest route.
        """
        is_even = self.factors[0].stride * self.size == self.dimension.size
        directions = 2 if self.dimension.wraps and is_even else 1
        rate = directions * self.dimension.link_bandwidth / self.dimension.devices_per_link / self.groups_per_link
        return self.size**2 // 4 / self.size / rate


@dataclass(frozen=True)
class TransferCost:
    """The time and the links that a transfer takes."""

    seconds_per_byte: float
    """Seconds for each byte that a device receives."""
    latency: float
    """Seconds of an empty transfer."""
    links: frozenset[str]
    """Links in use: directed torus dimensions such as `x+`, and `network`."""

    def seconds(self, received: float, count: int = 1) -> float:
        """Return the time of `count` transfers in which a device receives `received` bytes in total."""
        return received * self.seconds_per_byte + count * self.latency


def torus_dimensions(hardware: Slice) -> tuple[TorusDimension, ...]:
    """Return the dimensions of one slice: x, y, z of its chips, then `core` if a chip has several devices."""
    generation = hardware.generation
    devices_per_chip = generation.devices_per_chip
    chips = [
        TorusDimension(name, size, wraps, generation.link_bandwidth, devices_per_chip)
        for name, size, wraps in zip("xyz", hardware.torus, hardware.wraps, strict=False)
    ]
    if devices_per_chip == 1:
        return tuple(chips)
    return (*chips, TorusDimension("core", devices_per_chip, False, generation.chip_bandwidth))


def links_of(spans: Iterable[GroupSpan]) -> frozenset[str]:
    """Return the links that a collective along `spans` uses: both directions of their dimensions."""
    return frozenset(span.dimension.name + direction for span in spans for direction in "+-")


def all_gather_seconds_per_byte(spans: Sequence[GroupSpan]) -> float:
    """Return the seconds of an all-gather or reduce-scatter, per byte that a device of the group receives.

    Over complete dimensions, parts of the shards travel in different dimension orders, so that all links are busy; the
    time is the maximum over subsets of dimensions of received shards / total bandwidth. Over parts of dimensions, the
    TPU compiler runs one dimension after another. A group of one device takes no time.
    """
    devices = math.prod(span.size for span in spans)
    if devices == 1:  # nothing is received
        return 0.0
    if all(span.covers_dimension for span in spans):
        # All dimensions at the same time. Let a_i be the size of the group along dimension i. In one order of the
        # dimensions, an all-gather of unit shards brings a_1 - 1 shards along the first, a_1 (a_2 - 1) along the
        # second, and so on. If parts of the shards take different orders, any loads between those of the orders are
        # possible. The function f(S) = (product of the a_i in S) - 1 is supermodular, so that those loads are the
        # base polytope of f, and the minimal time for bandwidths w is the maximum over S of f(S) / (sum of w in S)
        # (Edmonds 1970).
        subsets = (subset for count in range(1, len(spans) + 1) for subset in combinations(spans, count))
        slowest = max(
            (math.prod(span.size for span in subset) - 1) / sum(span.bandwidth for span in subset) for subset in subsets
        )
        return slowest / (devices - 1)
    # One dimension after another, each with the shards of those before it: the slowest first, while there are few.
    seconds, shards = 0.0, 1
    for span in sorted(spans, key=lambda span: span.bandwidth):
        seconds += shards * (span.size - 1) / span.bandwidth
        shards *= span.size
    return seconds / (devices - 1)


def all_to_all_seconds_per_byte(spans: Sequence[GroupSpan]) -> float:
    """Return the seconds of an all-to-all, per byte that a device holds, with all dimensions busy at the same time."""
    return max((span.all_to_all_seconds_per_byte for span in spans), default=0.0)


def permute_cost(
    dimensions: Sequence[TorusDimension], pairs: Iterable[tuple[Coordinates, Coordinates]]
) -> TransferCost:
    """Return the cost of sending from the first to the second device of each pair, all pairs at the same time.

    Every message takes the shortest route, dimension after dimension; the most loaded link decides.
    """
    loads: defaultdict[tuple[int, int, Coordinates], float] = defaultdict(float)
    max_hops = 0
    for source, target in pairs:
        here, hops = source, 0
        for number, dimension in enumerate(dimensions):
            routes = dimension.shortest_routes(source[number], target[number])
            for direction, links, fraction in routes:
                for device in _senders(here, number, direction, links, dimension.size):
                    # the devices of a chip, which are the last coordinate, share its links
                    node = device[:-1] if dimension.devices_per_link > 1 else device
                    loads[number, direction, node] += fraction
            hops += routes[0][1] if routes else 0
            here = (*here[:number], target[number], *here[number + 1 :])
        max_hops = max(max_hops, hops)
    return TransferCost(
        max((load / dimensions[number].link_bandwidth for (number, _, _), load in loads.items()), default=0.0),
        max_hops * HOP_LATENCY_S,
        frozenset(dimensions[number].name + ("+" if direction > 0 else "-") for number, direction, _ in loads),
    )


def _senders(here: Coordinates, number: int, direction: int, links: int, size: int) -> Iterator[Coordinates]:
    """Yield the device at the start of each of the `links` links from `here` along dimension `number`."""
    for link in range(links):
        yield (*here[:number], (here[number] + direction * link) % size, *here[number + 1 :])
