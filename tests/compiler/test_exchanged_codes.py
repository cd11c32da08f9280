"""What the TPU compiler makes of the program that exchanges codes and makes their numbers."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardplan.checkpoint.format.header import E2M1, UINT4
from shardplan.checkpoint.mapping.views import tensor_view
from shardplan.checkpoint.transfer.devices.decoding import SLAB_CODES, make_decoder
from shardplan.checkpoint.transfer.devices.exchange import _program
from shardplan.checkpoint.transfer.request import ArrayRequest, CodeBlocks
from shardplan.checkpoint.transfer.transfer import ReadStrategy
from shardplan.hardware import parse_slice
from shardplan.verify.compiler.topology import make_topology_mesh

pytestmark = pytest.mark.usefixtures("tpu_compiler")

EXPERTS, ROWS, COLUMNS = 8, 2048, 7168
E4M3, BFLOAT16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("slice_name", "dtype", "blocks", "zero_point"),
    [
        ("v4:2x2x1", E4M3, (1, 128, 128), 0.0),
        ("v6e:2x2", E2M1, (1, 1, 32), 0.0),
        pytest.param("v5p:2x2x1", UINT4, (1, 1, 32), 8.0, marks=pytest.mark.whole),
    ],
    ids=str,
)
def test_codes_are_exchanged_in_a_byte_each(slice_name, dtype, blocks, zero_point):
    """Experts over one axis and columns over another, of rows that devices along the latter have read."""
    sizes = {"replica": 1, "data": 2, "model": 2}
    mesh = make_topology_mesh(parse_slice(slice_name), sizes)
    shape, spec = (EXPERTS, ROWS, COLUMNS), (("data",), (), ("model",))
    codes = CodeBlocks(dtype, zero_point, "scales", 2)
    request = ArrayRequest(tensor_view("w", shape), spec, BFLOAT16, codes)
    counts = tuple(n // size for n, size in zip(shape, blocks, strict=True))
    decoder = make_decoder(request, sizes)
    strategy = ReadStrategy((("data",), (), ()), ((2, ("model",)),))
    rows = EXPERTS // 2 * ROWS
    result = (EXPERTS // 2, ROWS, COLUMNS // 2)
    sent = E4M3 if dtype == E4M3 else np.dtype(np.uint8)

    def abstract(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    read = abstract((4, rows // 2, COLUMNS), jnp.uint8, ("replica", "data", "model"))
    scales = abstract(counts, jnp.float32, "data", None, "model")
    program = _program(mesh, strategy, rows, result, sent, decoder)
    compiled = program.lower(read, scales, abstract((3,), jnp.int32)).compile()
    exchanged = re.findall(r"= (\w+)\[[\d,]+\]\S* all-to-all\(", compiled.as_text())
    assert set(exchanged) == {"u8"}
    # beside arguments and results: what was received, in a byte each, and three slabs of float32, not such a scale each
    assert compiled.memory_analysis().temp_size_in_bytes < np.prod(result) + 3 * 4 * SLAB_CODES
