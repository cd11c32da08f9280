"""Slice names and sizes; error messages name the nearest valid slice."""

import itertools
import math
import re

import pytest
from jax.experimental.pallas import tpu as pltpu

from shardplan.errors import ConfigError
from shardplan.hardware import (
    GENERATIONS,
    accelerator_type,
    chips_per_host,
    host_count,
    parse_slice,
    standard_slices,
    topology,
)


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
        ("v4:4x4x8", 128, (4, 4, 8)),
        ("v4:8x4x4", 128, (8, 4, 4)),
        ("v4:4x4x64", 1024, (4, 4, 64)),
        ("v5e:1x1", 1, (1, 1)),
        ("v5litepod:4x8", 32, (4, 8)),
        ("v4:12x12x24", 3456, (12, 12, 24)),
        ("v5p:4x2x4", 32, (4, 2, 4)),
        ("v6e:16x16", 256, (16, 16)),
        ("tpu7x:16x16x24", 12288, (16, 16, 24)),
    ],
)
def test_devices_of_a_slice(name, devices, torus):
    hardware = parse_slice(name)
    assert (hardware.devices, hardware.torus, hardware.slices, hardware.name) == (devices, torus, 1, name)


@pytest.mark.parametrize(
    ("name", "slices", "devices", "torus"),
    [
        ("2xv6e-256", 2, 512, (16, 16)),
        ("4xv4:4x4x8", 4, 512, (4, 4, 8)),
        ("3xtpu7x-128", 3, 384, (4, 4, 4)),
        ("1xv4-8", 1, 4, (2, 2, 1)),
    ],
)
def test_several_slices(name, slices, devices, torus):
    hardware = parse_slice(name)
    assert (hardware.slices, hardware.devices, hardware.torus) == (slices, devices, torus)


@pytest.mark.parametrize(("name", "chips"), [("v4-256", 4), ("2xv6e-16", 4), ("v5e-1", 1)])
def test_the_network_of_a_host(name, chips):
    hardware = parse_slice(name)
    assert hardware.host_network_bandwidth == chips * hardware.generation.network_bandwidth


@pytest.mark.parametrize(
    ("name", "type_", "hosts", "chips"),
    [
        ("v3-8", "v3-8", 1, 4),
        ("v4-256", "v4-256", 32, 4),
        ("v4:4x4x8", "v4-256", 32, 4),
        ("v4:8x4x4", "v4-256", 32, 4),
        ("v4:4x4x12", None, 48, 4),
        ("v5e-1", "v5litepod-1", 1, 1),
        ("v5e-8", "v5litepod-8", 1, 8),
        ("v5e-16", "v5litepod-16", 4, 4),
        ("2xv5e-256", "v5litepod-256", 128, 4),
        ("v5p-16", "v5p-16", 2, 4),
        ("v6e-8", "v6e-8", 1, 8),
        ("tpu7x-128", "tpu7x-128", 16, 4),
    ],
)
def test_names_and_hosts_on_google_cloud(name, type_, hosts, chips):
    hardware = parse_slice(name)
    assert (accelerator_type(hardware), host_count(hardware), chips_per_host(hardware)) == (type_, hosts, chips)


def test_topologies_on_google_cloud_are_ascending():
    assert topology(parse_slice("v4:12x4x4")) == "4x4x12"


def test_every_generation_has_its_names_on_google_cloud():
    for generation in GENERATIONS.values():
        for hardware in standard_slices(generation):
            assert accelerator_type(hardware) == hardware.name.replace("v5e", "v5litepod")
            assert host_count(hardware) * chips_per_host(hardware) == math.prod(hardware.torus)


def test_standard_sizes_by_torus():
    for generation in GENERATIONS.values():
        for torus in generation.sizes:
            assert parse_slice(f"{generation.name}:{'x'.join(map(str, torus))}").torus == torus


