"""Parameters in a notebook: the tiles of one parameter, and a table of a model's arrays."""

import math

from shardplan.monitoring.audit import Audit
from shardplan.plan.file.parameters import Tiles
from shardplan.plan.mapping import axes_text, mesh_text, shard_count
from shardplan.report.notebook.drawing import draw_tiles
from shardplan.report.page.panels.torus import make_tiling
from shardplan.report.page.units import gib_text
from shardplan.report.plan.tables import spec_text
from shardplan.report.templating import environment


def tiles_html(tiles: Tiles) -> str:
    """Return the tiles of a parameter as HTML for a notebook."""
    parameter = tiles.parameter
    tiling = make_tiling(parameter.path, parameter.axes, parameter.spec, tiles.mesh)
    title, *lines = tiles_lines(tiles)
    drawing = draw_tiles(tiling, tiles.slice, tiles.mesh)
    return environment().get_template("tiles_short.html").render(title=title, lines=lines, **drawing)


def tiles_lines(tiles: Tiles) -> list[str]:
    """Describe the tiles of a parameter: its path, its axes with their sharding, and the size of a tile."""
    parameter, mesh = tiles.parameter, tiles.mesh
    count = shard_count(mesh, parameter.spec)
    dims = zip(parameter.axes.values(), parameter.spec, strict=True)
    sides = [-(-size // shard_count(mesh, [mesh_axes])) for size, mesh_axes in dims]
    copies = math.prod(mesh.values()) // count
    return [
        parameter.path,
        f"{axes_text(parameter.axes)}: {spec_text(parameter.spec)} on {mesh_text(mesh)}",
        f"{count} {'tile' if count == 1 else 'tiles'} of {' x '.join(map(str, sides))}, "
        f"{gib_text(parameter.bytes_per_device)}, each on {copies} {'device' if copies == 1 else 'devices'}",
    ]


def audit_html(audit: Audit) -> str:
    """Return the arrays of a model as an HTML table for a notebook."""
    total = sum(each.bytes_per_device for each in audit.arrays)
    template = environment().get_template("audit_short.html")
    return template.render(arrays=audit.arrays, total=total, gib=gib_text, axes_text=axes_text)
