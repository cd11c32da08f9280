"""Decodes codes on the devices that hold them, inside the program that exchanges the codes."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from shardplan.checkpoint.format.header import E2M1
from shardplan.checkpoint.mapping.views import Shape
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.model.dtypes.kept_weights import convert_blocks, repeat

SLAB_CODES = 2**22
"""Number of codes that are decoded at a time: 16 MiB of scales in float32."""


@dataclass(frozen=True)
class BoxDecoder:
    """Decodes boxes of an array's codes; the dimensions of a box are in the order of `View.stored_order`."""

    code_dtype: np.dtype
    zero_point: float
    order: tuple[int, ...]
    """Dimension of the array of scales for each dimension of a box."""
    scale_spec: PartitionSpec
    """Sharding of the array of scales, the same as the array's."""
    extents: Shape
    """Number of codes in a shard, along each dimension of a box."""
    dtype: np.dtype
    """Type of the decoded values."""

    def decode(self, codes: Array, scales: Array, start: Array) -> Array:
        """Decode a box of codes, inside `jax.shard_map`.

        Args:
            codes: codes of the box; codes of four bits take one byte each.
            scales: scales of the device's shard.
            start: int32[dimension], first index of the box in the shard.
        """
        # or else a compiler moves the reshape of rows behind the product, and writes a scale for every code
        codes = lax.optimization_barrier(codes)
        scales = scales.transpose(self.order)
        for d, (n, extent) in enumerate(zip(codes.shape, self.extents, strict=True)):
            scales = _scales_along(scales, d, n, extent, start[d])
        return self._in_slabs(codes, scales)

    def _in_slabs(self, codes: Array, scales: Array) -> Array:
        """Decode codes a slab at a time, because XLA would otherwise write one scale per code if blocks are small.

        Args:
            scales: array whose dimensions divide the dimensions of `codes`.
        """
        if codes.size <= SLAB_CODES or codes.ndim == 1:
            return self._convert(codes, scales)
        n, count = codes.shape[0], scales.shape[0]
        if n == 1:
            return self._in_slabs(codes[0], scales[0])[None]
        steps = n if count == 1 else count
        slabs = next((k for k in range(2, steps) if steps % k == 0 and codes.size <= k * SLAB_CODES), steps)
        parts = codes.reshape(slabs, n // slabs, *codes.shape[1:])
        if count == 1:
            numbers = lax.map(lambda part: self._in_slabs(part, scales), parts)
        else:
            of_parts = scales.reshape(slabs, count // slabs, *scales.shape[1:])
            numbers = lax.map(lambda part: self._in_slabs(*part), (parts, of_parts))
        return numbers.reshape(codes.shape)

    def _convert(self, codes: Array, scales: Array) -> Array:
        if self.code_dtype == E2M1:
            codes = _e2m1_numbers(codes)
        if self.zero_point:
            codes = codes.astype(jnp.float32) - jnp.float32(self.zero_point)
        return convert_blocks(codes, scales, self.dtype)


def make_decoder(request: ArrayRequest, sizes: dict[str, int]) -> BoxDecoder:
    """Make the decoder of an array that is sent as codes.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> from shardplan.checkpoint.transfer.request import CodeBlocks
    >>> codes = CodeBlocks(np.dtype(np.int8), zero_point=0.0, scales="up_proj.scales", value_bytes=2)
    >>> request = ArrayRequest(tensor_view("w", (256, 128)), (("model",), ()), np.dtype(jnp.bfloat16), codes)
    >>> make_decoder(request, {"model": 4}).extents
    (64, 128)

    Args:
        sizes: mesh axis -> size.
    """
    codes, order = request.codes, request.view.stored_order
    assert codes is not None
    extents = []
    for d in order:
        extents.append(request.view.shape[d] // math.prod(sizes[axis] for axis in request.spec[d]))
    spec = PartitionSpec(*(axes or None for axes in request.spec))
    return BoxDecoder(codes.dtype, codes.zero_point, order, spec, tuple(extents), request.dtype)


def _scales_along(scales: Array, d: int, n: int, extent: int, start: Array) -> Array:
    """Select, along dimension `d`, the scales of `n` codes of a shard.

    Args:
        scales: scales of the shard.
        extent: codes of the shard along the dimension.
        start: first of the `n` codes.
    """
    if scales.shape[d] == 1:
        return scales
    block = extent // scales.shape[d]
    # divides the first index of every box of `n` codes; a block of which a box may have a part is divided
    size = math.gcd(block, n, extent)
    count = min(scales.shape[d], -(-(block - size + n) // block))
    first = jnp.minimum(start // block, scales.shape[d] - count)
    scales = lax.dynamic_slice_in_dim(scales, first, count, d)
    if size == block:
        return scales
    divided = repeat(scales, d, block // size)
    return lax.dynamic_slice_in_dim(divided, (start - first * block) // size, n // size, d)


def _e2m1_numbers(codes: Array) -> Array:
    """Decode four-bit codes of one sign bit, two exponent bits and one mantissa bit.

    Format: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3. XLA has the type for few devices.
    """
    half = (codes & 1).astype(jnp.float32) / 2
    exponent = codes >> 1 & 3
    # 2 ** (exponent - 1)
    power = jnp.where(exponent == 3, 4.0, jnp.where(exponent == 2, 2.0, 1.0))
    magnitude = jnp.where(exponent == 0, half, (1 + half) * power)
    return jnp.where(codes & 8, -magnitude, magnitude).astype(jnp.float32)
