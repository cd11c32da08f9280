"""Where the axes of a mesh lie on the torus of a slice, and how long collectives over them take. Pure.

Every mesh axis is cut into factors, at most one for each torus dimension. What slices cut from `replica` and `data`
is taken off before: it lies on the data-centre network (shardplan.hardware.multislice).

All ways to cut are compared: the one with the fastest all-gather over `model` wins, among equals the one with the
fastest over `data`, then over `replica`, then the one with the fewest factors. `model` comes first because what it
carries, partial sums of activations, is waited for, while the gathers of weights over `data` hide behind compute.
Within a dimension the first of them has the smallest stride: a part of a dimension has one link, divided by its stride.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import product

from shardplan.hardware.multislice import slices_by_axis
from shardplan.hardware.slices import Slice, divisors
from shardplan.hardware.torus import (
    HOP_SECONDS,
    Coordinates,
    Cost,
    Dimension,
    Factor,
    Span,
    dimensions_of,
    exchange_seconds,
    gather_seconds,
    links_of,
    route,
)

PRIORITY = ("model", "data", "replica")
"""Mesh axes, the one whose bandwidth matters most in front. Of others, the minor ones first, as in JAX's own meshes."""
NETWORK = "network"
"""The link between slices."""
FREE = Cost(0.0, 0.0, frozenset())
_DIGITS = 6
"""Decimals, of a link's bandwidth, to which the times of embeddings are compared."""


