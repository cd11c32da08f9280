"""The tensors of a Hugging Face checkpoint and their locations, from its index and its safetensors files together."""

import json
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor

from shardplan.checkpoint.format.header import Tensor, read_header, reject_duplicate_keys
from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError, one_line
from shardplan.storage import Folder, read_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONCURRENT_FILES = 64
"""Files that are opened at the same time: each takes two requests to a remote store, for its size and its header."""
QUANTISATION_SUFFIXES = (
    ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".input_scale", ".qweight", ".qzeros", ".scales", ".g_idx",
    ".SCB", ".weight_packed", ".weight_shape", ".weight.absmax", ".weight.quant_map",
)  # fmt: skip
"""Endings of tensors that quantisers save with weights or instead of them: scales, zero points, packed numbers."""


def read_index(folder: Folder) -> dict[str, Tensor]:
    """Read the index and all headers of the checkpoint in `folder`: tensor name -> tensor.

    Raises:
        CheckpointError: no safetensors file, a shard that is missing or does not contain a tensor of the index, a
            tensor in two shards, or a damaged header.
    """
    index = read_bytes(folder, INDEX)
    if index is None:
        file = folder.open(SINGLE)
        if file is None:
            raise CheckpointError(f"{folder.ref} has neither {INDEX} nor {SINGLE}; is it a safetensors checkpoint?")
        return read_header(file)
    try:
        weight_map = _parse_weight_map(index)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder.ref}/{INDEX} is damaged: {one_line(error)}") from error
    shards = sorted(set(weight_map.values()))
    with ThreadPoolExecutor(CONCURRENT_FILES) as pool:
        files = dict(zip(shards, pool.map(folder.open, shards), strict=True))
        missing = [shard for shard, file in files.items() if file is None]
        if missing:
            raise CheckpointError(
                f"{folder.ref}: {len(missing)} of {len(shards)} shards missing: {', '.join(missing)}; download them "
                "again"
            )
        present = {shard: file for shard, file in files.items() if file is not None}
        headers = dict(zip(present, pool.map(read_header, present.values()), strict=True))
    holders: dict[str, str] = {}
    for shard, header in headers.items():
        for name in header:
            if holders.setdefault(name, shard) != shard:
                raise CheckpointError(
                    f"{folder.ref}: {name} is in both {holders[name]} and {shard}; download the checkpoint again"
                )
    absent = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if absent:
        raise CheckpointError(
            f"{folder.ref}: {INDEX} lists {absent[0]} in {weight_map[absent[0]]}, which does not contain it"
        )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _parse_weight_map(index: bytes) -> dict[str, str]:
    """Parse the content of an index: tensor name -> name of its file.

    Raises:
        ValueError: it is not JSON, or has no valid `weight_map`.
    """
    content = json.loads(index, object_pairs_hook=reject_duplicate_keys)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if weight_map is None:
        raise ValueError("it has no 'weight_map'")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError("its 'weight_map' must map the name of each tensor to the name of its file")
    if any("/" in shard or shard.startswith(".") for shard in weight_map.values()):
        raise ValueError("a shard must be the name of a file in the folder of the index")
    return weight_map


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Shape], where: str, ignored: Set[str] = frozenset()
) -> None:
    """Compare names and shapes of stored tensors with those that the model needs, and report all differences at once.

    Args:
        tensors: stored tensors by name.
        expected: shapes that the model needs, by tensor name.
        where: name of the checkpoint for the message.
        ignored: tensors that the model does not need but that may be stored.

    Raises:
        CheckpointError: tensors that are missing, that have another shape, or that the model does not have.
    """
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(name for name in tensors.keys() - expected.keys() - ignored if not _is_buffer(name))
    mismatched = sorted(name for name in expected.keys() & tensors.keys() if tensors[name].shape != expected[name])
    quantised = [name for name in unexpected if name.endswith(QUANTISATION_SUFFIXES)]
    shapes = [f"{name} has {tensors[name].shape}, the model {expected[name]}" for name in mismatched]
    problems = [
        f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {problem} ({_abbreviate(names)})"
        for problem, names in (
            ("missing", missing), ("that the model does not have", unexpected), ("with a different shape", shapes),
        )
        if names
    ]  # fmt: skip
    if problems:
        advice = f"; it is quantised ({quantised[0]}): use one in bfloat16, or dequantise it first" if quantised else ""
        raise CheckpointError(f"{where} does not match the model of its config.json: {'; '.join(problems)}{advice}")


def _is_buffer(name: str) -> bool:
    """Whether a tensor is a constant that older transformers versions saved and every implementation recomputes."""
    return name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))


def _abbreviate(names: list[str], limit: int = 3) -> str:
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
