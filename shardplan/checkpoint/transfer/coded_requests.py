"""Loads arrays as codes and scales, which the devices that hold the shards decode.

Codes are a byte each on the way through host memory, to the devices and between processes, half of what numbers are in
bfloat16. The scales of an array are an array of their own, loaded before it and sharded alike. Where one process fills
the shards of CPU devices, numbers are made while codes are read, into the shards.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor
from shardplan.checkpoint.format.codecs.stored_codes import scale_values
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.code_views import Scales, find_blocks, first_of_blocks, view_of_scales
from shardplan.checkpoint.mapping.views import View
from shardplan.checkpoint.transfer.reads.byte_ranges import TensorSource, locate, source_of
from shardplan.checkpoint.transfer.request import ArrayRequest, CodeBlocks
from shardplan.model.dtypes.kept_weights import CODES, SCALES

MIN_BLOCK = 16
"""An array is sent as codes if at least this many codes share a scale: its float32 scales then take at most 1/8 of the
bytes of its bfloat16 values."""
MAX_PIECES = 4096
"""Maximum number of pieces that an array of scales has beyond the pieces of its codes; each piece is a read."""
NUMBERS = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
"""Types that a device can decode to: both hold all decoded values as finite numbers."""


def with_codes(
    requests: Mapping[str, ArrayRequest], tensors: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> tuple[dict[str, ArrayRequest], dict[str, TensorSource]]:
    """Change the requests of arrays that devices can decode to load codes and scales; also locate all tensors.

    >>> from shardplan.checkpoint.format.codecs.coded_tensor import GroupValues
    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> values = GroupValues("w_scale", Tensor(None, 0, (2, 1), np.dtype(np.float32), "model.safetensors"), (1, 1))
    >>> codes = {"code_dims": (256, 128), "group": (128, 128), "scale": values}
    >>> tensor = CodedTensor(None, 8, (256, 128), np.dtype(np.int8), "model.safetensors", **codes)
    >>> request = ArrayRequest(tensor_view("w", (256, 128)), ((), ()), np.dtype(np.float32))
    >>> requests, sources = with_codes({"up_proj": request}, {"w": tensor}, {"data": 1})
    >>> {path: each.view.tensors for path, each in requests.items()}
    {'up_proj.scales': ('w.scales',), 'up_proj': ('w.codes',)}

    Args:
        requests: array path -> the array to load.
        tensors: tensor name -> tensor and its location.
        sizes: mesh axis -> size.

    Returns:
        The requests, where a request for an array's scales precedes the request for its codes; and the location of
        every tensor that is read, by name.
    """
    changed: dict[str, ArrayRequest] = {}
    sources: dict[str, TensorSource] = {}
    for path, request in requests.items():
        coded = _coded_tensors(request, tensors)
        scales = None if coded is None else _scales_of(request, coded, sizes)
        if coded is not None and scales is not None:
            changed[path + SCALES] = scales
            for name, of_name in coded.items():
                sources[name + CODES] = source_of(of_name)
                sources[name + SCALES] = source_of(scale_values(of_name).tensor)
            tensor = next(iter(coded.values()))
            codes = CodeBlocks(tensor.dtype, tensor.zero_offset, path + SCALES, request.dtype.itemsize)
            request = replace(request, view=codes_view(request.view), codes=codes)
        else:
            sources |= locate(request.view, tensors)
        changed[path] = request
    return changed, sources


def codes_view(view: View) -> View:
    """Rename the tensors of a view to the names of their codes.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> codes_view(tensor_view("mlp.up_proj.weight", (8, 4))).tensors
    ('mlp.up_proj.weight.codes',)
    """
    return view.rename(lambda name: name + CODES)


def scales_view(view: View, scales: Mapping[str, Scales], max_pieces: float = math.inf) -> View | None:
    """Return a view of the scales of a view's codes; None if it would have too many pieces.

    The limits are `MAX_BOXES` pieces for one piece of codes, and `max_pieces` in all.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> scales = scales_view(tensor_view("w", (256, 128)), {"w": Scales((256, 128), (128, 128), (1, 1))})
    >>> [(each.tensor, each.start, each.shape, each.offset) for each in scales.pieces]
    [('w.scales', (0, 0), (128, 128), 0), ('w.scales', (128, 0), (128, 128), 1)]

    Args:
        scales: see `scales_by_name`.
    """
    found = view_of_scales(view, scales, max_pieces)
    return None if found is None else found.rename(lambda name: name + SCALES)


def scales_by_name(coded: Mapping[str, CodedTensor]) -> dict[str, Scales]:
    """Return tensor name -> layout of the tensor's scales.

    >>> from shardplan.checkpoint.format.codecs.coded_tensor import GroupValues
    >>> values = GroupValues("w_scale", Tensor(None, 0, (2, 1), np.dtype(np.float32), "model.safetensors"), (1, 1))
    >>> codes = {"code_dims": (256, 128), "group": (128, 128), "scale": values}
    >>> tensor = CodedTensor(None, 8, (256, 128), np.dtype(np.int8), "model.safetensors", **codes)
    >>> scales_by_name({"w": tensor})
    {'w': Scales(shape=(256, 128), group=(128, 128), strides=(1, 1))}
    """
    return {name: Scales(t.code_dims, t.group, scale_values(t).strides) for name, t in coded.items()}


def _coded_tensors(request: ArrayRequest, tensors: Mapping[str, Tensor]) -> dict[str, CodedTensor] | None:
    """Return the `CodedTensor`s of an array if devices can decode all of them; else None."""
    if request.view.is_scaled or 0 in request.view.shape or request.dtype not in NUMBERS:
        return None
    coded: dict[str, CodedTensor] = {}
    for name in request.view.tensors:
        tensor = tensors[name]
        if not isinstance(tensor, CodedTensor) or not tensor.has_blocks:
            return None
        coded[name] = tensor
    kinds = {(tensor.dtype, tensor.zero_offset) for tensor in coded.values()}
    return coded if len(kinds) == 1 else None


def _scales_of(
    request: ArrayRequest, coded: Mapping[str, CodedTensor], sizes: Mapping[str, int]
) -> ArrayRequest | None:
    """Return the request for an array's scales, sharded like the array; None if too few codes share a scale.

    Args:
        coded: name -> tensor, for each tensor of the array.
        sizes: mesh axis -> size.
    """
    shape = request.view.shape
    of_tensors = scales_by_name(coded)
    blocks = find_blocks(request.view, of_tensors)
    if blocks is None:
        return None
    counts = []
    for n, block, axes in zip(shape, blocks, request.spec, strict=True):
        extent = n // math.prod(sizes[axis] for axis in axes)
        counts.append(n // math.gcd(block, extent))  # a block of which a shard has a part is divided
    if math.prod(shape) < MIN_BLOCK * math.prod(counts):
        return None
    firsts = first_of_blocks(request.view, tuple(counts))
    view = scales_view(firsts, of_tensors, MAX_PIECES + firsts.piece_count)
    return None if view is None else ArrayRequest(view, request.spec, np.dtype(np.float32))
