"""The environment in which a process uses libtpu, which contains the TPU compiler. Imports no JAX."""

import math

from shardplan.errors import ConfigError
from shardplan.hardware import Slice
from shardplan.model.corrections.levanter_compat import LIBTPU_RELEASE

INSTALL_LIBTPU = f"pip install 'libtpu=={LIBTPU_RELEASE}.*'"
"""Command that installs the version that pyproject.toml names; shardplan itself is on no package index."""


def libtpu_environment(hardware: Slice) -> dict[str, str]:
    """Return environment variables that, set before libtpu is first used, make it print nothing and stay offline.

    >>> from shardplan.hardware import parse_slice
    >>> libtpu_environment(parse_slice("v5e-4"))["JAX_PLATFORMS"]
    'cpu'

    Raises:
        ConfigError: `hardware` is not a TPU slice.
    """
    generation = check_is_tpu(hardware).generation
    cores = math.prod(generation.sizes[0]) * generation.name_counts_per_chip
    return {
        # JAX itself runs on the CPU; it must not look for a TPU
        "JAX_PLATFORMS": "cpu",
        # libtpu must not query Google Cloud's metadata server for the type of this machine ...
        "TPU_SKIP_MDS_QUERY": "1",
        # ... and complains if the type is not set. Any size works, because the topology is requested by its
        # torus; libtpu knows the smallest size of every generation, but not every size of v3.
        "TPU_ACCELERATOR_TYPE": f"{generation.name}-{cores}",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # without it a second process that uses libtpu at the same time aborts
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def check_is_tpu(hardware: Slice) -> Slice:
    """Return `hardware` if it is a TPU slice.

    >>> from shardplan.hardware import parse_slice
    >>> check_is_tpu(parse_slice("v5e-4")).name
    'v5e-4'
    >>> check_is_tpu(parse_slice("cpu-8"))
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: hardware.slice cpu-8 has no TPU compiler; plan for a TPU slice, such as v4-8

    Raises:
        ConfigError: `hardware` is not a TPU slice.
    """
    if hardware.is_cpu:
        raise ConfigError(f"hardware.slice {hardware.name} has no TPU compiler; plan for a TPU slice, such as v4-8")
    return hardware
