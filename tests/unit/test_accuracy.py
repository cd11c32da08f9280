"""The planner's estimates of every compiled layout in docs/benchmarks, made anew: they may not get worse.

The bounds are the errors that the estimates have, rounded up. A change that makes them worse fails here, and one that
makes them better lowers the bounds.
"""

import math
import statistics

import pytest
from bench_experts import expert_errors
from bench_planner import LAYOUTS, STYLES
from planner_record import PLANNER, errors_by_family, read_records

from shardplan.cost.calibration import MEMORY_ERROR, STEP_ERROR

MIN_LAYOUTS = 18
"""Layouts written by hand, at least."""
BOUNDS = {
    # family of planner.json -> median and worst error of peak memory, of all bytes, and of steps
    "dense eval": {"peak": (0.002, 0.026), "received": (0.001, 0.095), "step": (0.035, 0.176)},
    "dense train": {"peak": (0.010, 0.042), "received": (0.001, 0.255), "step": (0.049, 0.168)},
    "experts": {"peak": (0.001, 0.03), "received": (0.001, 0.048), "step": (0.039, 0.143)},
    "ring attention": {"peak": (0.002, 0.005), "received": (0.001, 0.001), "step": (0.010, 0.076)},
}

BOUNDS_OF_EXPERTS = {
    # row of the table of errors of experts.md -> the same; compiled rings take longer than measured ones, whose price
    # they have, and the worst bytes are few
    ("plans and layouts by hand", "not a ring"): {
        "peak": (0.008, 0.083), "received": (0.001, 0.046), "step": (0.06, 0.19),
    },
    ("candidates", "not a ring"): {"peak": (0.017, 0.076), "received": (0.001, 1.6), "step": (0.074, 0.223)},
    ("candidates", "ring"): {"peak": (0.023, 0.05), "received": (0.001, 0.06), "step": (0.103, 0.34)},
}  # fmt: skip


@pytest.mark.slow
def test_estimates_are_as_good_as_recorded():
    """One test of all laws about estimates: to estimate every layout takes a while, and each worker has to do it."""
    records = list(read_records(PLANNER).values())
    families = errors_by_family(records)
    assert not list(worse_families(families, BOUNDS))
    assert not list(worse_families(expert_errors(), BOUNDS_OF_EXPERTS))
    steps = sorted(abs(each.step) for errors in families.values() for each in errors if each.step is not None)
    assert steps[math.ceil(0.9 * len(steps)) - 1] <= STEP_ERROR
    refused = [each for each in records if not each.result.fits]
    assert refused and not [each.layout.label for each in refused if each.layout.estimate.memory.fits]
    fitting = [(each.layout.estimate.memory, each.result.peak) for each in records if each.result.fits]
    assert max(abs(peak - memory.peak) / memory.available for memory, peak in fitting) <= MEMORY_ERROR


def worse_families(families, bounds):
    """Family, quantity, median and worst error of those above their bounds."""
    for family, of_family in bounds.items():
        for quantity, (median, worst) in of_family.items():
            errors = [abs(error) for each in families[family] if (error := getattr(each, quantity)) is not None]
            if statistics.median(errors) > median or max(errors) > worst:
                yield family, quantity, statistics.median(errors), max(errors)


def test_many_layouts_are_written_by_hand():
    """A search compares layouts far from the best, too, and may prefer one whose estimate is wrong."""
    labels = [record.layout.label for record in read_records(PLANNER).values()]
    by_hand = [label for label in labels if label.rpartition(", ")[2] in STYLES]
    assert len(by_hand) >= MIN_LAYOUTS
    assert {label.partition(", ")[0] for label in by_hand} == {*LAYOUTS}
