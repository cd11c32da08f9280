"""Weights that stay on the devices as their checkpoint stores them: eight-bit codes, and scales of their blocks.

A layer turns its weights into numbers when it runs, so that the numbers of one layer are in memory at a time. The
conversion runs in `jax.shard_map` under the axis mapping in force: parameters that are stored with more shards are
gathered as codes, half as many bytes as in bfloat16, and every device converts its own shard.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import physical_axis_name
from haliax.util import ensure_tuple
from jax import Array
from jax.sharding import PartitionSpec

from shardplan.model.replaceable import Replaceable

SCALE_DTYPE = "float32"
CODES, SCALES = ".codes", ".scales"
"""Ends of the paths of arrays of codes and of their scales, and of the names of their tensors."""


class KeptWeight(eqx.Module):
    """A weight kept as codes and scales: value = code * scale of the code's block, rounded once."""

    codes: NamedArray
    """The codes, with the axes of the weight."""
    scales: NamedArray
    """Scales of blocks of codes, float32; their axes are the weight's axes, or `blocks_of` these."""


def owner_of(path: str) -> str:
    """Return the path of the weight that an array of codes or scales belongs to; for any other array, its own path.

    >>> owner_of("layers[0].mlp.experts.up.scales"), owner_of("norm.weight")
    ('layers[0].mlp.experts.up', 'norm.weight')
    """
    return path.removesuffix(CODES).removesuffix(SCALES)


def blocks_of(axis: Axis, size: int) -> Axis:
    """Return the axis of scales that corresponds to an axis of a weight; blocks of one element share the axis.

    >>> blocks_of(Axis("embed", 7168), 128)
    Axis(name='embed_by_128', size=56)
    """
    return axis if size == 1 else Axis(f"{axis.name}_by_{size}", axis.size // size)


def placeholder_of(weight: NamedArray, blocks: tuple[int, ...], dtype: str) -> KeptWeight:
    """Return a `KeptWeight` of ones with the shape of a weight, which loading replaces.

    Args:
        blocks: number of elements along each axis that share a scale, a divisor of the axis' size.
        dtype: type of the codes.
    """
    axes = tuple(blocks_of(axis, size) for axis, size in zip(weight.axes, blocks, strict=True))
    return KeptWeight(
        NamedArray(jnp.ones([axis.size for axis in weight.axes], dtype), weight.axes),
        NamedArray(jnp.ones([axis.size for axis in axes], SCALE_DTYPE), axes),
    )


def is_kept(node: Any) -> bool:
    """Return whether a node of a module tree is a weight kept as stored."""
    return isinstance(node, KeptWeight)


def numbers_of(module: Any, dtype: Any) -> Any:
    """Decode all weights of a module that are kept as stored, and return the module.

    Args:
        dtype: dtype of the decoded weights.
    """
    return jax.tree.map(lambda node: convert_weight(node, dtype) if is_kept(node) else node, module, is_leaf=is_kept)


@Replaceable
def convert_weight(weight: KeptWeight, dtype: Any) -> NamedArray:
    """Decode a weight, sharded by the active axis mapping."""
    codes, scales = weight.codes, weight.scales
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return NamedArray(convert_blocks(codes.array, scales.array, dtype), codes.axes)
    mesh_axes = [_mesh_axes(axis) for axis in codes.axes]
    by_name = dict(zip((axis.name for axis in codes.axes), mesh_axes, strict=True))
    spec = PartitionSpec(*(axes or None for axes in mesh_axes))
    spec_of_scales = PartitionSpec(*(by_name.get(axis.name) or None for axis in scales.axes))

    def convert(codes: Array, scales: Array) -> Array:
        for dimension, (axis, of_scales) in enumerate(zip(weight.codes.axes, weight.scales.axes, strict=True)):
            if axis != of_scales and mesh_axes[dimension]:
                # every device has the scales of all blocks along the axis
                index = jax.lax.axis_index(mesh_axes[dimension])
                size = axis.size // of_scales.size
                scales = _scales_of_shard(scales, dimension, size, codes.shape[dimension], index)
        return convert_blocks(codes, scales, dtype)

    run = jax.shard_map(convert, mesh=mesh, in_specs=(spec, spec_of_scales), out_specs=spec, check_vma=False)
    return NamedArray(run(codes.array, scales.array), codes.axes)


def convert_blocks(codes: Array, scales: Array, dtype: Any) -> Array:
    """Multiply codes by the scales of their blocks in float32, and round once.

    Args:
        codes: of any shape.
        scales: float32; each dimension divides the dimension of the codes.
    """
    *blocks, last = (n // count for n, count in zip(codes.shape, scales.shape, strict=True))
    # along the last dimension scales are repeated before codes are read, which is little; along others a compiler
    # broadcasts them while it multiplies, unless it may move the reshape of the result to the scales: it would write
    # a scale of four bytes for every code
    scales = repeat(scales, scales.ndim - 1, last)
    shape: list[int] = []
    shape_of_scales: list[int] = []
    for n, size in zip(codes.shape, blocks, strict=False):
        shape += (n // size, size) if size > 1 else (n,)
        shape_of_scales += (n // size, 1) if size > 1 else (n,)
    numbers = codes.reshape(*shape, codes.shape[-1]).astype(jnp.float32) * scales.reshape(
        *shape_of_scales, codes.shape[-1]
    )
    return jax.lax.optimization_barrier(numbers.astype(dtype)).reshape(codes.shape)


def _scales_of_shard(scales: Array, dimension: int, block: int, length: int, index: Array) -> Array:
    """Return the scales of a shard along a dimension.

    If the shard has only a part of some block, blocks are divided, so that all blocks of the result are equally long.

    Args:
        block: elements that share a scale.
        length: elements of the shard.
        index: number of the shard.
    """
    part = math.gcd(block, length)
    divided = repeat(scales, dimension, block // part)
    return jax.lax.dynamic_slice_in_dim(divided, index * (length // part), length // part, dimension)


def repeat(array: Array, dimension: int, times: int) -> Array:
    """Repeat each element along a dimension, without a gather."""
    shape = array.shape
    repeated = (*shape[: dimension + 1], times, *shape[dimension + 1 :])
    result = jnp.broadcast_to(jnp.expand_dims(array, dimension + 1), repeated)
    return result.reshape(*shape[:dimension], shape[dimension] * times, *shape[dimension + 1 :])


def _mesh_axes(axis: Axis) -> tuple[str, ...]:
    return tuple(ensure_tuple(physical_axis_name(axis) or ()))
