"""Kept weights on several devices: every device converts its shard."""

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis, NamedArray

from shardplan.hardware import parse_slice
from shardplan.model.dtypes.kept_weights import KeptWeight, blocks_of, numbers_of
from shardplan.runtime.devices import arrange


def make_weight(sizes, blocks):
    """A weight with these axes, and its numbers by NumPy in float32."""
    random = np.random.default_rng(0)
    axes = tuple(Axis(name, size) for name, size in sizes.items())
    scale_axes = tuple(blocks_of(axis, size) for axis, size in zip(axes, blocks, strict=True))
    codes = random.normal(size=list(sizes.values())).astype(ml_dtypes.float8_e4m3fn)
    scales = random.uniform(0.5, 2, [axis.size for axis in scale_axes]).astype(np.float32)
    factors = scales
    for d, block in enumerate(blocks):
        factors = np.repeat(factors, block, axis=d)
    weight = KeptWeight(NamedArray(jnp.asarray(codes), axes), NamedArray(jnp.asarray(scales), scale_axes))
    return weight, codes.astype(np.float32) * factors


@pytest.mark.parametrize(
    ("mesh", "sizes", "blocks", "mapping"),
    [
        # shards of 20 elements, of blocks of 12: each block is divided into three parts
        ((1, 1, 3), {"mlp": 60, "embed": 24}, (12, 8), {"mlp": ["model"]}),
        # shards within a block, along the last dimension too
        ((1, 1, 5), {"experts": 10, "mlp": 4, "embed": 40}, (1, 2, 40), {"embed": ["model"]}),
        ((1, 2, 3), {"experts": 6, "mlp": 24, "embed": 36}, (1, 8, 12), {"experts": ["data"], "embed": ["model"]}),
        ((1, 2, 3), {"mlp": 36, "embed": 10}, (9, 10), {"mlp": ["data", "model"]}),
        ((2, 2, 2), {"kv_head": 4, "head_size": 6, "embed": 8}, (4, 2, 4), {"kv_head": ["model"], "embed": ["data"]}),
        ((1, 1, 6), {"mlp": 12, "embed": 8}, (4, 8), {}),
    ],
)
def test_shards_are_converted_by_their_devices(mesh, sizes, blocks, mapping):
    """Bit for bit, wherever shards cut blocks."""
    weight, expected = make_weight(sizes, blocks)
    devices = int(np.prod(mesh))
    names = dict(zip(("replica", "data", "model"), mesh, strict=True))
    device_mesh = arrange(jax.devices()[:devices], parse_slice(f"cpu-{devices}"), names)
    with jax.set_mesh(device_mesh), hax.axis_mapping(mapping):
        numbers = jax.jit(lambda weight: numbers_of(weight, jnp.float32))(hax.shard(weight, mapping))
    assert numbers.axes == weight.codes.axes
    np.testing.assert_array_equal(np.asarray(numbers.array), expected)
    shards = np.prod([names[axis] for axes in mapping.values() for axis in axes])
    assert numbers.array.addressable_shards[0].data.size == expected.size / shards
