"""Times on a torus against what its links carry: every byte of a collective is sent from link to link and counted."""

import math
from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest
from scipy.optimize import linprog

from shardplan.hardware.torus import HOP_SECONDS, Dimension, Factor, Span, exchange_seconds, gather_seconds, route

BANDWIDTH = 4.0
"""Bytes per second of a link."""


def torus(text: str) -> tuple[Dimension, ...]:
    """`4r` is a ring of four chips, `4` a line; `2c` are two devices of each chip, six times as close."""
    sharing = 2 if "c" in text else 1
    return tuple(
        Dimension(name, 2, False, 6 * BANDWIDTH)
        if size.endswith("c")
        else Dimension(name, int(size.rstrip("r")), size.endswith("r"), BANDWIDTH, sharing)
        for name, size in zip("xyz", text.split(), strict=False)
    )


def spans_of(dimensions, parts: dict[int, tuple[int, int]] | None = None) -> list[Span]:
    """Of a group of all devices, or the (size, stride) along some dimensions in `parts`."""
    parts = parts or {i: (dimension.size, 1) for i, dimension in enumerate(dimensions)}
    return [Span(dimensions[i], (Factor(i, size, stride),)) for i, (size, stride) in parts.items()]


class Links:
    """Bytes on every directed link, counted as they go over it."""

    def __init__(self, dimensions) -> None:
        self.dimensions, self.bytes = dimensions, Counter()

    def send(self, place, number: int, direction: int, steps: int, size: float) -> tuple[int, ...]:
        """Send `size` bytes from a device, along one dimension; where they arrive."""
        dimension, here = self.dimensions[number], list(place)
        for _ in range(steps):
            chip = tuple(here[:-1] if dimension.sharing > 1 else here)
            self.bytes[number, direction, chip] += size
            here[number] = (here[number] + direction) % dimension.size
        return tuple(here)

    def seconds(self) -> dict[tuple, float]:
        return {link: size / self.dimensions[link[0]].link_bandwidth for link, size in self.bytes.items()}


def devices(dimensions):
    return product(*(range(dimension.size) for dimension in dimensions))


def members(span: Span, place: int) -> list[int]:
    """Places along the dimension of the group that the device at `place` is in."""
    (factor,) = span.factors
    first = place - place // factor.stride % factor.size * factor.stride
    return [first + digit * factor.stride for digit in range(factor.size)]


def phases(dimensions, order) -> list[dict[tuple, float]]:
    """Seconds of every link, dimension by dimension, when all groups gather a byte from each device along `order`.

    Around a ring half goes either way; on a line, or a part of a dimension, all goes to both ends.
    """
    result, held = [], 1
    for span in order:
        links, number = Links(dimensions), span.factors[0].dimension
        for place in devices(dimensions):
            if span.dimension.wraps and span.is_whole:
                for direction in (1, -1):
                    links.send(place, number, direction, span.size - 1, held / 2)
            else:
                line = members(span, place[number])
                links.send(place, number, 1, line[-1] - place[number], held)
                links.send(place, number, -1, place[number] - line[0], held)
        result.append(links.seconds())
        held *= span.size
    return result


@pytest.mark.parametrize(
    "text",
    ["8r", "8", "2", "4r 4r", "4r 8r", "2 16r", "4 6r", "2 2 2", "4r 4r 4r", "2 3 4r", "4r 2c", "4r 4r 2c", "2 2c"],
)
def test_gather_over_whole_dimensions(text):
    """As fast as the best mixture of orders of the dimensions, found by linear programming; all phases overlap."""
    dimensions = torus(text)
    orders = [
        {link: seconds for phase in phases(dimensions, order) for link, seconds in phase.items()}
        for order in permutations(spans_of(dimensions))
    ]
    rows = [[order.get(link, 0.0) for order in orders] + [-1.0] for link in set().union(*orders)]
    parts = [1.0] * len(orders)
    best = linprog([0.0] * len(orders) + [1.0], A_ub=rows, b_ub=[0.0] * len(rows), A_eq=[[*parts, 0.0]], b_eq=[1.0])
    received = math.prod(dimension.size for dimension in dimensions) - 1
    assert received * gather_seconds(spans_of(dimensions)) == pytest.approx(best.fun)


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
def test_gather_over_parts_of_dimensions(text, parts):
    """As fast as the best order, one phase after the other; all groups are on the links at the same time."""
    dimensions = torus(text)
    spans = spans_of(dimensions, parts)
    best = min(sum(max(phase.values()) for phase in phases(dimensions, order)) for order in permutations(spans))
    received = math.prod(span.size for span in spans) - 1
    assert received * gather_seconds(spans) == pytest.approx(best)


def shortest(links: Links, source, target, size: float) -> None:
    """Send `size` bytes dimension by dimension, half either way where both are as far."""
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
    """Every device sends a part of its byte to each of its group, the shortest way."""
    dimensions = torus(text)
    spans = spans_of(dimensions, parts)
    links = Links(dimensions)
    along = {span.factors[0].dimension: span for span in spans}
    for source in devices(dimensions):
        choices = [members(along[i], c) if i in along else [c] for i, c in enumerate(source)]
        for target in product(*choices):
            shortest(links, source, target, 1 / math.prod(span.size for span in spans))
    assert exchange_seconds(spans) == pytest.approx(max(links.seconds().values()))


@pytest.mark.parametrize(
    ("size", "wraps", "quarters"),
    # of what n devices have together a quarter crosses the middle each way: two links of a ring, one of a line
    [(8, True, 1), (16, True, 1), (8, False, 2)],
)
def test_all_to_all_as_in_the_scaling_book(size, wraps, quarters):
    """V / 4 / W around a bidirectional ring of bandwidth W, twice that on a line."""
    (span,) = spans_of((Dimension("x", size, wraps, BANDWIDTH),))
    assert exchange_seconds([span]) == pytest.approx(quarters * size / 4 / (2 * BANDWIDTH))


@pytest.mark.parametrize("text", ["8r", "8", "4r 4r", "2 3 4r", "4r 4r 2c"])
def test_any_permutation(text):
    dimensions = torus(text)
    places = list(devices(dimensions))
    for seed in range(5):
        targets = np.random.default_rng(seed).permutation(places)
        pairs = [(source, tuple(map(int, target))) for source, target in zip(places, targets, strict=True)]
        links = Links(dimensions)
        for source, target in pairs:
            shortest(links, source, target, 1.0)
        assert route(dimensions, pairs).seconds_per_byte == pytest.approx(max(links.seconds().values()))


@pytest.mark.parametrize(
    ("text", "by", "load", "hops", "links"),
    [
        ("8r", 1, 1, 1, {"x+"}),
        ("8r", -1, 1, 1, {"x-"}),
        ("8r", 3, 3, 3, {"x+"}),
        ("8r", 4, 2, 4, {"x+", "x-"}),  # half either way
        ("8", 1, 1, 7, {"x+", "x-"}),  # the last one's comes back along the line
        ("2", 1, 1, 1, {"x+", "x-"}),
    ],
)
def test_shifts(text, by, load, hops, links):
    dimensions = torus(text)
    cost = route(dimensions, [((i,), ((i + by) % dimensions[0].size,)) for i in range(dimensions[0].size)])
    assert cost.seconds_per_byte == load / BANDWIDTH
    assert cost.latency == pytest.approx(hops * HOP_SECONDS)
    assert cost.links == links


def test_nothing_to_send():
    assert route(torus("4r"), []).seconds(5.0) == 0
    assert gather_seconds([]) == exchange_seconds([]) == 0
