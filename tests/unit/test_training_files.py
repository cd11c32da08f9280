"""The peak of a device that a training step needs, estimated anew, against what the TPU compiler made of the same file.

The compiled figures are those of docs/benchmarks/levanter.md. A bound is the error that the estimate has, rounded up.
"""

import re

import pytest
from bench_levanter import FILES, linted_case
from conftest import ROOT

from shardplan.hardware import GIB

PAGE = (ROOT / "docs" / "benchmarks" / "levanter.md").read_text()
BOUNDS = {
    "llama8b": 0.01, "gemma7b": 0.02, "mistral7b": 0.04, "qwen3-32b": 0.02, "olmo2-32b": 0.04, "mixtral": 0.06,
    "llama70b": 0.06, "schedule": 0.03, "bfloat16-lion": 0.09, "average-float32": 0.14,
}  # fmt: skip
"""File -> bound of the error of its peak."""
QUICK = ("llama8b", "mixtral", "schedule")
"""Files that are estimated in every run."""


def compiled_gib(name):
    (line,) = re.findall(rf"^\| \[{re.escape(name)}\].*$", PAGE, flags=re.MULTILINE)
    cells = [cell.strip() for cell in line.split("|")]
    header = next(line for line in PAGE.splitlines() if line.startswith("| file |"))
    columns = [cell.strip() for cell in header.split("|")]
    return float(cells[columns.index("compiled GiB")])


def test_every_file_has_a_bound():
    assert BOUNDS.keys() == FILES.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.whole) for name in BOUNDS]
)
def test_peaks_are_as_good_as_recorded(name):
    estimate = linted_case(name).plan.memory.peak / GIB
    assert abs(estimate / compiled_gib(name) - 1) <= BOUNDS[name]
