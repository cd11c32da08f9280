"""The planner's estimates of every compiled layout in docs/benchmarks/planner.json, made anew: they may not get worse.

The bounds are the errors that the estimates have, rounded up. A change that makes them worse fails here, and one that
makes them better lowers the bounds.
"""

import statistics

import pytest
from planner_record import errors_by_family, read_records

MIN_LAYOUTS = 40
"""Layouts written by hand, at least: a search compares layouts far from the best, too, and may prefer a wrong one."""
BOUNDS = {
    # family -> median and worst error of peak memory, of the bytes of all collectives, and of the step time
    "dense eval": {"peak": (0.002, 0.11), "received": (0.001, 0.16), "step": (0.044, 0.25)},
    "dense train": {"peak": (0.021, 0.09), "received": (0.016, 0.6), "step": (0.037, 0.16)},
    "experts": {"peak": (0.026, 0.09), "received": (0.001, 0.05), "step": (0.027, 0.12)},
}


@pytest.fixture(scope="module")
def records():
    return list(read_records().values())


@pytest.fixture(scope="module")
def families(records):
    return errors_by_family(records)


@pytest.mark.parametrize("quantity", ["peak", "received", "step"])
@pytest.mark.parametrize("family", BOUNDS)
def test_estimates_are_as_good_as_recorded(families, family, quantity):
    errors = [abs(error) for each in families[family] if (error := getattr(each, quantity)) is not None]
    median, worst = BOUNDS[family][quantity]
    assert statistics.median(errors) <= median
    assert max(errors) <= worst


def test_nothing_that_the_compiler_refuses_is_predicted_to_fit(records):
    refused = [record.layout for record in records if not record.result.fits]
    assert refused and not [layout.label for layout in refused if layout.estimate().memory.fits]


def test_most_layouts_are_not_those_of_plans(records):
    labels = (record.layout.label for record in records)
    assert sum(", " in label and "microbatches" not in label for label in labels) >= MIN_LAYOUTS
