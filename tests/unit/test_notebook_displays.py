"""Plans, verdicts and parameters as notebooks show them."""

import dataclasses

import pytest
from report_plans import FITS, TOO_LARGE, judged, planned

from shardplan.errors import ConfigError
from shardplan.plan.mapping import mesh_text
from shardplan.report.page.panels.torus import make_tiling
from shardplan.report.plan.tables import spec_text


@pytest.mark.slow
def test_notebooks_draw_plans_and_verdicts_without_links():
    plan = planned("eval")
    for html in (plan._repr_html_(), judged(plan)._repr_html_(), judged(plan, TOO_LARGE)._repr_html_()):
        assert html.count("<rect") == plan.hardware.devices
        assert "href" not in html and "<script" not in html
    assert "does not fit" in judged(plan, TOO_LARGE)._repr_html_()


def test_a_notebook_compares_memory_with_what_decides():
    """With the usable memory where a plan does not fit, even if its peak is less than a device has."""
    plan = planned("eval")
    memory = dataclasses.replace(plan.memory, peak=plan.memory.usable + 2**27)
    assert memory.usable < memory.peak <= memory.available
    usable, available = (f" of {size / 2**30:.2f} GiB per device" for size in (memory.usable, memory.available))
    assert usable in dataclasses.replace(plan, memory=memory)._repr_html_() and available in plan._repr_html_()


def test_the_load_of_a_model_has_no_mfu():
    plan = planned("eval")
    load = dataclasses.replace(judged(plan), time=dataclasses.replace(FITS.time, model_flops=0.0, mfu=0.0))
    assert "2 s a step, by the TPU compiler" in str(load) and "MFU 25.0%" in str(judged(plan))


def test_what_shows_itself():
    """A short text beside the picture, and the text of the command where it is printed."""
    plan = planned("eval")
    bundle = plan._repr_mimebundle_()
    assert bundle["text/html"] == plan._repr_html_() and bundle["text/plain"].startswith("fits v5e-32: ")
    assert len(bundle["text/plain"].splitlines()) == 3 and "For Levanter:" in str(plan)
    assert str(judged(plan, TOO_LARGE)).splitlines()[-2].startswith("1.00 GiB too much")


def test_tiles_of_a_parameter(raises_message):
    plan = planned("eval")
    tiles = plan.tiles_of("mlp.gate_proj.weight")
    path, axes, sizes = str(tiles).splitlines()
    assert path == tiles.parameter.path == "segments[0].stacked.layers[0].mlp.gate_proj.weight"
    assert axes == f"layers 32, mlp 14336, embed 4096: {spec_text(tiles.parameter.spec)} on {mesh_text(plan.mesh)}"
    tiling = make_tiling(path, tiles.parameter.axes, tiles.parameter.spec, plan.mesh)
    assert sizes.startswith(f"{tiling.tiles} tiles of 32 x ")
    assert tiles._repr_html_().count("<rect") == plan.hardware.devices
    with raises_message(ConfigError):
        plan.tiles_of("mlp.gate_prj.weight")
    with raises_message(ConfigError):
        plan.tiles_of("weight")
