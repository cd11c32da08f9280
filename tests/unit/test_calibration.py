"""The factors of the cost model in calibration.json, and the programs that they are fitted to."""

import json
from dataclasses import replace
from importlib import resources

import pytest
from factor_fits import GATHERS_LATE, GROUPS, TILE_GROUPS, TRAINING
from fitted_programs import FITTED, VMEM_KIB
from planner_record import CALIBRATION, read_records

from shardplan.cost import calibration as module
from shardplan.cost.calibration import FILE, Calibration, load_calibration
from shardplan.hardware.generations import GENERATIONS


@pytest.fixture(scope="module")
def entries():
    return json.loads(resources.files("shardplan.cost").joinpath(FILE).read_text(encoding="utf-8"))


def test_every_generation_has_factors_or_those_of_another(entries):
    assert {row.factors_of or name for name, row in GENERATIONS.items()} == {*entries} == {*FITTED}
    assert load_calibration("v3") == load_calibration("v4")


@pytest.mark.parametrize("larger_tiles", [False, True])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_factors_are_plausible(generation, larger_tiles):
    """No work is faster than its roofline; a factor of many times the roofline would be a wrong fit, not a quirk."""
    factors = load_calibration(generation, larger_tiles)
    assert factors.vmem_kib == (VMEM_KIB.get(generation) if larger_tiles else None)
    assert factors.training is not None
    for each in (factors, factors.training):
        assert 1 <= each.products < 2
        assert 1 <= each.elementwise < 5
    assert 1 <= factors.copying < 15
    assert 0 <= factors.overlap <= 1
    min_devices = factors.quirks.gathers_become_sums_from
    assert min_devices is None or min_devices > 1


@pytest.mark.parametrize("generation", FITTED)
def test_every_factor_names_the_programs_that_it_was_fitted_to(entries, generation):
    recorded = {record.layout.label for record in read_records(CALIBRATION).values() if record.result.fits}
    entry = entries[generation]
    assert [tuple(fit["factors"]) for fit in entry["fits"]] == [group.factors for group in GROUPS]
    of_trainings = {f"{TRAINING}{name}" for name in entry["training"]}
    fitted = {factor for fit in entry["fits"] for factor in fit["factors"]}
    quirks = entry["quirks"].keys() - {"gathers_late"}
    assert ("gathers_late" in entry["quirks"]) == (generation in GATHERS_LATE)
    assert {*entry["factors"], *quirks, *of_trainings} <= fitted
    tiled = entry["larger_tiles"]["fits"] if generation in VMEM_KIB else []
    assert [tuple(fit["factors"]) for fit in tiled] == [
        group.factors for group in TILE_GROUPS if generation in VMEM_KIB
    ]
    for fit in (*entry["fits"], *tiled):
        assert {case.split(maxsplit=1)[1] for case in recorded if case.startswith(generation)} >= {*fit["cases"]}
        assert fit["cases"] and fit["residual"] >= 0 and fit["leave_one_out"] >= 0


@pytest.mark.parametrize("generation", FITTED)
def test_times_hold_for_programs_that_are_left_out(entries, generation):
    """A factor that one program decides has a leave-one-out error far above its residual."""
    entry = entries[generation]
    for fits in (entry["fits"], *([entry["larger_tiles"]["fits"]] if generation in VMEM_KIB else [])):
        (compute,) = (fit for fit in fits if "products" in fit["factors"])
        assert compute["residual"] <= compute["leave_one_out"] < 0.17


def test_an_unknown_factor_raises(monkeypatch, tmp_path):
    (tmp_path / FILE).write_text(
        '{"v4": {"factors": {"product": 1.2}, "training": {}, "quirks": {}}}', encoding="utf-8"
    )
    monkeypatch.setattr(module.resources, "files", lambda package: tmp_path)
    load_calibration.cache_clear()
    with pytest.raises(TypeError, match="product"):
        load_calibration("v4")


def test_a_generation_without_a_fit_has_plain_rooflines_and_says_so(monkeypatch, caplog):
    monkeypatch.setitem(GENERATIONS, "v9", replace(GENERATIONS["v4"], name="v9"))
    assert load_calibration("v9") == Calibration()
    assert "no factors are fitted for v9" in caplog.text


def test_virtual_devices_have_plain_rooflines():
    factors = load_calibration("cpu")
    assert factors == Calibration()
    assert factors.products == factors.elementwise == factors.copying == 1
