"""Checks that the devices of this run are of the generation that a plan is for."""

import jax

from shardplan.errors import ConfigError
from shardplan.hardware import Slice
from shardplan.hardware.generations import generation_of_device


def check_generation(hardware: Slice) -> None:
    """Check that JAX's devices are of the slice's generation, because other generations have other memory and speed.

    Devices of a kind that has no hardware data pass.

    Raises:
        ConfigError: the devices are of another generation.
    """
    kind = jax.devices()[0].device_kind
    generation = generation_of_device(kind)
    if generation is not None and generation.name != hardware.generation.name:
        raise ConfigError(
            f"hardware.slice {hardware.name} is of {hardware.generation.name}, JAX sees {hardware.devices} devices of "
            f"{generation.name} ({kind}); run on that slice, plan with --dry_run, or name a slice of {generation.name}"
        )
