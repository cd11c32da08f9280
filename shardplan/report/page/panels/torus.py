"""The slice drawn as its torus: where each device of the mesh is, and which tile of each tensor it holds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.hardware import MeshPlacement, parse_slice, place_mesh
from shardplan.plan.file.parameters import Spec
from shardplan.plan.plan import Mapping, Plan
from shardplan.plan.workload.workload import BATCH_AXIS
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.report.page.labels import distinct_labels
from shardplan.report.plan.parameter_groups import group_parameters
from shardplan.report.plan.tables import spec_text

MAX_DEVICES = 2048
"""Maximum number of devices that are drawn, the first ones of a larger slice."""
CELL = 30
"""Side of a chip in pixels, wide enough for numbers of three digits."""
GAP = 3


@dataclass(frozen=True)
class Tiling:
    """The division of an array into tiles, numbered in row-major order, over the devices of a mesh."""

    name: str
    spec: str
    axes: dict[str, int]
    """Logical axis -> size."""
    dims: list[list[str]]
    """Mesh axes of each dimension, major to minor."""
    strides: dict[str, int]
    """Mesh axis -> increment of the tile number per step along it; an absent axis has increment 0."""
    tiles: int

    def tile(self, coordinates: dict[str, int]) -> int:
        """Return the index of the tile at given mesh coordinates."""
        return sum(self.strides.get(axis, 0) * at for axis, at in coordinates.items())


@dataclass(frozen=True)
class Cell:
    """One device on the drawing of its layer, in pixels."""

    device: int
    x: float
    y: int
    width: float


@dataclass(frozen=True)
class ChipLayer:
    """The chips of one slice with the same third coordinate."""

    title: str
    width: int
    height: int
    cells: list[Cell]


@dataclass(frozen=True)
class Drawing:
    """The drawing of a slice with a mesh on it."""

    dimensions: list[str]
    """Description of each torus dimension: how it is drawn, its size, and the mesh axes on it."""
    axes: list[tuple[str, int, str]]
    """Mesh axis, its size, and a description of where it lies on the torus."""
    layers: list[ChipLayer]
    drawn: int
    devices: int
    locations: list[str]
    """Description of each drawn device's host and chip, in the order of the devices."""


def draw_slice(slice_name: str, mesh: dict[str, int], limit: int = MAX_DEVICES) -> Drawing:
    """Draw at most `limit` devices of a slice, with a mesh laid on it as in the compiler's device assignment."""
    placement = place_mesh(parse_slice(slice_name), mesh)
    coordinates, hosts = placement.coordinates(), placement.hosts()
    order = sorted(range(len(coordinates)), key=lambda device: _drawing_order(coordinates[device]))[:limit]
    names = [dimension.name for dimension in placement.dimensions]
    return Drawing(
        dimensions=[_dimension_text(placement, number) for number in range(len(names))],
        axes=[(axis, size, _lies_on(placement, axis)) for axis, size in mesh.items()],
        layers=list(_layers(placement, coordinates, order)),
        drawn=len(order),
        devices=len(coordinates),
        locations=[
            f"host {hosts[device]}, "
            + (f"slice {coordinates[device][0]}, " if placement.hardware.slices > 1 else "")
            + ", ".join(f"{name} {at}" for name, at in zip(names, coordinates[device][1], strict=True))
            for device in sorted(order)
        ],
    )


def tilings_of(plan: Plan) -> list[Tiling]:
    """Return the distinct tilings of a plan's parameters, in their order, then the tokens' tiling."""
    tilings = []
    for group in group_parameters(plan.parameters):
        tilings.append(make_tiling(group.path, group.first.axes, group.first.spec, plan.mesh))
    return [*tilings, _tokens(plan)]


def default_tiling(tilings: list[Tiling]) -> int:
    """Return the index of the largest sharded array; if none is sharded, of the largest array."""
    return max(range(len(tilings)), key=lambda i: (tilings[i].tiles > 1, math.prod(tilings[i].axes.values())))


def largest_on_device(plan: Plan) -> int:
    """Return the index of the parameter tiling with the most bytes on a device."""
    groups = group_parameters(plan.parameters)
    return max(range(len(groups)), key=lambda i: groups[i].first.bytes_per_device)


def tensor_choices(tilings: list[Tiling]) -> dict[str, list[tuple[int, str]]]:
    """Return the list of tensors for selection: group -> (index, text) of each tiling, the largest first."""
    *parameters, tokens = range(len(tilings))
    labels = distinct_labels([each.name for each in tilings])
    parameters.sort(key=lambda i: -math.prod(tilings[i].axes.values()))
    groups = {
        "sharded parameters": [i for i in parameters if tilings[i].tiles > 1],
        "replicated parameters": [i for i in parameters if tilings[i].tiles == 1],
        "activations": [tokens],
    }
    return {
        group: [(i, f"{labels[i]}, {tilings[i].tiles} {'tile' if tilings[i].tiles == 1 else 'tiles'}") for i in indices]
        for group, indices in groups.items()
        if indices
    }


