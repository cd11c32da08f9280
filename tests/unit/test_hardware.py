"""Slice names and their sizes; complaints name the nearest valid one."""

import math

import pytest

from shardplan.errors import ConfigError
from shardplan.hardware import GENERATIONS, parse_slice


@pytest.mark.parametrize(
    ("name", "devices", "torus"),
    [
        ("v3-32", 32, (4, 4)),
        ("v4-8", 4, (2, 2, 1)),
        ("v4-256", 128, (4, 4, 8)),
        ("v5p-128", 64, (4, 4, 4)),
        ("v5e-256", 256, (16, 16)),
        ("v5litepod-16", 16, (4, 4)),
        ("v6e-8", 8, (2, 4)),
        ("tpu7x-128", 128, (4, 4, 4)),
        ("cpu-6", 6, (6,)),
    ],
)
def test_devices_of_a_slice(name, devices, torus):
    found = parse_slice(name)
    assert (found.devices, found.torus) == (devices, torus)


def test_sizes_grow():
    for generation in GENERATIONS.values():
        chips = [math.prod(torus) for torus in generation.sizes]
        assert chips == sorted(set(chips))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v4-250", "hardware.slice 'v4-250': v4 does not come in size 250; did you mean 'v4-256'?"),
        ("v9-256", "hardware.slice 'v9-256': unknown generation 'v9'; did you mean"),
        ("banana", "hardware.slice 'banana': unknown generation 'banana'; valid: cpu, tpu7x, v3, v4, v5e, v5p, v6e"),
        ("cpu-0", "needs 1 to 4096 virtual devices, as in 'cpu-8'"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(ConfigError, match=None) as error:
        parse_slice(name)
    assert message in str(error.value)
