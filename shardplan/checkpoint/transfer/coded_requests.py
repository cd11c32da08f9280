"""Arrays that travel as codes: their numbers are made on the devices, where the shards are.

Codes are half as many bytes as numbers in bfloat16, or fewer, on the way through host memory, to the devices and
between processes. The scales of an array are an array of their own, loaded before it, with as many shards as blocks
allow. Where a process fills the shards of CPU devices alone, numbers are made while codes are read, into the shards.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor
from shardplan.checkpoint.format.codecs.kept_tensors import codes_of, scales_of
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.code_views import Scales, find_blocks, first_of_blocks, pieces_of_scales
from shardplan.checkpoint.mapping.views import Piece, Shape, View
from shardplan.checkpoint.transfer.request import ArrayRequest, CodeBlocks
from shardplan.model.kept_weights import CODES, SCALES
from shardplan.plan.mapping import MeshAxes
from shardplan.runtime.garbage import without_garbage_collection

MIN_BLOCK = 8
"""Fewest codes that share a scale in float32 in arrays that travel as codes: numbers would be as many bytes."""
NUMBERS = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
"""Types of numbers that can be made of codes on a device: all numbers are finite in them."""


@without_garbage_collection()
def with_codes(
    requests: Mapping[str, ArrayRequest], tensors: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> tuple[dict[str, ArrayRequest], dict[str, Tensor]]:
    """Return requests in which arrays of coded tensors travel as codes, and the tensors of codes and of scales.

    Args:
        requests: array path -> the array to load.
        tensors: tensor name -> tensor and its location.
        sizes: mesh axis -> size.

    Returns:
        The requests, with one for the scales of an array before it; all tensors.
    """
    changed: dict[str, ArrayRequest] = {}
    parts = dict(tensors)
    for path, request in requests.items():
        found = _find_codes(path, request, tensors)
        if found is not None:
            codes, coded = found
            for name, tensor in coded.items():
                parts[name + CODES], parts[name + SCALES] = codes_of(tensor), scales_of(tensor)
            changed[codes.scales] = _scales_of(request, codes.blocks, tensors, sizes)
            request = replace(request, view=codes_view(request.view), codes=codes)
        changed[path] = request
    return changed, parts


def codes_view(view: View) -> View:
    """Return the codes of the tensors of a view."""
    pieces = (
        Piece(each.start, each.shape, each.tensor + CODES, each.offset, each.strides, each.scale)
        for each in view.pieces
    )
    return View(view.shape, tuple(pieces))


def scales_view(view: View, tensors: Mapping[str, Tensor]) -> View:
    """Return the scales of the codes of a view."""
    groups = {name: _groups_of(tensors[name]) for name in {piece.tensor for piece in view.pieces}}
    pieces: list[Piece] = []
    for piece in view.pieces:
        pieces += pieces_of_scales(piece, piece.tensor + SCALES, groups[piece.tensor])
    return View(view.shape, tuple(pieces))


def _groups_of(tensor: Tensor) -> Scales:
    assert isinstance(tensor, CodedTensor) and tensor.scale is not None
    return Scales(tensor.dims, tensor.group, tensor.scale.strides)


def _find_codes(
    path: str, request: ArrayRequest, tensors: Mapping[str, Tensor]
) -> tuple[CodeBlocks, dict[str, CodedTensor]] | None:
    """Return how the codes of an array become numbers, and its tensors; None if the array travels as numbers."""
    coded: dict[str, CodedTensor] = {}
    for name in {piece.tensor for piece in request.view.pieces}:
        tensor = tensors[name]
        if not isinstance(tensor, CodedTensor) or not tensor.has_blocks:
            return None
        coded[name] = tensor
    kinds = {(tensor.dtype, tensor.zero_offset) for tensor in coded.values()}
    is_scaled = any(piece.scale != 1 for piece in request.view.pieces)
    if len(kinds) != 1 or is_scaled or request.dtype not in NUMBERS:
        return None
    blocks = find_blocks(request.view, {name: _groups_of(tensor) for name, tensor in coded.items()})
    if blocks is None or math.prod(blocks) < MIN_BLOCK:
        return None
    ((dtype, zero_point),) = kinds
    return CodeBlocks(dtype, zero_point, blocks, path + SCALES, request.dtype.itemsize), coded


def _scales_of(
    request: ArrayRequest, blocks: Shape, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> ArrayRequest:
    """Return the array of scales of an array: sharded as the array is, along dimensions whose shards are whole blocks.

    Args:
        blocks: codes that share a scale, along each dimension.
        sizes: mesh axis -> size.
    """
    shape = request.view.shape
    counts = tuple(n // size for n, size in zip(shape, blocks, strict=True))
    spec: list[MeshAxes] = []
    for count, axes in zip(counts, request.spec, strict=True):
        shards = math.prod(sizes[axis] for axis in axes)
        spec.append(axes if count % shards == 0 else ())
    view = scales_view(first_of_blocks(request.view, counts), tensors)
    return ArrayRequest(view, tuple(spec), np.dtype(np.float32))