@pytest.mark.parametrize(
    ("name", "flops_per_cycle"),
    [
        ("v3", 2 * 2 * 128**2),
        ("v4", 8 * 2 * 128**2),
        ("v5e", 4 * 2 * 128**2),
        ("v5p", 8 * 2 * 128**2),
        ("v6e", 2 * 2 * 2 * 256**2),
        ("tpu7x", 2 * 2 * 2 * 256**2),
    ],
)
def test_clock_gives_the_peak_flops(name, flops_per_cycle):
    generation = GENERATIONS[name]
    assert generation.clock * flops_per_cycle == pytest.approx(generation.flops, rel=0.01)


def test_names_of_standard_slices():
    """Every name is parsed as the slice that it is the name of."""
    names = [each.name for generation in GENERATIONS.values() for each in standard_slices(generation)]
    assert {"v3-32", "v4-256", "v5e-1", "v5p-128", "v6e-8", "tpu7x-128"} < {*names} and len(names) == len({*names})
    for generation in GENERATIONS.values():
        assert [parse_slice(each.name) for each in standard_slices(generation)] == [*standard_slices(generation)]


def test_sizes_are_ascending():
    for generation in GENERATIONS.values():
        chips = [math.prod(torus) for torus in generation.sizes]
        assert chips == sorted(set(chips))


