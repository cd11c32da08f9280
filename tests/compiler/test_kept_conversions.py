"""What the TPU compiler makes of the conversion of kept weights: one pass over codes, gathered as such."""

import re

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from shardplan.hardware import parse_slice
from shardplan.model.dtypes.kept_weights import KeptWeight, numbers_of
from shardplan.verify.compiler.topology import make_topology_mesh

pytestmark = pytest.mark.usefixtures("tpu_compiler")

Layers, Mlp, Embed, Tokens = hax.make_axes(layers=3, mlp=2048, embed=1024, tokens=512)
BLOCK = 128


@pytest.mark.parametrize("slice_name", ["v5p:2x2x1", "v6e:2x2"])
def test_a_loop_converts_one_layer_at_a_time(slice_name):
    """No scale is written for every code, no number is made before the loop, and codes are gathered."""
    hardware = parse_slice(slice_name)
    mesh = make_topology_mesh(hardware, {"replica": 1, "data": 2, "model": 2})

    def abstract(dtype, spec, *axes):
        struct = jax.ShapeDtypeStruct([axis.size for axis in axes], dtype, sharding=NamedSharding(mesh, spec))
        return NamedArray(struct, axes)

    blocks = Axis("mlp_by_128", Mlp.size // BLOCK), Axis("embed_by_128", Embed.size // BLOCK)
    weight = KeptWeight(
        abstract(jnp.float8_e4m3fn, PartitionSpec(None, "model", "data"), Layers, Mlp, Embed),
        abstract(jnp.float32, PartitionSpec(), Layers, *blocks),
    )

    def compute(x, weight):
        def body(x, weight):
            numbers = numbers_of(weight, jnp.bfloat16)
            return hax.dot(hax.dot(x, numbers, axis=Embed), numbers, axis=Mlp)

        with hax.axis_mapping({"mlp": "model", "tokens": "data"}):
            return hax.fold(body, Layers)(x, weight)

    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(compute).lower(abstract(jnp.bfloat16, PartitionSpec("data"), Tokens, Embed), weight).compile()
        )
    text, local = compiled.as_text(), Mlp.size // 2 * Embed.size
    gathered = re.findall(r"= (\w+)\[[\d,]+\]\S* all-gather\(", text)
    assert set(gathered) == {"f8e4m3fn"}
    # the numbers of a layer, and less than those of two
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 2 * local + 2 * 2 * Tokens.size * Mlp.size
    main = text[text.index("ENTRY ") :]
    assert not re.search(rf"bf16\[{Layers.size},{Mlp.size // 2},", main)
