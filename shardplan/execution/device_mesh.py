"""Arranges JAX's devices as the mesh of a plan."""

import math

import jax
from jax.sharding import Mesh

from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.plan.arguments import check_plan
from shardplan.plan.plan import Plan
from shardplan.runtime.devices import arrange


def make_mesh(plan: Plan) -> Mesh:
    """Return the mesh of a plan, of all JAX devices; TPUs are placed on their torus as the plan assumes.

    Raises:
        ConfigError: JAX has more or fewer devices than the mesh.
    """
    check_plan("make_mesh", plan)
    required, available = math.prod(plan.mesh.values()), jax.device_count()
    if required != available:
        raise ConfigError(
            f"the mesh needs {required} devices, JAX has {available}; for virtual CPU devices set JAX_PLATFORMS=cpu "
            f"and JAX_NUM_CPU_DEVICES={required} before JAX is imported"
        )
    return arrange(jax.devices(), parse_slice(plan.hardware.slice), plan.mesh)
