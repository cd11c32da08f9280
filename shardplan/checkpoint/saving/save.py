"""Write a sharded model: as Hugging Face safetensors, or as a Levanter (tensorstore) checkpoint.

Every process writes its own files. For safetensors the loader's state-dict program is read backwards: it gives the
boxes of arrays that make up each tensor. One tensor at a time is gathered over the interconnect and kept by the process
whose file it belongs to; nothing else is ever unsharded.
"""

import functools
import itertools
import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from levanter.checkpoint import save_checkpoint

from shardplan.checkpoint.format.casting import copy_cast, float_dtype
from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.state_dict_program import StateDictProgram
from shardplan.checkpoint.mapping.type_names import trace_type_names
from shardplan.checkpoint.mapping.views import Shape
from shardplan.checkpoint.saving.levanter_arrays import check_arrays_written
from shardplan.checkpoint.saving.target import CONFIG, LEVANTER_METADATA, claim_target, complete_target, write_file
from shardplan.checkpoint.saving.written_config import count_bytes_by_dtype, describe_written
from shardplan.checkpoint.saving.written_files import (
    DTYPE_NAMES,
    assign_files,
    check_files_written,
    check_small_files_written,
    encode_header,
    encode_index,
)
from shardplan.config.command_flags import Format
from shardplan.errors import CheckpointError, ConfigError, check_argument, one_line
from shardplan.model.corrections.levanter_compat import CHECKPOINT_FILES, CHECKPOINT_MODEL
from shardplan.model.dtypes.parameter_dtypes import check_has_numbers, float32_paths, unrounded_dtype
from shardplan.model.inspect import named_leaves
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.process_progress import shared_progress
from shardplan.runtime.processes.group import ProcessGroup, open_process_group
from shardplan.runtime.processes.watch.activity import DEADLINE_S
from shardplan.runtime.progress import BYTES
from shardplan.storage.writing import OutputFolder