class MeshPlacement:
    """A mesh on the devices of a slice, or of several."""

    def __init__(
        self,
        hardware: Slice,
        mesh: Mapping[str, int],
        dimensions: tuple[Dimension, ...],
        factors: Mapping[str, tuple[Factor, ...]],
    ) -> None:
        self.hardware, self.mesh, self.dimensions = hardware, dict(mesh), dimensions
        self.factors = dict(factors)
        """Mesh axis -> its factors, major to minor, within a slice."""
        self.slices = dict(zip(mesh, slices_by_axis(hardware.slices, mesh), strict=True))
        """Mesh axis -> the parts that slices cut it into, outside of its factors."""
        self._costs: dict[object, Cost] = {}

    def seconds(self, kind: str, mesh_axes: tuple[str, ...], received: float, count: int = 1) -> float:
        """Time of `count` collectives in which a device receives `received` bytes altogether; see `collective`."""
        return self.collective(kind, mesh_axes).seconds(received, count)

    def collective(self, kind: str, mesh_axes: tuple[str, ...], within_slice: bool = False) -> Cost:
        """Cost of a collective over groups that are whole mesh axes; a permute shifts by one, around the end.

        Of n devices in s slices each receives n-1 parts: n-s from its own slice, and, as each of a slice's devices asks
        the others for another part, s-1 over the network. Of an all-to-all it is n-n/s that come over the network.

        Args:
            kind: an HLO opcode, as all-gather.
            within_slice: the groups are the parts of these axes that are in one slice.
        """
        key = (kind, mesh_axes, within_slice)
        if key not in self._costs:
            self._costs[key] = self._collective(kind, mesh_axes, within_slice)
        return self._costs[key]

    def permute(self, pairs: tuple[tuple[int, int], ...]) -> Cost:
        """Cost of sending between (source, target) places of the mesh, in row-major order, all at once."""
        if pairs not in self._costs:
            self._costs[pairs] = self._permute(pairs)
        return self._costs[pairs]

    def places(self) -> list[tuple[int, Coordinates]]:
        """Slice and coordinates of the device at each place of the mesh, in row-major order."""
        steps = [self._steps(axis) for axis in self.mesh]
        return [
            (sum(part[0] for part in parts), tuple(map(sum, zip(*(part[1] for part in parts), strict=True))))
            for parts in product(*steps)
        ]

    def hosts(self) -> list[int]:
        """Number of the host of the device at each place, in row-major order; virtual CPU devices have one."""
        if self.hardware.is_cpu:
            return [0] * self.hardware.devices
        size = self.hardware.generation.host_chips
        found = [(slice_, *(c // n for c, n in zip(place, size, strict=False))) for slice_, place in self.places()]
        numbers = {host: number for number, host in enumerate(sorted(set(found)))}
        return [numbers[host] for host in found]

    def _steps(self, axis: str) -> list[tuple[int, Coordinates]]:
        """What each place along a mesh axis adds to the slice's number and to the coordinates."""
        axes = list(self.slices)
        inner = math.prod(self.slices[later] for later in axes[axes.index(axis) + 1 :])
        steps = []
        for part in range(self.slices[axis]):
            for digits in product(*(range(factor.size) for factor in self.factors[axis])):
                coordinates = [0] * len(self.dimensions)
                for factor, digit in zip(self.factors[axis], digits, strict=True):
                    coordinates[factor.dimension] += digit * factor.stride
                steps.append((part * inner, tuple(coordinates)))
        return steps

    def _collective(self, kind: str, mesh_axes: tuple[str, ...], within_slice: bool) -> Cost:
        n = math.prod(self.mesh[axis] for axis in mesh_axes)
        slices = math.prod(self.slices[axis] for axis in mesh_axes)
        if within_slice:
            n, slices = n // slices, 1
        if n == 1:
            return FREE
        if kind == "collective-permute":
            part = self._around(mesh_axes)
            return part.permute(tuple(_shifted(part.mesh, mesh_axes)))
        spans = self._spans(mesh_axes)
        if kind.endswith("all-to-all"):
            # a device has n/(n-1) of what it receives, and sends a part of it to each slice
            within = n / (n - 1) / slices * exchange_seconds(spans)
            across = n / (n - 1) * (slices - 1) / slices
        else:
            within = (n - slices) / (n - 1) * gather_seconds(spans)
            across = (slices - 1) / (n - 1)
        rounds = 2 if kind == "all-reduce" else 1
        links = links_of(spans) | ({NETWORK} if slices > 1 else set())
        latency = rounds * HOP_SECONDS * sum(span.hops for span in spans)
        return Cost(within + across * self.network_seconds, latency, links)

    def _around(self, mesh_axes: tuple[str, ...]) -> "MeshPlacement":
        """Of the devices those that meet on the links of these axes: in the other dimensions all have it alike."""
        met = {factor.dimension for axis in mesh_axes for factor in self.factors[axis]}
        met.update(range(len(self.hardware.torus), len(self.dimensions)))  # devices of a chip share its network
        kept = {axis: tuple(f for f in factors if f.dimension in met) for axis, factors in self.factors.items()}
        sizes = {axis: self.slices[axis] * math.prod(f.size for f in factors) for axis, factors in kept.items()}
        return MeshPlacement(self.hardware, sizes, self.dimensions, kept)

    @property
    def network_seconds(self) -> float:
        """For each byte that every device receives over the network between slices."""
        return self.hardware.generation.devices_per_chip / self.hardware.generation.network_bandwidth

    def _permute(self, pairs: Iterable[tuple[int, int]]) -> Cost:
        places = self.places()
        inside: dict[int, list[tuple[Coordinates, Coordinates]]] = defaultdict(list)
        crossing: Counter[tuple[int, Coordinates]] = Counter()
        chip = len(self.hardware.torus)
        for source, target in pairs:
            (slice_, start), (other, end) = places[source], places[target]
            if slice_ == other:
                inside[slice_].append((start, end))
            else:
                crossing[slice_, start[:chip]] += 1
        costs = [route(self.dimensions, moved) for moved in inside.values()]
        if crossing:
            network = max(crossing.values()) / self.hardware.generation.network_bandwidth
            costs.append(Cost(network, 0.0, frozenset({NETWORK})))
        return Cost(
            max((cost.seconds_per_byte for cost in costs), default=0.0),
            max((cost.latency for cost in costs), default=0.0),
            frozenset().union(*(cost.links for cost in costs)),
        )

    def _spans(self, mesh_axes: Iterable[str]) -> list[Span]:
        by_dimension: dict[int, list[Factor]] = defaultdict(list)
        for axis in mesh_axes:
            for factor in self.factors[axis]:
                by_dimension[factor.dimension].append(factor)
        return [
            Span(self.dimensions[number], tuple(sorted(factors, key=lambda factor: factor.stride)))
            for number, factors in sorted(by_dimension.items())
        ]


def place_mesh(hardware: Slice, mesh: Mapping[str, int]) -> MeshPlacement:
    """The best embedding of `mesh` (mesh axis -> size, major to minor) in the devices of `hardware`.

    Virtual CPU devices have no torus: every mesh axis is a ring of its own, in the order of their numbers.

    Raises:
        ConfigError: the slices do not divide replica x data.
    """
    return _place_mesh(hardware, tuple(mesh.items()))


@lru_cache(maxsize=4096)
def _place_mesh(hardware: Slice, sizes: tuple[tuple[str, int], ...]) -> MeshPlacement:
    mesh = dict(sizes)
    if hardware.is_cpu:
        bandwidth = hardware.generation.link_bandwidth
        rings = tuple(Dimension(axis, size, True, bandwidth) for axis, size in sizes)
        return MeshPlacement(hardware, mesh, rings, {axis: (Factor(i, mesh[axis], 1),) for i, axis in enumerate(mesh)})
    dimensions = dimensions_of(hardware)
    parts = dict(zip(mesh, slices_by_axis(hardware.slices, mesh), strict=True))
    axes = sorted(reversed(mesh), key=lambda axis: PRIORITY.index(axis) if axis in PRIORITY else len(PRIORITY))

    @cache
    def seconds(factors: tuple[Factor, ...]) -> float:
        spans = [Span(dimensions[factor.dimension], (factor,)) for factor in factors]
        return round(hardware.generation.link_bandwidth * gather_seconds(spans), _DIGITS)

    # the factors of the axes so far, for every embedding that is the best for these
    equal: list[list[tuple[Factor, ...]]] = [[]]
    for axis in axes:
        longer = [[*done, cut] for done in equal for cut in _cuts(dimensions, done, mesh[axis] // parts[axis])]
        fastest = min(seconds(factors[-1]) for factors in longer)
        equal = [factors for factors in longer if seconds(factors[-1]) == fastest]
    best = min(equal, key=lambda factors: sum(map(len, factors)))
    return MeshPlacement(hardware, mesh, dimensions, dict(zip(axes, best, strict=True)))


def _cuts(
    dimensions: tuple[Dimension, ...], taken: list[tuple[Factor, ...]], size: int
) -> Iterator[tuple[Factor, ...]]:
    """Every way to lay a mesh axis of `size` on what the factors `taken` leave of the dimensions."""
    strides = [1] * len(dimensions)
    for factor in (factor for factors in taken for factor in factors):
        strides[factor.dimension] *= factor.size
    choices = (
        [Factor(number, part, stride) for part in divisors(dimension.size // stride)]
        for number, (dimension, stride) in enumerate(zip(dimensions, strides, strict=True))
    )
    for factors in product(*choices):
        if math.prod(factor.size for factor in factors) == size:
            yield tuple(factor for factor in factors if factor.size > 1)


def _shifted(mesh: Mapping[str, int], mesh_axes: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Every place of the mesh with its successor along `mesh_axes`, the last of which changes fastest."""
    strides = {axis: math.prod(list(mesh.values())[i + 1 :]) for i, axis in enumerate(mesh)}
    for place in range(math.prod(mesh.values())):
        target = place
        for axis in reversed(mesh_axes):
            last = target // strides[axis] % mesh[axis] == mesh[axis] - 1
            target += strides[axis] * (1 - mesh[axis] * last)
            if not last:
                break
        yield place, target
