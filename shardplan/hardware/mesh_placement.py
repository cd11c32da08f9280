"""The placement of a mesh on the torus of a slice, and the cost of collectives on it. Pure arithmetic.

Every mesh axis is split into factors, at most one for each torus dimension. The parts of `replica` and `data` that lie
across slices are divided off first: they use the data-centre network (shardplan.hardware.multislice).

`place_mesh` compares all splits. The best one has the fastest all-gather over `model`, among equals the fastest over
`data`, then over `replica`, then the fewest factors. `model` has priority because its traffic, partial sums of
activations, is on the critical path, whereas weight gathers over `data` overlap with compute. Within one dimension the
axis of highest priority has the smallest stride, because a part of a dimension gets one link, divided by its stride.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import product
from typing import assert_never

from shardplan.hardware.collective_kind import CollectiveKind
from shardplan.hardware.mesh_axes import AXIS_PRIORITY
from shardplan.hardware.multislice import slices_by_axis
from shardplan.hardware.slices import Slice, divisors
from shardplan.hardware.torus import (
    HOP_LATENCY_S,
    Coordinates,
    GroupSpan,
    TorusDimension,
    TorusFactor,
    TransferCost,
    all_gather_seconds_per_byte,
    all_to_all_seconds_per_byte,
    links_of,
    permute_cost,
    torus_dimensions,
)

NETWORK = "network"
"""Name of the link between slices, the data-centre network."""
NO_COST = TransferCost(0.0, 0.0, frozenset())
_DIGITS = 6
"""Decimals to which all-gather times, in units of one byte over one link, are compared."""


class MeshPlacement:
    """A mesh on the devices of one slice or of several."""

    def __init__(
        self,
        hardware: Slice,
        mesh: Mapping[str, int],
        dimensions: tuple[TorusDimension, ...],
        factors: Mapping[str, tuple[TorusFactor, ...]],
    ) -> None:
        """Make the placement of a mesh from the parts of its axes.

        Args:
            mesh: mesh axis -> size, major to minor.
            dimensions: dimensions of the torus of one slice.
            factors: mesh axis -> its factors within one slice, major to minor.
        """
        self.hardware, self.mesh, self.dimensions = hardware, dict(mesh), dimensions
        self.factors = dict(factors)
        """Mesh axis -> its factors within one slice, major to minor."""
        self.slices_by_axis = dict(zip(mesh, slices_by_axis(hardware.slices, mesh), strict=True))
        """Mesh axis -> number of slices that it spans; slices are major to the factors."""
        self._costs: dict[object, TransferCost] = {}

    def seconds(self, kind: CollectiveKind, mesh_axes: tuple[str, ...], received: float, count: int = 1) -> float:
        """Return the time of `count` collectives in which a device receives `received` bytes in total.

        See `collective_cost`.
        """
        return self.collective_cost(kind, mesh_axes).seconds(received, count)

    def collective_cost(
        self, kind: CollectiveKind, mesh_axes: tuple[str, ...], within_slice: bool = False
    ) -> TransferCost:
        """Return the cost of a collective whose groups are complete mesh axes; a permute shifts by one, cyclically.

        In a group of n devices in s slices, each device receives n-1 parts: n-s parts from its own slice, and s-1 parts
        over the network, because the devices of a slice request different parts from other slices. In an all-to-all,
        n-n/s parts come over the network.

        Args:
            within_slice: whether each group is limited to the part of the mesh axes inside one slice.
        """
        key = (kind, mesh_axes, within_slice)
        if key not in self._costs:
            self._costs[key] = self._compute_collective_cost(kind, mesh_axes, within_slice)
        return self._costs[key]

    def permute_cost(self, pairs: tuple[tuple[int, int], ...]) -> TransferCost:
        """Return the cost of sending between (source, target) pairs of row-major device indices, all at once."""
        if pairs not in self._costs:
            self._costs[pairs] = self._compute_permute_cost(pairs)
        return self._costs[pairs]

    def shift_cost(self, mesh_axes: tuple[str, ...], distance: int) -> TransferCost:
        """Return the cost of a cyclic shift by `distance` along mesh axes."""
        key = (mesh_axes, distance)
        if key not in self._costs:
            reduced = self._reduce_to_links_of(mesh_axes)
            self._costs[key] = reduced.permute_cost(tuple(_shifted(reduced.mesh, mesh_axes, distance)))
        return self._costs[key]

    def split_axis(self, axis: str, minor_size: int, minor_axis: str) -> "MeshPlacement | None":
        """Return the same placement with the mesh axis `axis` split into two.

        The minor part, of `minor_size` devices, is called `minor_axis`. None if the factors of `axis` cannot be split.
        """
        major, minor = list(self.factors[axis]), list[TorusFactor]()
        left = minor_size
        while major and left > 1:
            factor = major.pop()
            part = math.gcd(left, factor.size)
            if part < min(left, factor.size):
                return None
            minor.insert(0, factor._replace(size=part))
            if part < factor.size:
                major.append(factor._replace(size=factor.size // part, stride=factor.stride * part))
            left //= part
        mesh = dict[str, int]()
        for name, size in self.mesh.items():
            mesh |= {axis: size // minor_size, minor_axis: minor_size} if name == axis else {name: size}
        factors = {**self.factors, axis: tuple(major), minor_axis: tuple(minor)}
        return MeshPlacement(self.hardware, mesh, self.dimensions, factors) if left == 1 else None

    def coordinates(self) -> list[tuple[int, Coordinates]]:
        """Return (slice, torus coordinates) of every device of the mesh, in row-major order."""
        coordinates = []
        for combination in product(*(self._steps(axis) for axis in self.mesh)):
            slice_indices, torus_coordinates = zip(*combination, strict=True)
            coordinates.append((sum(slice_indices), tuple(map(sum, zip(*torus_coordinates, strict=True)))))
        return coordinates

    def hosts(self) -> list[int]:
        """Return the host index of every device of the mesh, in row-major order; virtual CPU devices share host 0."""
        if self.hardware.is_cpu:
            return [0] * self.hardware.devices
        sizes = [self.hardware.slices, *(dimension.size for dimension in self.dimensions)]
        chips = [1, *self.hardware.generation.host_chips][: len(sizes)]
        chips += sizes[len(chips) :]  # a host has all devices of its chips
        host_of = [0]  # of every index of slice and torus, in row-major order
        for size, n in zip(sizes, chips, strict=True):
            hosts = -(-size // n)  # along this dimension
            host_of = [host * hosts + i // n for host, i in itertools.product(host_of, range(size))]
        positions = [0]  # of every device, in this order
        for axis in self.mesh:
            steps = [_row_major_index((index, *coordinates), sizes) for index, coordinates in self._steps(axis)]
            positions = [position + step for position in positions for step in steps]
        return [host_of[position] for position in positions]

    def _steps(self, axis: str) -> list[tuple[int, Coordinates]]:
        """Return, for each index along a mesh axis, the step in the slice index and in the torus coordinates."""
        axes = list(self.slices_by_axis)
        inner = math.prod(self.slices_by_axis[later] for later in axes[axes.index(axis) + 1 :])
        steps = []
        for slice_index in range(self.slices_by_axis[axis]):
            for digits in product(*(range(factor.size) for factor in self.factors[axis])):
                coordinates = [0] * len(self.dimensions)
                for factor, digit in zip(self.factors[axis], digits, strict=True):
                    coordinates[factor.dimension] += digit * factor.stride
                steps.append((slice_index * inner, tuple(coordinates)))
        return steps

    def _compute_collective_cost(
        self, kind: CollectiveKind, mesh_axes: tuple[str, ...], within_slice: bool
    ) -> TransferCost:
        """Compute the result of `collective_cost`, without its cache."""
        group_size = math.prod(self.mesh[axis] for axis in mesh_axes)
        group_slices = math.prod(self.slices_by_axis[axis] for axis in mesh_axes)
        if within_slice:
            group_size, group_slices = group_size // group_slices, 1
        if group_size == 1:
            return NO_COST
        spans = self._spans(mesh_axes)
        match kind:
            case CollectiveKind.COLLECTIVE_PERMUTE:
                return self.shift_cost(mesh_axes, 1)
            case CollectiveKind.ALL_TO_ALL | CollectiveKind.RAGGED_ALL_TO_ALL:
                # to receive 1 byte a device holds n/(n-1) bytes, and sends 1/slices of them to each slice
                held = group_size / (group_size - 1)
                torus_seconds_per_byte = held / group_slices * all_to_all_seconds_per_byte(spans)
                network_fraction = held * (group_slices - 1) / group_slices
            case (
                CollectiveKind.ALL_GATHER
                | CollectiveKind.REDUCE_SCATTER
                | CollectiveKind.ALL_REDUCE
                | CollectiveKind.COLLECTIVE_BROADCAST
            ):
                torus_fraction = (group_size - group_slices) / (group_size - 1)
                torus_seconds_per_byte = torus_fraction * all_gather_seconds_per_byte(spans)
                network_fraction = (group_slices - 1) / (group_size - 1)
            case _:
                assert_never(kind)
        rounds = 2 if kind == CollectiveKind.ALL_REDUCE else 1
        links = links_of(spans) | ({NETWORK} if group_slices > 1 else set())
        latency = rounds * HOP_LATENCY_S * sum(span.hops for span in spans)
        # a group is assumed to use the torus and the network one after the other, so that their times add up
        seconds_per_byte = torus_seconds_per_byte + network_fraction * self.network_seconds_per_byte
        return TransferCost(seconds_per_byte, latency, links)

    def _reduce_to_links_of(self, mesh_axes: tuple[str, ...]) -> "MeshPlacement":
        """Return the placement reduced to the devices that share links along `mesh_axes`.

        Along all other torus dimensions, every device has the same load.
        """
        shared = {factor.dimension for axis in mesh_axes for factor in self.factors[axis]}
        shared.update(range(len(self.hardware.torus), len(self.dimensions)))  # devices of a chip share its network
        factors = {axis: tuple(f for f in factors if f.dimension in shared) for axis, factors in self.factors.items()}
        sizes = {axis: self.slices_by_axis[axis] * math.prod(f.size for f in parts) for axis, parts in factors.items()}
        return MeshPlacement(self.hardware, sizes, self.dimensions, factors)

    @property
    def network_seconds_per_byte(self) -> float:
        """Return the seconds per byte that every device receives over the network between slices."""
        return self.hardware.generation.devices_per_chip / self.hardware.generation.network_bandwidth

    def _compute_permute_cost(self, pairs: Iterable[tuple[int, int]]) -> TransferCost:
        """Compute the result of `permute_cost`, without its cache; messages within and between slices overlap."""
        coordinates = self.coordinates()
        within: dict[int, list[tuple[Coordinates, Coordinates]]] = defaultdict(list)
        crossing: Counter[tuple[int, Coordinates]] = Counter()
        chip = len(self.hardware.torus)
        for source, target in pairs:
            (source_slice, start), (target_slice, end) = coordinates[source], coordinates[target]
            if source_slice == target_slice:
                within[source_slice].append((start, end))
            else:
                crossing[source_slice, start[:chip]] += 1
        costs = [permute_cost(self.dimensions, moves) for moves in within.values()]
        if crossing:
            network = max(crossing.values()) / self.hardware.generation.network_bandwidth
            costs.append(TransferCost(network, 0.0, frozenset({NETWORK})))
        return TransferCost(
            max((cost.seconds_per_byte for cost in costs), default=0.0),
            max((cost.latency for cost in costs), default=0.0),
            frozenset().union(*(cost.links for cost in costs)),
        )

    def _spans(self, mesh_axes: Iterable[str]) -> list[GroupSpan]:
        """Return, for each torus dimension that a group along `mesh_axes` uses, the group's devices in it."""
        by_dimension: dict[int, list[TorusFactor]] = defaultdict(list)
        for axis in mesh_axes:
            for factor in self.factors[axis]:
                by_dimension[factor.dimension].append(factor)
        return [
            GroupSpan(self.dimensions[number], tuple(sorted(factors, key=lambda factor: factor.stride)))
            for number, factors in sorted(by_dimension.items())
        ]


