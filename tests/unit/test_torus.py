"""Transfer times on a torus compared with a simulation that sends every byte of a collective from link to link."""

import math
from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest
from scipy.optimize import linprog

from shardplan.hardware.torus import (
    HOP_LATENCY_S,
    GroupSpan,
    TorusDimension,
    TorusFactor,
    all_gather_seconds_per_byte,
    all_to_all_seconds_per_byte,
    permute_cost,
)

BANDWIDTH = 4.0
"""Bytes per second of a link."""


def torus(text: str) -> tuple[TorusDimension, ...]:
    """`4r` is a ring of four chips, `4` a line; `2c` are two devices per chip, with six times the bandwidth."""
    devices_per_link = 2 if "c" in text else 1
    return tuple(
        TorusDimension(name, 2, False, 6 * BANDWIDTH)
        if size.endswith("c")
        else TorusDimension(name, int(size.rstrip("r")), size.endswith("r"), BANDWIDTH, devices_per_link)
        for name, size in zip("xyz", text.split(), strict=False)
    )


def spans_of(dimensions, parts: dict[int, tuple[int, int]] | None = None) -> list[GroupSpan]:
    """Spans of a group of all devices, or of (size, stride) along the dimensions in `parts`."""
    parts = parts or {i: (dimension.size, 1) for i, dimension in enumerate(dimensions)}
    return [GroupSpan(dimensions[i], (TorusFactor(i, size, stride),)) for i, (size, stride) in parts.items()]


class Links:
    """Bytes that were sent over every directed link."""

    def __init__(self, dimensions) -> None:
        self.dimensions, self.bytes = dimensions, Counter()

    def send(self, source, number: int, direction: int, steps: int, size: float) -> tuple[int, ...]:
        """Send `size` bytes from a device along one dimension; return the device where they arrive."""
        dimension, here = self.dimensions[number], list(source)
        for _ in range(steps):
            chip = tuple(here[:-1] if dimension.devices_per_link > 1 else here)
            self.bytes[number, direction, chip] += size
            here[number] = (here[number] + direction) % dimension.size
        return tuple(here)

    def seconds(self) -> dict[tuple, float]:
        return {link: size / self.dimensions[link[0]].link_bandwidth for link, size in self.bytes.items()}


def devices(dimensions):
    return product(*(range(dimension.size) for dimension in dimensions))


def members(span: GroupSpan, index: int) -> list[int]:
    """Indices along the dimension of the group that contains the device with that index."""
    (factor,) = span.factors
    first = index - index // factor.stride % factor.size * factor.stride
    return [first + digit * factor.stride for digit in range(factor.size)]


def phases(dimensions, order) -> list[dict[tuple, float]]:
    """Seconds of every link, dimension by dimension, when all groups gather a byte from each device along `order`.

    Around a ring half of the bytes go either way; on a line, or a part of a dimension, all bytes go to both ends.
    """
    result, held = [], 1
    for span in order:
        links, number = Links(dimensions), span.factors[0].dimension
        for device in devices(dimensions):
            if span.dimension.wraps and span.covers_dimension:
                for direction in (1, -1):
                    links.send(device, number, direction, span.size - 1, held / 2)
            else:
                line = members(span, device[number])
                links.send(device, number, 1, line[-1] - device[number], held)
                links.send(device, number, -1, device[number] - line[0], held)
        result.append(links.seconds())
        held *= span.size
    return result


@pytest.mark.parametrize(
    "text",
    ["8r", "8", "2", "4r 4r", "4r 8r", "2 16r", "4 6r", "2 2 2", "4r 4r 4r", "2 3 4r", "4r 2c", "4r 4r 2c", "2 2c"],
)
def test_all_gather_over_complete_dimensions(text):
    """The time is that of the best mixture of dimension orders, by linear programming, when all phases overlap."""
    dimensions = torus(text)
    orders = [
        {link: seconds for phase in phases(dimensions, order) for link, seconds in phase.items()}
        for order in permutations(spans_of(dimensions))
    ]
    rows = [[order.get(link, 0.0) for order in orders] + [-1.0] for link in set().union(*orders)]
    parts = [1.0] * len(orders)
    best = linprog([0.0] * len(orders) + [1.0], A_ub=rows, b_ub=[0.0] * len(rows), A_eq=[[*parts, 0.0]], b_eq=[1.0])
    received = math.prod(dimension.size for dimension in dimensions) - 1
    assert received * all_gather_seconds_per_byte(spans_of(dimensions)) == pytest.approx(best.fun)


