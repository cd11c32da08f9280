"""The tiles that are chosen for kernels of grouped matmuls fit in the memory of the core, as the compiler says."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardplan.experts.grouped_matmul import grouped_matmul
from shardplan.experts.tiles import GroupedMatmul, fastest_tiles
from shardplan.hardware import parse_slice
from shardplan.verify.compiler.topology import make_topology_mesh

pytestmark = pytest.mark.usefixtures("tpu_compiler")

SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
OF_MODELS = {
    "deepseek": (32768, 8, 7168, 2048),
    "gpt-oss": (16384, 16, 2880, 2880),
    "qwen3-30b": (40960, 16, 2048, 768),
}
"""Rows, groups, elements of a token and of a hidden state."""


@pytest.mark.parametrize(
    "model", ["gpt-oss", *(pytest.param(m, marks=pytest.mark.whole) for m in OF_MODELS if m != "gpt-oss")]
)
@pytest.mark.parametrize(
    "generation", ["v5p", *(pytest.param(g, marks=pytest.mark.whole) for g in SLICES if g != "v5p")]
)
def test_chosen_tiles_compile(generation, model):
    """In the matmuls to hidden states and back, and in the gradients of both operands, which have their own tiles."""
    hardware = parse_slice(SLICES[generation])
    mesh = make_topology_mesh(hardware, {"replica": 1, "data": 1, "model": hardware.devices})
    rows, groups, embed, mlp = OF_MODELS[model]

    def block(x, up, down, sizes):
        hidden = grouped_matmul(x, up, sizes, hardware.generation)
        return jnp.square(grouped_matmul(hidden, down, sizes, hardware.generation).astype(jnp.float32)).sum()

    def abstract(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    shapes = [(rows, embed), (groups, embed, mlp), (groups, mlp, embed)]
    arrays = [abstract(shape, jnp.bfloat16) for shape in shapes]
    gradient = jax.jit(jax.grad(block, (0, 1, 2)))
    text = gradient.lower(*arrays, abstract((groups,), jnp.int32)).compile().as_text()
    expected = []
    for inner, columns in ((embed, mlp), (mlp, embed)):
        for is_gradient in (False, True):
            matmul = GroupedMatmul(rows, groups, inner, columns, is_matrix_gradient=is_gradient)
            expected.append(str(fastest_tiles(matmul, hardware.generation)))
    assert {*re.findall(r'ragged_dot_tiling="([\d,]+)"', text)} == {*expected}
