"""Loads kept weights: the model holds the codes and scales that the checkpoint stores."""

from collections.abc import Mapping
from typing import Any

from shardplan.checkpoint.adapter.adapted_tensor import AdaptedTensor
from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor
from shardplan.checkpoint.format.codecs.stored_codes import codes_of, scales_of
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.views import View
from shardplan.checkpoint.transfer.coded_requests import codes_view, scales_by_name, scales_view
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model.dtypes.kept_weights import CODES, SCALES, owner_of
from shardplan.model.dtypes.parameter_dtypes import kept_dtypes


def with_kept_parts(
    template: Any, views: Mapping[str, View], tensors: Mapping[str, Tensor], where: str
) -> tuple[dict[str, View], dict[str, Tensor]]:
    """Replace every kept weight by its codes and its scales, in the views of arrays and in the tensors.

    Args:
        template: the model, with `jax.ShapeDtypeStruct`s in place of arrays.
        views: path of an array -> view of tensors; an array of scales has the view of the first code of each block.
        tensors: name -> tensor; `CodedTensor`s have the names of weights.
        where: name of the checkpoint, for messages.

    Raises:
        CheckpointError: a weight is not stored as its configuration says.
        ConfigError: the scales of a weight are in too many parts of tensors, or an adapter changes the weight.
    """
    dtypes = kept_dtypes(template)
    changed, parts = dict(views), dict(tensors)
    for path in dtypes:
        view = views[path]
        weights = {name: _coded(name, tensors[name], dtypes[owner_of(path) + CODES], where) for name in view.tensors}
        for name, coded in weights.items():
            parts[name + CODES], parts[name + SCALES] = codes_of(coded), scales_of(coded)
        if path.endswith(CODES):
            changed[path] = codes_view(view)
        else:
            scales = scales_view(view, scales_by_name(weights))
            if scales is None:
                raise ConfigError(
                    f"load.keep_dtype: the scales of {owner_of(path)} lie in too many parts of their tensors; leave "
                    "load.keep_dtype out"
                )
            changed[path] = scales
    return changed, parts


def _coded(name: str, tensor: Tensor, dtype: str, where: str) -> CodedTensor:
    """Check that a tensor is stored as codes of type `dtype`, and return it.

    Raises:
        CheckpointError: the tensor is stored in another way.
        ConfigError: an adapter changes the tensor.
    """
    if isinstance(tensor, CodedTensor) and str(tensor.dtype) == dtype:
        return tensor
    if isinstance(tensor, AdaptedTensor):
        raise ConfigError(
            f"model.adapter changes {name}, which load.keep_dtype keeps as {dtype}; leave one of both out: changes are "
            "added to numbers"
        )
    raise CheckpointError(
        f"{where}: {name} is stored as {tensor.dtype}, and load.keep_dtype keeps it as {dtype}, as its config.json "
        "says; list its module in modules_to_not_convert of quantization_config, or leave load.keep_dtype out"
    )