MAX_UNWRITTEN_TENSORS = 2
"""Maximum number of tensors of one process that are gathered and not yet written."""
SLOWEST_BYTES_PER_S = 20e6
"""Least bytes per second that a process writes with tensorstore; a slower process counts as stuck."""


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write, and the boxes of the model's arrays that make it up."""

    shape: Shape
    dtype: np.dtype
    parts: tuple[tuple[jax.Array, StridedPiece], ...]
    """Arrays of the model, each with a box of it and the box's location in the tensor."""
    constant: float = 0.0
    """The value of elements that are in none of the boxes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


def save_levanter(model: Any, ref: str, config: Mapping[str, Any]) -> None:
    """Write `model` as a Levanter checkpoint, which `levanter.checkpoint.load_checkpoint(..., subpath="model")` opens.

    Args:
        model: a Levanter model, sharded in any way; every process calls this.
        ref: folder, local, gs:// or s3://.
        config: content of the config.json that is written beside it.

    Raises:
        ConfigError: the folder holds a checkpoint already, or cannot be written to.
        CheckpointError: an array was not written as it should be.
    """
    # Levanter's `load_checkpoint` reads arrays only, and several processes cannot write Python values such as bools
    tree = {CHECKPOINT_MODEL: eqx.filter(model, eqx.is_array)}
    with open_process_group() as processes:
        # arrays of an interrupted run may have other types, and tensorstore does not replace these
        claim = claim_target(ref, (CONFIG, LEVANTER_METADATA, *CHECKPOINT_FILES), processes, Format.LEVANTER)
        target = claim.folder
        limit_s = saving_limit_s(tree)
        manager = GlobalAsyncCheckpointManager(timeout_secs=round(limit_s))
        with processes.phase("saving", limit_s):
            try:
                save_checkpoint(tree, step=0, checkpoint_path=target.ref, manager=manager, is_temporary=False)
                manager.wait_until_finished()
            except (OSError, ValueError, ImportError) as error:
                raise ConfigError(f"{target.ref} cannot be written to: {one_line(error)}") from error
            processes.wait_for_all("saved")

        def check() -> None:
            if is_first_process():
                check_arrays_written(target.ref, tree)

        processes.agree("result", check, lambda _: {})
        if is_first_process():
            described = describe_written(config, model, count_bytes_by_dtype(model))
            write_file(target, CONFIG, json.dumps(described, indent=2).encode())
        complete_target(claim, processes)


def saving_limit_s(tree: Any) -> float:
    """Return a time limit in seconds for writing with tensorstore, which reports no progress.

    >>> saving_limit_s({"weight": jnp.zeros(20_000_000, jnp.int8)}) - DEADLINE_S
    1.0
    """
    own_bytes = sum(shard.data.nbytes for array in jax.tree.leaves(tree) for shard in array.addressable_shards)
    return DEADLINE_S + own_bytes / SLOWEST_BYTES_PER_S


def save_pretrained(
    model: Any,
    ref: str,
    config: Mapping[str, Any],
    program: StateDictProgram | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    *,
    dtype: Any = None,
    max_file_bytes: int | None = None,
    replace: bool = False,
) -> None:
    """Write `model` as a Hugging Face checkpoint.

    Names, shapes and types of what was written are read back before the checkpoint counts as complete.

    Args:
        model: a Levanter model, sharded in any way; every process calls this.
        ref: folder, local or of an object store; the same folder for all processes.
        config: content of config.json. Its dtype, vocabulary size, tied head and architecture name are replaced to
            describe the written model.
        program: mapping from tensors to arrays, if tensor names differ from the names of the model type in `config`.
        extra_files: more files that the first process writes, name -> content.
        dtype: type that floating-point arrays are cast to, except arrays of the decoder's routers with a wider type;
            default: the types of the arrays.
        max_file_bytes: most bytes of a file that has more than one tensor; default: 5 GB.
        replace: whether to replace a checkpoint in the folder; otherwise it is refused.

    Raises:
        ConfigError: the folder holds a checkpoint already, or cannot be written to; a value is too large for `dtype`.
        CheckpointError: a tensor cannot be made of the model's arrays, or was not written as it should be.
    """
    check_argument("save_pretrained", "model", model, eqx.Module, "a Levanter model with its arrays")
    check_argument("save_pretrained", "config", config, Mapping, "the content of config.json, a mapping")
    program = program or trace_type_names(eqx.filter_eval_shape(lambda: model), config.get("model_type"))
    tensors = _make_output_tensors(model, program, float_dtype("save_pretrained", dtype))
    bytes_by_dtype: Counter[np.dtype] = Counter()
    for tensor in tensors.values():
        bytes_by_dtype[tensor.dtype] += tensor.nbytes
    config_json = describe_written(config, model, bytes_by_dtype)
    with open_process_group() as processes:
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        files = assign_files(sizes, processes.process_count, max_file_bytes)
        small_files = {
            **(extra_files or {}),
            CONFIG: json.dumps(config_json, indent=2).encode(),
            **encode_index(files, tensors),
        }
        claim = claim_target(ref, (*files, *small_files), processes, replace=replace)
        target = claim.folder
        _write_files(target, files, tensors, processes)
        processes.wait_for_all("written")
        if is_first_process():
            for name, text in small_files.items():
                write_file(target, name, text)
        processes.wait_for_all("small files written")

        def check() -> None:
            folder = target.open_for_reading()
            # each process reads the files of another one: it may not see its own as others do
            names = [*files][(processes.process_index + 1) % processes.process_count :: processes.process_count]
            check_files_written(folder, {name: files[name] for name in names}, tensors)
            if is_first_process():
                check_small_files_written(folder, small_files)

        processes.agree("result", check, lambda _: {})
        complete_target(claim, processes)


def _make_output_tensors(model: Any, program: StateDictProgram, dtype: Any = None) -> dict[str, OutputTensor]:
    """Return tensor name -> the boxes of the model's arrays that make up the tensor.

    Args:
        dtype: type of floating-point tensors, except tensors that the model keeps in float32 and that would be rounded;
            default: the types of the arrays.

    Raises:
        CheckpointError: a tensor has elements that no array holds, or a type that safetensors does not support; or the
            model holds weights as one-byte codes.
    """
    check_has_numbers(model)
    arrays = {path: getattr(leaf, "array", leaf) for path, leaf in named_leaves(model)}
    float32 = float32_paths(model)
    unrounded: set[str] = set()
    for path, view in program.views.items():
        if path in float32:
            unrounded.update(view.tensors)
    parts: defaultdict[str, list[tuple[jax.Array, StridedPiece]]] = defaultdict(list)
    for path, view in program.views.items():
        for piece in view.pieces:
            parts[piece.tensor].append((arrays[path], piece))
    tensors = {}
    for name, shape in program.tensors.items():
        if not parts[name] or sum(piece.size for _, piece in parts[name]) < math.prod(shape):
            raise CheckpointError(f"{name} {list(shape)} cannot be written: the model does not hold all of it")
        kind = np.dtype(functools.reduce(jnp.promote_types, (array.dtype for array, _ in parts[name])))
        if dtype is not None and jnp.issubdtype(kind, jnp.floating):
            kind = unrounded_dtype(kind, dtype) if name in unrounded else np.dtype(dtype)
        if kind not in DTYPE_NAMES:
            raise CheckpointError(f"{name} cannot be written: safetensors files have no type {kind}")
        tensors[name] = OutputTensor(shape, kind, tuple(parts[name]))
    if program.constants:
        kind = np.dtype(functools.reduce(jnp.promote_types, (tensor.dtype for tensor in tensors.values())))
        tensors.update((name, OutputTensor((), kind, (), value)) for name, value in program.constants.items())
    return tensors


def _write_files(
    target: OutputFolder, files: Mapping[str, list[str]], tensors: Mapping[str, OutputTensor], processes: ProcessGroup
) -> None:
    """Write the files, one per process at a time; all processes gather each tensor of these files together."""
    names = [*files]
    with (
        shared_progress(sum(tensor.nbytes for tensor in tensors.values()), "saving", BYTES) as progress,
        processes.phase("saving") as advance,
    ):
        for first in range(0, len(names), processes.process_count):
            group = names[first : first + processes.process_count]
            own_file = group[processes.process_index] if processes.process_index < len(group) else None
            with target.create(own_file) if own_file else nullcontext() as writer, ThreadPoolExecutor(1) as pool:
                writes: deque[Future[int]] = deque()
                if writer is not None and own_file is not None:
                    writer.write(encode_header({name: tensors[name] for name in files[own_file]}))
                for in_turn in itertools.zip_longest(*(files[file] for file in group)):
                    for file, name in zip(group, in_turn, strict=True):
                        if name is None:
                            continue
                        boxes = [_gather_box(array, piece) for array, piece in tensors[name].parts]
                        jax.block_until_ready(boxes)
                        if writer is not None and file == own_file:
                            writes.append(pool.submit(writer.write, _assemble_bytes(tensors[name], boxes).data))
                        if len(writes) > MAX_UNWRITTEN_TENSORS:
                            writes.popleft().result()
                        progress.update(tensors[name].nbytes)
                        advance(progress.done, name)
                for write in writes:
                    write.result()


def _gather_box(array: jax.Array, piece: StridedPiece) -> jax.Array:
    """Replicate a box of an array on every device."""
    return make_gather(array.sharding, array.shape, piece.shape)(array, [np.int32(start) for start in piece.start])


@functools.cache
def make_gather(sharding: Sharding, shape: Shape, box: Shape) -> Callable[[jax.Array, Sequence[np.int32]], jax.Array]:
    """Make a function (array of `shape`, first index) -> box of shape `box` at this index, replicated on all devices.

    If the box has one index of a sharded dimension, such as one expert, only the devices that hold this index send
    their part: for a slice along a sharded dimension the partitioner would gather all of the array first.
    """
    if not isinstance(sharding, NamedSharding):
        return jax.jit(partial(jax.lax.dynamic_slice, slice_sizes=box))
    mesh, spec = sharding.mesh, (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    picked = [d for d, axes in enumerate(spec) if axes and box[d] == 1 < shape[d]]
    picked_axes: list[str] = []
    for d in picked:
        picked_axes += [spec[d]] if isinstance(spec[d], str) else spec[d]
    replicated = NamedSharding(mesh, PartitionSpec())
    if not picked:
        return jax.jit(partial(jax.lax.dynamic_slice, slice_sizes=box), out_shardings=replicated)

    def pick(shard: jax.Array, *first: jax.Array) -> jax.Array:
        """Sum over devices: the device that has the box contributes the box, all others zeros."""
        is_local, start = jnp.bool_(True), list(first)
        sizes = [n if axes else b for n, b, axes in zip(shard.shape, box, spec, strict=True)]
        for d in picked:
            start[d] -= jax.lax.axis_index(spec[d]) * shard.shape[d]
            is_local &= (start[d] >= 0) & (start[d] < shard.shape[d])
            sizes[d] = 1
        # as bits: a floating-point sum with zeros would lose the sign of -0.0
        bits = jax.lax.bitcast_convert_type(shard, f"uint{8 * shard.dtype.itemsize}")
        local = jnp.where(is_local, jax.lax.dynamic_slice(bits, start, sizes), 0)
        result = jax.lax.psum(local, picked_axes)
        return jax.lax.bitcast_convert_type(result, shard.dtype)

    def gather(array: jax.Array, first: Sequence[np.int32]) -> jax.Array:
        out_spec = PartitionSpec(*(None if d in picked else axes for d, axes in enumerate(spec)))
        in_specs = (PartitionSpec(*spec), *[PartitionSpec()] * len(first))
        part = jax.shard_map(pick, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)(array, *first)
        # sharded dimensions that were not picked are still complete
        start = [first[d] if spec[d] and d not in picked else 0 for d in range(len(shape))]
        return jax.lax.dynamic_slice(part, start, box)

    return jax.jit(gather, out_shardings=replicated)


def _assemble_bytes(tensor: OutputTensor, boxes: Sequence[jax.Array]) -> np.ndarray:
    """Assemble the bytes of a tensor from the gathered boxes of its parts."""
    data = np.empty(math.prod(tensor.shape), tensor.dtype)
    if not tensor.parts:
        data[:] = tensor.constant
    for (_, piece), box in zip(tensor.parts, boxes, strict=True):
        values = np.asarray(box.addressable_data(0))
        if piece.scale != 1:
            values = values.astype(np.float32) / np.float32(piece.scale)
        strides = [k * data.itemsize for k in piece.strides]
        window: Any = np.lib.stride_tricks.as_strided(data[piece.offset :], piece.shape, strides)
        copy_cast(window, values, piece, tensor.shape)
    return data.view(np.uint8)
