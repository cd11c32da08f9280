"""The factors of the cost model, as they are kept in calibration.json."""

import json
from importlib import resources

import pytest

from shardplan.cost import calibration as module
from shardplan.cost.calibration import FILE, Calibration, calibration
from shardplan.hardware.generations import GENERATIONS


def test_every_generation_is_there():
    text = resources.files("shardplan.cost").joinpath(FILE).read_text(encoding="utf-8")
    assert list(json.loads(text)) == list(GENERATIONS)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_factors_are_sane(generation):
    """Nothing is faster than its roofline; what takes many times as long is no quirk of a compiler but a wrong fit."""
    factors = calibration(generation)
    assert 1 <= factors.products < 3
    assert 0 <= factors.elementwise < 5
    assert 1 <= factors.attention < 2
    assert 0 <= factors.rearranging < 50
    assert 0 <= factors.gathering < 20
    assert 0 <= factors.overlap <= 1
    assert 0 < factors.memory_error < 0.5
    least = factors.quirks.gathers_become_sums_from
    assert least is None or least > 1


def test_an_unknown_factor_is_refused(monkeypatch, tmp_path):
    (tmp_path / FILE).write_text('{"v4": {"product": 1.2}}', encoding="utf-8")
    monkeypatch.setattr(module.resources, "files", lambda package: tmp_path)
    calibration.cache_clear()
    with pytest.raises(TypeError, match="product"):
        calibration("v4")


def test_what_was_not_fitted_has_plain_rooflines():
    factors = calibration("cpu")
    assert factors == Calibration()
    assert factors.products == factors.elementwise == factors.attention == 1