def axis_uses(plan: Plan) -> dict[str, tuple[str, str]]:
    """Map each mesh axis to the logical axes that it shards, in computations and in stored parameters."""
    stored = {name: mesh_axes for name, mesh_axes in plan.param_mapping.items() if name in plan.model.axes}

    def sharded(axis: str, mapping: Mapping) -> str:
        return ", ".join(name for name, mesh_axes in mapping.items() if axis in mesh_axes) or "nothing"

    return {axis: (sharded(axis, plan.compute_mapping), sharded(axis, stored)) for axis in plan.mesh}


def make_tiling(name: str, axes: dict[str, int], spec: Spec, mesh: dict[str, int]) -> Tiling:
    """Divide an array into tiles by its spec."""
    dims = [list(mesh_axes or ()) for mesh_axes in spec]
    strides: dict[str, int] = {}
    tiles = 1
    for mesh_axes in reversed(dims):
        for axis in reversed(mesh_axes):
            strides[axis] = tiles
            tiles *= mesh[axis]
    return Tiling(name, spec_text(spec), axes, dims, strides, tiles)


def mesh_coordinates(mesh: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield the mesh coordinates of every device, in row-major order."""
    for device in range(math.prod(mesh.values())):
        rest, at = device, dict[str, int]()
        for axis in reversed(mesh):
            rest, at[axis] = divmod(rest, mesh[axis])
        yield {axis: at[axis] for axis in mesh}


def _tokens(plan: Plan) -> Tiling:
    """Return the tiling of a step's tokens, which activations share."""
    position = plan.model.position
    axes = {BATCH_AXIS: plan.workload.batch, position: plan.workload.position}
    spec: Spec = [plan.compute_mapping.get(axis) for axis in axes]
    order = f", positions in {plan.attention.layout} order" if plan.attention.layout != SequenceOrder.CONTIGUOUS else ""
    return make_tiling(f"tokens of a step{order}", axes, spec, plan.mesh)


def _drawing_order(place: tuple[int, tuple[int, ...]]) -> tuple[int, ...]:
    # layer by layer, so that a limit of devices leaves out whole layers where it can
    slice_index, at = place
    return (slice_index, *reversed(at[:3]), *at[3:])


def _dimension_text(placement: MeshPlacement, number: int) -> str:
    """Describe a torus dimension: how it is drawn, its size, and the mesh axes on it, major to minor."""
    dimension = placement.dimensions[number]
    is_chip = not placement.hardware.is_cpu and number >= len(placement.hardware.torus)
    drawn = "within a chip" if is_chip else ("to the right", "down", "from block to block")[number]
    on_it = [
        (factor.stride, f"{axis} {factor.size}")
        for axis, factors in placement.factors.items()
        for factor in factors
        if factor.dimension == number and factor.size > 1
    ]
    axes = " x ".join(text for _, text in sorted(on_it, reverse=True)) or "one device"
    ring = "ring" if dimension.wraps else "line"
    return f"{dimension.name} ({drawn}): {f'a {ring} of {dimension.size}, {axes}' if dimension.size > 1 else '1'}"


def _lies_on(placement: MeshPlacement, axis: str) -> str:
    """Describe the torus dimensions on which a mesh axis lies."""
    slices = placement.slices_by_axis[axis]
    parts = [f"{slices} slices, over the data-centre network"] if slices > 1 else []
    for factor in placement.factors[axis]:
        dimension = placement.dimensions[factor.dimension]
        if factor.size == 1:
            continue
        is_ring = factor.size == dimension.size and dimension.wraps
        whole = "the whole ring" if is_ring else ("the whole line" if factor.size == dimension.size else "a part")
        apart = f", {factor.stride} apart" if factor.stride > 1 else ""
        parts.append(f"{factor.size} along {dimension.name} ({whole}{apart})")
    return " x ".join(parts) or "one device"


def _layers(
    placement: MeshPlacement, coordinates: list[tuple[int, tuple[int, ...]]], order: list[int]
) -> Iterator[ChipLayer]:
    """Yield the layers of the slices, each with x to the right and y down."""
    sizes = [dimension.size for dimension in placement.dimensions]
    chip_dims = len(placement.hardware.torus) if not placement.hardware.is_cpu else len(sizes)
    names = [dimension.name for dimension in placement.dimensions]
    by_layer: dict[tuple[int, int], list[Cell]] = {}
    for device in order:
        slice_index, at = coordinates[device]
        x, y, z = (*at[:chip_dims], 0, 0)[:3]
        core, cores = (at[chip_dims], sizes[chip_dims]) if len(at) > chip_dims else (0, 1)
        width = (CELL - GAP) / cores
        cell = Cell(device, x * CELL + GAP / 2 + core * width, y * CELL, width)
        by_layer.setdefault((slice_index, z), []).append(cell)
    columns, rows = sizes[0], sizes[1] if chip_dims > 1 else 1
    for (slice_index, z), cells in by_layer.items():
        parts = [f"slice {slice_index}"] if placement.hardware.slices > 1 else []
        parts += [f"{names[2]} = {z}"] if chip_dims > 2 else []
        yield ChipLayer(", ".join(parts) or f"{names[0]} and {names[1]}" if chip_dims > 1 else names[0],
                    columns * CELL, rows * CELL, cells)  # fmt: skip
