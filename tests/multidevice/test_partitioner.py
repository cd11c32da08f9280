"""Elements of weight gathers: predicted, and as XLA's partitioner makes them for the same program."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.cost.collectives import Purpose
from shardplan.cost.gspmd import device_cost
from shardplan.cost.sharding import ShardingAssignment
from shardplan.program.trace import Argument, trace_jaxpr
from shardplan.program.walk import build_step

AXES = ("replica", "data", "model")
BATCH, POSITION, MLP, EMBED = 48, 8, 96, 48
DEVICES = 16
BOTH, DATA = ("replica", "data"), ("data",)

CASES = (
    ((2, 4, 2), BOTH, {"mlp": ("model", "data")}, ("model",)),
    ((2, 4, 2), BOTH, {"mlp": ("model", "replica")}, ("model",)),
    ((4, 2, 2), BOTH, {"mlp": ("model", "data")}, ("model",)),
    ((4, 2, 2), BOTH, {"mlp": ("model", "replica")}, ("model",)),
    ((2, 2, 4), BOTH, {"mlp": ("model", "data")}, ("model",)),
    ((2, 2, 2), BOTH, {"mlp": ("model", "replica", "data")}, ("model",)),
    ((2, 4, 2), BOTH, {"mlp": ("model",), "embed": ("data",)}, ("model",)),
    ((2, 4, 2), BOTH, {"mlp": ("model",), "embed": ("replica", "data")}, ("model",)),
    ((2, 2, 2), DATA, {"mlp": ("model", "replica", "data")}, ("model", "replica")),
    ((2, 2, 2), DATA, {"mlp": ("model", "replica"), "embed": ("data",)}, ("model", "replica")),
    ((2, 3, 2), BOTH, {"mlp": ("model", "data")}, ("model",)),
    ((1, 2, 3), DATA, {"mlp": ("model", "data")}, ("model",)),
)
"""Mesh sizes, mesh axes of the batch, mapping of parameters, mesh axes of mlp in the compute mapping."""


def project(x, weight):
    return jnp.einsum("bpe,me->bpm", x, weight)


def partitioned(sizes, batch, params, compute):
    """Elements of the results of all-gathers in the compiled program."""
    mesh = Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), AXES)

    def at(*spec):
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))

    x = jax.ShapeDtypeStruct((BATCH, POSITION, EMBED), jnp.float32, sharding=at(batch, (), ()))
    weight = jax.ShapeDtypeStruct(
        (MLP, EMBED), jnp.float32, sharding=at(params.get("mlp", ()), params.get("embed", ()))
    )
    program = jax.jit(project, out_shardings=at(batch, (), compute)).lower(x, weight).compile().as_text()
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", program)
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


def predicted(sizes, batch, params, compute):
    """Elements of the result of the predicted all-gather."""
    arguments = [Argument(("batch", "position", "embed")), Argument.parameter(("mlp", "embed"), "weight")]
    shapes = [
        jax.ShapeDtypeStruct((BATCH, POSITION, EMBED), jnp.float32),
        jax.ShapeDtypeStruct((MLP, EMBED), jnp.float32),
    ]
    step = build_step(trace_jaxpr(jax.make_jaxpr(project)(*shapes), arguments))
    assignment = ShardingAssignment(
        dict(zip(AXES, sizes, strict=True)), {"batch": batch, "mlp": compute}, params, {}, ("batch", "position")
    )
    collectives = [t for task in step.tasks for t in device_cost(task, assignment).traffic]
    (gather,) = [t for t in collectives if t.purpose is Purpose.WEIGHTS]
    devices = math.prod(assignment.mesh[axis] for axis in gather.mesh_axes)
    return [round(gather.bytes / 4 * devices / (devices - 1))]


@pytest.fixture(scope="module")
def compiled_elements():
    """The result of `partitioned` for each of CASES, from a process with enough devices."""
    from processes import fork_python  # the process runs this file too, and does not find modules of tests

    process = fork_python([__file__])
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(output)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gathers(compiled_elements, case):
    assert compiled_elements[CASES.index(case)] == predicted(*case)


def test_the_partitioner_confuses_mesh_axes_of_equal_size(compiled_elements):
    """With `replica` as large as `model`, the weight is gathered to replicas, although each device needs half of it."""
    assert compiled_elements[0] == [MLP * EMBED]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(json.dumps([partitioned(*case) for case in CASES]))
