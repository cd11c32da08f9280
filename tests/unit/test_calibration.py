"""The factors of the cost model in calibration.json."""

import json
from importlib import resources

import pytest

from shardplan.cost import calibration as module
from shardplan.cost.calibration import FILE, Calibration, load_calibration
from shardplan.hardware.generations import GENERATIONS


def test_every_generation_has_factors():
    text = resources.files("shardplan.cost").joinpath(FILE).read_text(encoding="utf-8")
    assert list(json.loads(text)) == list(GENERATIONS)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_factors_are_plausible(generation):
    """No work is faster than its roofline; a factor of many times the roofline would be a wrong fit, not a quirk."""
    factors = load_calibration(generation)
    assert 1 <= factors.products < 3
    assert 0 <= factors.elementwise < 5
    assert 1 <= factors.attention < 2
    assert 0 <= factors.rearranging < 50
    assert 0 <= factors.gathering < 20
    assert 0 <= factors.overlap <= 1
    assert 0 < factors.memory_error < 0.5
    min_devices = factors.quirks.gathers_become_sums_from
    assert min_devices is None or min_devices > 1


def test_an_unknown_factor_raises(monkeypatch, tmp_path):
    (tmp_path / FILE).write_text('{"v4": {"product": 1.2}}', encoding="utf-8")
    monkeypatch.setattr(module.resources, "files", lambda package: tmp_path)
    load_calibration.cache_clear()
    with pytest.raises(TypeError, match="product"):
        load_calibration("v4")


def test_a_generation_without_a_fit_has_plain_rooflines():
    factors = load_calibration("cpu")
    assert factors == Calibration()
    assert factors.products == factors.elementwise == factors.attention == 1