def place_mesh(hardware: Slice, mesh: Mapping[str, int]) -> MeshPlacement:
    """Return the best placement of a mesh on the devices of `hardware`.

    Virtual CPU devices have no torus: every mesh axis is a ring of its own, in the order of device ids.

    Args:
        mesh: mesh axis -> size, major to minor.

    Raises:
        ConfigError: the number of slices does not divide replica x data.
    """
    return _place_mesh(hardware, tuple(mesh.items()))


@lru_cache(maxsize=4096)
def _place_mesh(hardware: Slice, sizes: tuple[tuple[str, int], ...]) -> MeshPlacement:
    """Place mesh axes one by one, each on the factors with the fastest all-gather; cached for `place_mesh`."""
    mesh = dict(sizes)
    if hardware.is_cpu:
        bandwidth = hardware.generation.link_bandwidth
        rings = tuple(TorusDimension(axis, size, True, bandwidth) for axis, size in sizes)
        return MeshPlacement(
            hardware, mesh, rings, {axis: (TorusFactor(i, mesh[axis], 1),) for i, axis in enumerate(mesh)}
        )
    dimensions = torus_dimensions(hardware)
    slices = dict(zip(mesh, slices_by_axis(hardware.slices, mesh), strict=True))
    # axes that no plan has come last, minor ones first, as in JAX's own meshes
    axes = sorted(
        reversed(mesh), key=lambda axis: AXIS_PRIORITY.index(axis) if axis in AXIS_PRIORITY else len(AXIS_PRIORITY)
    )

    @cache
    def all_gather_time(factors: tuple[TorusFactor, ...]) -> float:
        spans = [GroupSpan(dimensions[factor.dimension], (factor,)) for factor in factors]
        return round(hardware.generation.link_bandwidth * all_gather_seconds_per_byte(spans), _DIGITS)

    # factors of the axes placed so far, for every placement of these axes that is equally good
    best: list[list[tuple[TorusFactor, ...]]] = [[]]
    for axis in axes:
        candidates = []
        for placed in best:
            for factors in _factorizations(dimensions, placed, mesh[axis] // slices[axis]):
                candidates.append([*placed, factors])
        fastest = min(all_gather_time(placed[-1]) for placed in candidates)
        best = [placed for placed in candidates if all_gather_time(placed[-1]) == fastest]
    factors_by_axis = min(best, key=lambda placed: sum(map(len, placed)))
    return MeshPlacement(hardware, mesh, dimensions, dict(zip(axes, factors_by_axis, strict=True)))


def _factorizations(
    dimensions: tuple[TorusDimension, ...], placed: list[tuple[TorusFactor, ...]], size: int
) -> Iterator[tuple[TorusFactor, ...]]:
    """Yield every way to lay a mesh axis of `size` on the torus devices that the factors in `placed` leave."""
    strides = [1] * len(dimensions)
    for factor in itertools.chain.from_iterable(placed):
        strides[factor.dimension] *= factor.size
    choices = []
    for number, (dimension, stride) in enumerate(zip(dimensions, strides, strict=True)):
        choices.append([TorusFactor(number, part, stride) for part in divisors(dimension.size // stride)])
    for factors in product(*choices):
        if math.prod(factor.size for factor in factors) == size:
            yield tuple(factor for factor in factors if factor.size > 1)


def _shifted(mesh: Mapping[str, int], mesh_axes: tuple[str, ...], distance: int) -> Iterator[tuple[int, int]]:
    """Yield each device index, and the index of the device `distance` further along `mesh_axes`, cyclically."""
    strides = {axis: math.prod(list(mesh.values())[i + 1 :]) for i, axis in enumerate(mesh)}
    for source in range(math.prod(mesh.values())):
        target, carry = source, distance
        for axis in reversed(mesh_axes):
            index = source // strides[axis] % mesh[axis]
            carry, shifted = divmod(index + carry, mesh[axis])
            target += strides[axis] * (shifted - index)
        yield source, target


def _row_major_index(index: Iterable[int], shape: Iterable[int]) -> int:
    """Return the position of an index of an array of `shape`, in row-major order."""
    position = 0
    for i, size in zip(index, shape, strict=True):
        position = position * size + i
    return position
