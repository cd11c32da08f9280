"""The exchange of a selection over a sharded dimension, against that of the TPU compiler."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardplan.cost.collectives import Purpose
from shardplan.cost.gspmd import device_cost
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import parse_slice
from shardplan.program.trace import Argument, trace_jaxpr
from shardplan.program.walk import build_step
from shardplan.verify.compiler.topology import make_topology_mesh

ROWS, VOCAB, K = 16, 3200, 40


def received_bytes(program, shards):
    """Bytes that a device receives in the collectives of a compiled program, all of elements of 4 bytes."""
    total = 0.0
    collective = r"= \(?[fs]32\[([\d,]+)\].* (all-to-all|all-gather|collective-permute)(?:-start)?\("
    for shape, kind in re.findall(collective, program):
        received = 1 if kind == "collective-permute" else (shards - 1) / shards
        total += 4 * received * math.prod(map(int, shape.split(",")))
    return total


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_bytes_are_those_of_the_compiler(tpu_compiler, shards):
    mesh = make_topology_mesh(parse_slice("v5p-16"), {"replica": 1, "data": 8 // shards, "model": shards})
    logits = jax.ShapeDtypeStruct(
        (ROWS, VOCAB), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data", "model"))
    )

    def select(logits):
        """Find the largest elements as `score_next_tokens` does."""
        candidates = jax.lax.top_k(logits.reshape(ROWS, shards, VOCAB // shards), K)[0].reshape(ROWS, -1)
        return jax.lax.top_k(candidates, K)[0]

    result = NamedSharding(mesh, PartitionSpec("data"))
    compiled = received_bytes(jax.jit(select, out_shardings=result).lower(logits).compile().as_text(), shards)
    plain = jax.make_jaxpr(lambda logits: jax.lax.top_k(logits, K)[0])(jnp.zeros((ROWS, VOCAB)))
    step = build_step(trace_jaxpr(plain, [Argument(("batch", "vocab"))]))
    assignment = ShardingAssignment(
        {"data": 8 // shards, "model": shards}, {"batch": ("data",), "vocab": ("model",)}, {}, {}, ("batch",)
    )
    collectives = [traffic for task in step.tasks for traffic in device_cost(task, assignment).traffic]
    assert {(traffic.purpose, traffic.mesh_axes) for traffic in collectives} == {(Purpose.SELECTIONS, ("model",))}
    assert sum(traffic.bytes for traffic in collectives) == pytest.approx(compiled)
