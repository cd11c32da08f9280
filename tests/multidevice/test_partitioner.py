"""Gathers of parameters as planned, beside those that XLA's partitioner makes of the same program."""

import json
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.cost.gspmd import GATHER, device_cost
from shardplan.cost.sharding import ShardingAssignment
from shardplan.program.tasks import prepare
from shardplan.program.trace import trace_jaxpr

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
"""Mesh, mesh axes of the batch, mapping of parameters at rest, mesh axes of mlp while computing."""


def product(x, weight):
    return jnp.einsum("bpe,me->bpm", x, weight)


def partitioned(sizes, batch, resting, computing):
    """Elements of the results of all-gathers."""
    mesh = Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), AXES)

    def at(*spec):
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))

    x = jax.ShapeDtypeStruct((BATCH, POSITION, EMBED), jnp.float32, sharding=at(batch, (), ()))
    weight = jax.ShapeDtypeStruct(
        (MLP, EMBED), jnp.float32, sharding=at(resting.get("mlp", ()), resting.get("embed", ()))
    )
    program = jax.jit(product, out_shardings=at(batch, (), computing)).lower(x, weight).compile().as_text()
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", program)
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


def planned(sizes, batch, resting, computing):
    arguments = [(("batch", "position", "embed"), None), (("mlp", "embed"), "weight")]
    shapes = [
        jax.ShapeDtypeStruct((BATCH, POSITION, EMBED), jnp.float32),
        jax.ShapeDtypeStruct((MLP, EMBED), jnp.float32),
    ]
    step = prepare(trace_jaxpr(jax.make_jaxpr(product)(*shapes), arguments))
    layout = ShardingAssignment(
        dict(zip(AXES, sizes, strict=True)), {"batch": batch, "mlp": computing}, resting, {}, ("batch", "position")
    )
    (gather,) = [t for task in step.tasks for t in device_cost(task, layout).traffic if t.cause.startswith(GATHER)]
    devices = math.prod(layout.mesh[axis] for axis in gather.mesh_axes)
    return [round(gather.bytes / 4 * devices / (devices - 1))]


@pytest.fixture(scope="module")
def found():
    """What the partitioner makes of CASES, in a process that has devices enough."""
    output = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True).stdout
    return json.loads(output)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gathers(found, case):
    assert found[CASES.index(case)] == planned(*case)


def test_the_partitioner_takes_one_mesh_axis_for_another(found):
    """As large as model, replica is taken for it: all of the weight is gathered, not a half."""
    assert found[0] == [MLP * EMBED]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(json.dumps([partitioned(*case) for case in CASES]))