V4_TOPOLOGIES = "topologies: 2x2x1, 2x2x2, 2x2x4, 2x4x4, and multiples of 4x4x4 up to 4096 chips"
V5E_TOPOLOGIES = "topologies: 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v4-250", "hardware.slice 'v4-250': v4 has no slice of size 250; did you mean 'v4-256'?"),
        ("v9-256", "hardware.slice 'v9-256': unknown generation 'v9'; valid: cpu, tpu7x, v3, v4, v5e, v5p, v6e"),
        ("h100-8", "hardware.slice 'h100-8': unknown generation 'h100'; valid: cpu, tpu7x, v3, v4, v5e, v5p, v6e"),
        ("v5-8", "hardware.slice 'v5-8': unknown generation 'v5'; did you mean v5e or v5p?"),
        ("banana", "hardware.slice 'banana': unknown generation 'banana'; valid: cpu, tpu7x, v3, v4, v5e, v5p, v6e"),
        ("cpu-0", "needs 1 to 4096 virtual devices, for example 'cpu-8'"),
        ("cpu", "hardware.slice 'cpu': the size is missing; write for example 'cpu-8'"),
        ("2xcpu-4", "hardware.slice '2xcpu-4': virtual CPU devices are always one slice; write for example 'cpu-8'"),
        ("2xv4-250", "v4 has no slice of size 250; did you mean '2xv4-256'?"),
        ("0xv4-256", "hardware.slice '0xv4-256': needs 1 to 1024 slices, for example '2xv4-256'"),
        ("v4:4x4", "hardware.slice 'v4:4x4': a v4 torus has 3 dimensions, not 2; did you mean 'v4:2x2x4'?"),
        ("v6e:4x4x4", "a v6e torus has 2 dimensions, not 3; did you mean 'v6e:8x8'?"),
        ("v4:3x4x4", f"v4 has no topology 3x4x4; did you mean 'v4:4x4x4'? ({V4_TOPOLOGIES})"),
        ("v4:2x2x3", f"v4 has no topology 2x2x3; did you mean 'v4:2x2x4'? ({V4_TOPOLOGIES})"),
        ("v4:2x10x2", f"v4 has no topology 2x10x2; did you mean 'v4:2x4x4'? ({V4_TOPOLOGIES})"),
        ("v4:3x5x7", "v4 has no topology 3x5x7; did you mean 'v4:4x4x8'?"),
        ("v5e:2x8", f"hardware.slice 'v5e:2x8': v5e has no topology 2x8; did you mean 'v5e:4x4'? ({V5E_TOPOLOGIES})"),
        ("v6e:2x8", f"hardware.slice 'v6e:2x8': v6e has no topology 2x8; did you mean 'v6e:4x4'? ({V5E_TOPOLOGIES})"),
        ("v5litepod:4x16", "v5e has no topology 4x16; did you mean 'v5e:8x8'?"),
        ("v3:2x6", "v3 has no topology 2x6; did you mean 'v3:4x4'?"),
        ("v6e:3x17", "v6e has no topology 3x17; did you mean 'v6e:8x8'?"),
        ("2xv5e:5x5", "v5e has no topology 5x5; did you mean '2xv5e:4x8'?"),
        ("v4:0x2x2", "v4 has no topology 0x2x2; did you mean 'v4:2x2x1'?"),
        ("v4:2x2x1536", "the largest v4 slice is 16x16x16; did you mean 'v4:16x16x16'?"),
        ("v4:16x16x24", "the largest v4 slice is 16x16x16; did you mean 'v4:16x16x16'?"),
        ("v5e:16x32", "the largest v5e slice is 16x16; did you mean 'v5e:16x16'?"),
        ("v4:4x4x", "hardware.slice 'v4:4x4x': the size is missing; write for example 'v4-16' or 'v4:2x2x2'"),
        ("TPU v5 lite", "hardware.slice 'TPU v5 lite': the size is missing; write for example 'v5e-4' or 'v5e:2x2'"),
        ("v4-" + "9" * 5000, "the size is missing; write for example 'v4-16' or 'v4:2x2x2'"),
        ("v4:" + "9" * 9 + "x2x2", "the largest v4 slice is 16x16x16; did you mean 'v4:16x16x16'?"),
        ("V5E-17", "hardware.slice 'V5E-17': v5e has no slice of size 17; did you mean 'v5e-16'?"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(ConfigError, match=None) as error:
        parse_slice(name)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("V5E-16", "v5e-16"), ("v5p8", "v5p-8"), ("v5e_16", "v5e-16"), ("tpu-v5p-8", "v5p-8"), ("v7x-8", "tpu7x-8"),
        ("v5e-4x4", "v5e:4x4"), ("v5e16x16", "v5e:16x16"), ("v4-2x2x2", "v4:2x2x2"), ("v5e:16", "v5e-16"),
        ("v5litepod16", "v5e-16"), ("TPU v4-8", "v4-8"), ("tpuv4-8", "v4-8"), ("v5-lite-16", "v5e-16"),
        ("v6e8", "v6e-8"),
        ("trillium-8", "v6e-8"), ("ironwood:4x4x4", "tpu7x:4x4x4"), ("tpu7x8", "tpu7x-8"), ("2x v5e-16", "2xv5e-16"),
        ("2xV5E16", "2xv5e-16"), ("4*v6e-8", "4xv6e-8"), ("v5e 16 chips", "v5e-16"), ("cpu8", "cpu-8"),
        ("cpu:8", "cpu-8"),
        ("CPU-8", "cpu-8"), ("v4-16 ", "v4-16"),
    ],
)  # fmt: skip
def test_other_spellings_are_suggested(name, spelled):
    """What is suggested is a name."""
    with pytest.raises(ConfigError) as error:
        parse_slice(name)
    assert str(error.value) == f"hardware.slice {name!r}: did you mean {spelled!r}?"
    assert parse_slice(spelled).name == spelled


@pytest.mark.parametrize("generation", GENERATIONS.values(), ids=lambda generation: generation.name)
def test_a_suggested_torus_is_an_available_size(generation):
    """Odd sides are no topology; whatever is suggested instead is in the generation's own list."""
    rank, refused = len(generation.sizes[0]), 0
    for sides in itertools.product((0, 3, 5, 7, 18, 10**6), repeat=rank):
        name = f"2x{generation.name}:{'x'.join(map(str, sides))}"
        try:
            parse_slice(name)
        except ConfigError as error:
            refused += 1
            suggested = re.search(rf"did you mean '2x{generation.name}:([0-9x]+)'", str(error))
            assert suggested and tuple(map(int, suggested[1].split("x"))) in generation.sizes, str(error)
    assert refused > 5**rank


@pytest.mark.parametrize("name", GENERATIONS)
def test_core_memory(name):
    """As JAX has it, whose figure kernels take when they are compiled."""
    chip = pltpu.ChipVersion(name.removeprefix("tpu"))
    assert GENERATIONS[name].core_memory == pltpu.get_tpu_info_for_chip(chip, 1).vmem_capacity_bytes