PARTS = [
    ("16r", {0: (8, 1)}),
    ("16r", {0: (4, 4)}),
    ("16r", {0: (4, 2)}),
    ("10", {0: (5, 2)}),
    ("4r 16r", {0: (4, 1), 1: (2, 8)}),
    ("4r 4r", {0: (2, 2), 1: (2, 1)}),
    ("4 4", {1: (2, 2)}),
    ("4r 2c", {0: (2, 1)}),
    ("8r 2c", {0: (2, 1), 1: (2, 1)}),
]


@pytest.mark.parametrize(("text", "parts"), PARTS)
def test_all_gather_over_parts_of_dimensions(text, parts):
    """The time is that of the best order, one phase after the other, when all groups use the links at the same time."""
    dimensions = torus(text)
    spans = spans_of(dimensions, parts)
    best = min(sum(max(phase.values()) for phase in phases(dimensions, order)) for order in permutations(spans))
    received = math.prod(span.size for span in spans) - 1
    assert received * all_gather_seconds_per_byte(spans) == pytest.approx(best)


def send_shortest(links: Links, source, target, size: float) -> None:
    """Send `size` bytes dimension by dimension, half of them either way where both ways are equally long."""
    here = source
    for number, dimension in enumerate(links.dimensions):
        forth = (target[number] - here[number]) % dimension.size
        back = dimension.size - forth
        if not dimension.wraps:
            ways = [1 if target[number] > here[number] else -1]
        else:
            ways = [way for way, steps in ((1, forth), (-1, back)) if steps == min(forth, back)]
        for way in ways if forth else ():
            links.send(here, number, way, forth if way == 1 else back, size / len(ways))
        here = (*here[:number], target[number], *here[number + 1 :])


@pytest.mark.parametrize(
    ("text", "parts"),
    [(text, None) for text in ("8r", "8", "5", "7r", "2", "4r 8r", "3 4r", "2 2 2", "4r 4r 2", "4r 2c", "2 3 2c")]
    + PARTS,
)
def test_all_to_all(text, parts):
    """Every device sends an equal part of its byte to each device of its group by the shortest route."""
    dimensions = torus(text)
    spans = spans_of(dimensions, parts)
    links = Links(dimensions)
    along = {span.factors[0].dimension: span for span in spans}
    for source in devices(dimensions):
        choices = [members(along[i], c) if i in along else [c] for i, c in enumerate(source)]
        for target in product(*choices):
            send_shortest(links, source, target, 1 / math.prod(span.size for span in spans))
    assert all_to_all_seconds_per_byte(spans) == pytest.approx(max(links.seconds().values()))


@pytest.mark.parametrize(
    ("size", "wraps", "quarters"),
    # a quarter of the bytes of all devices crosses the middle each way: over two links of a ring, one of a line
    [(8, True, 1), (16, True, 1), (8, False, 2)],
)
def test_all_to_all_as_in_the_scaling_book(size, wraps, quarters):
    """V / 4 / W around a bidirectional ring of bandwidth W, twice that on a line."""
    (span,) = spans_of((TorusDimension("x", size, wraps, BANDWIDTH),))
    assert all_to_all_seconds_per_byte([span]) == pytest.approx(quarters * size / 4 / (2 * BANDWIDTH))


@pytest.mark.parametrize("text", ["8r", "8", "4r 4r", "2 3 4r", "4r 4r 2c"])
def test_random_permutations(text):
    dimensions = torus(text)
    sources = list(devices(dimensions))
    for seed in range(5):
        targets = np.random.default_rng(seed).permutation(sources)
        pairs = [(source, tuple(map(int, target))) for source, target in zip(sources, targets, strict=True)]
        links = Links(dimensions)
        for source, target in pairs:
            send_shortest(links, source, target, 1.0)
        assert permute_cost(dimensions, pairs).seconds_per_byte == pytest.approx(max(links.seconds().values()))


@pytest.mark.parametrize(
    ("text", "by", "load", "hops", "links"),
    [
        ("8r", 1, 1, 1, {"x+"}),
        ("8r", -1, 1, 1, {"x-"}),
        ("8r", 3, 3, 3, {"x+"}),
        ("8r", 4, 2, 4, {"x+", "x-"}),  # half of the bytes either way
        ("8", 1, 1, 7, {"x+", "x-"}),  # the message of the last device goes back along the line
        ("2", 1, 1, 1, {"x+", "x-"}),
    ],
)
def test_shifts(text, by, load, hops, links):
    dimensions = torus(text)
    cost = permute_cost(dimensions, [((i,), ((i + by) % dimensions[0].size,)) for i in range(dimensions[0].size)])
    assert cost.seconds_per_byte == load / BANDWIDTH
    assert cost.latency == pytest.approx(hops * HOP_LATENCY_S)
    assert cost.links == links


def test_nothing_to_send():
    assert permute_cost(torus("4r"), []).seconds(5.0) == 0
    assert all_gather_seconds_per_byte([]) == all_to_all_seconds_per_byte([]) == 0
