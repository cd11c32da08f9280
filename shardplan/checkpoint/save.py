"""Write a sharded model out: as Hugging Face safetensors, or as a Levanter (tensorstore) checkpoint.

Every process writes its own parts. For safetensors the loader's program is read backwards: it says which boxes of which
arrays a tensor is made of. One tensor after the other is gathered over the interconnect, and kept by the process whose
file it belongs to; nothing else is ever whole.
"""

import functools
import itertools
import json
import math
from collections import defaultdict, deque
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

from shardplan.checkpoint.format.header import DTYPES
from shardplan.checkpoint.format.index import INDEX, SINGLE, check_tensors, read_index
from shardplan.checkpoint.mapping.program import StateDictProgram, trace_program
from shardplan.checkpoint.mapping.views import Piece, Shape
from shardplan.errors import CheckpointError, ConfigError, one_line
from shardplan.model.axes import named_leaves
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.process_group import ProcessGroup, watched
from shardplan.runtime.progress import progress_bar
from shardplan.storage.writing import Target

FILE_BYTES = 5 * 10**9
"""Of tensors in a file, about; as transformers writes them."""
WAITING = 2
"""Tensors that are gathered and not yet written, of one process."""
LEVANTER_MARK = "metadata.json"
"""What Levanter writes last, and takes a folder for a checkpoint by."""
LEVANTER_SCHEMES = ("gs", "s3")
"""Where JAX has tensorstore write."""
LONGEST = 3600
"""Seconds that processes wait for each other's part of a Levanter checkpoint."""
CONFIG = "config.json"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that is to be written."""

    shape: Shape
    dtype: np.dtype
    parts: tuple[tuple[jax.Array, Piece], ...]
    """Arrays of the model, and the box of each that it is made of, with its place in the tensor."""

    @property
    def nbytes(self) -> int:
        """Length of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def new_target(ref: str, is_levanter: bool = False) -> Target:
    """The folder that `ref` names, for a checkpoint.

    Args:
        is_levanter: whether it is to be one of Levanter's.

    Raises:
        ConfigError: it holds one already, or cannot be written to.
    """
    scheme, separator, _ = ref.partition("://")
    if is_levanter and separator and scheme not in LEVANTER_SCHEMES:
        raise ConfigError(
            f"{ref}: Levanter's checkpoints are written to local folders, gs:// and s3://, not {scheme}://"
        )
    target = Target(ref)
    for name in (CONFIG, INDEX, SINGLE, LEVANTER_MARK):
        if target.holds(name):
            raise ConfigError(f"{target.ref} holds {name} already; name another folder, or remove it")
    return target


def save_levanter(model: Any, ref: str, config: Mapping[str, Any]) -> None:
    """Write `model` as a Levanter checkpoint, which `levanter.checkpoint.load_checkpoint(..., subpath="model")` opens.

    Args:
        model: a Levanter model, sharded in any way; every process calls this.
        ref: folder, local, gs:// or s3://.
        config: what a config.json beside it is to say.

    Raises:
        ConfigError: there is a checkpoint already, or the folder cannot be written to.
    """
    # Levanter's `load_checkpoint` reads arrays only, and switches that are Python's cannot be written by processes
    tree = {"model": eqx.filter(model, eqx.is_array)}
    with watched() as processes:
        target = _claimed(ref, config, processes, is_levanter=True)
        manager = GlobalAsyncCheckpointManager(timeout_secs=LONGEST)
        try:
            save_checkpoint(tree, step=0, checkpoint_path=target.ref, manager=manager, is_temporary=False)
            manager.wait_until_finished()
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"{target.ref} cannot be written to: {one_line(error)}") from error
        processes.gather("saved", None)


def save_pretrained(
    model: Any,
    ref: str,
    config: Mapping[str, Any],
    program: StateDictProgram | None = None,
    others: Mapping[str, bytes] | None = None,
) -> None:
    """Write `model` as a Hugging Face checkpoint, in the types of its arrays.

    Args:
        model: a Levanter model, sharded in any way; every process calls this.
        ref: folder, local or of an object store; of several processes the same for all.
        config: what config.json is to say.
        program: names of the tensors, as of the checkpoint that the model was loaded from; default: Levanter's.
        others: more files, name -> content, of the first process.

    Raises:
        ConfigError: there is a checkpoint already, or the folder cannot be written to.
        CheckpointError: a tensor cannot be made of the model's arrays.
    """
    program = program or trace_program(eqx.filter_eval_shape(lambda: model))
    tensors = stored_tensors(model, program)
    key = "dtype" if "dtype" in config else "torch_dtype"
    settings = {**config, key: str(next(iter(tensors.values())).dtype)}
    with watched() as processes:
        target = _claimed(ref, settings, processes)
        files = split({name: tensor.nbytes for name, tensor in tensors.items()}, processes.count)
        _write_files(target, files, tensors, processes)
        processes.gather("written", None)
        if is_first_process():
            for name, text in {**(others or {}), **_index(files, tensors)}.items():
                _write(target, name, text)
        processes.gather("whole", None)
        processes.agree(
            "result", lambda: check_tensors(read_index(target.folder()), program.tensors, target.ref), lambda _: {}
        )


def _claimed(ref: str, config: Mapping[str, Any], processes: ProcessGroup, is_levanter: bool = False) -> Target:
    """A new target, with its config.json, once all processes see that; each may have a disk of its own by that name."""
    target = processes.agree("target", lambda: new_target(ref, is_levanter), lambda _: {})
    if is_first_process():
        _write(target, CONFIG, json.dumps(config, indent=2).encode())
    processes.gather("claimed", None)

    def see() -> None:
        if not target.holds(CONFIG):
            raise ConfigError(f"{target.ref} is another folder there than for process 0; give all processes one folder")

    processes.agree("sight", see, lambda _: {})
    return target


def _write(target: Target, name: str, text: bytes) -> None:
    with target.create(name) as writer:
        writer.write(text)


def stored_tensors(model: Any, program: StateDictProgram) -> dict[str, Stored]:
    """Tensor name -> what it is made of.

    Raises:
        CheckpointError: there are elements of a tensor that no array holds, or it has a type that files cannot have.
    """
    arrays = {path: getattr(leaf, "array", leaf) for path, leaf in named_leaves(model)}
    parts: defaultdict[str, list[tuple[jax.Array, Piece]]] = defaultdict(list)
    for path, view in program.views.items():
        for piece in view.pieces:
            parts[piece.tensor].append((arrays[path], piece))
    found = {}
    for name, shape in program.tensors.items():
        if not parts[name] or sum(piece.size for _, piece in parts[name]) < math.prod(shape):
            raise CheckpointError(f"{name} {list(shape)} cannot be written: the model does not hold all of it")
        dtype = np.dtype(functools.reduce(jnp.promote_types, (array.dtype for array, _ in parts[name])))
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name} cannot be written: safetensors files have no type {dtype}")
        found[name] = Stored(shape, dtype, tuple(parts[name]))
    return found


def split(sizes: Mapping[str, int], processes: int) -> dict[str, list[str]]:
    """File name -> its tensors in order: files of like sizes, as many for each process.

    Args:
        sizes: tensor name -> bytes.
    """
    total = max(1, sum(sizes.values()))
    count = -(-total // (FILE_BYTES * processes)) * processes
    found: defaultdict[int, list[str]] = defaultdict(list)
    for (name, size), stop in zip(sizes.items(), itertools.accumulate(sizes.values()), strict=True):
        found[(stop - size // 2) * count // (total + 1)].append(name)
    if len(found) == 1:
        return {SINGLE: [*sizes]}
    return {
        f"model-{i + 1:05}-of-{len(found):05}.safetensors": names for i, (_, names) in enumerate(sorted(found.items()))
    }


def header(tensors: Mapping[str, Stored]) -> bytes:
    """What a safetensors file of these tensors begins with."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        place = [offset, offset + tensor.nbytes]
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    return len(text).to_bytes(8, "little") + text


def _write_files(
    target: Target, files: Mapping[str, list[str]], tensors: Mapping[str, Stored], processes: ProcessGroup
) -> None:
    """Each process one file at a time: all gather a tensor of each of these files in turn."""
    names = [*files]
    with progress_bar(sum(tensor.nbytes for tensor in tensors.values()), "saving", "B") as bar:
        for first in range(0, len(names), processes.count):
            group = names[first : first + processes.count]
            mine = group[processes.here] if processes.here < len(group) else None
            with target.create(mine) if mine else nullcontext() as writer, ThreadPoolExecutor(1) as pool:
                writing: deque[Future[int]] = deque()
                if writer is not None and mine is not None:
                    writer.write(header({name: tensors[name] for name in files[mine]}))
                for in_turn in itertools.zip_longest(*(files[file] for file in group)):
                    for file, name in zip(group, in_turn, strict=True):
                        if name is None:
                            continue
                        boxes = [_gathered(array, piece) for array, piece in tensors[name].parts]
                        jax.block_until_ready(boxes)
                        if writer is not None and file == mine:
                            writing.append(pool.submit(writer.write, _assembled(tensors[name], boxes).data))
                        if len(writing) > WAITING:
                            writing.popleft().result()
                        bar.update(tensors[name].nbytes)
                for each in writing:
                    each.result()


def _gathered(array: jax.Array, piece: Piece) -> jax.Array:
    """A box of an array, on every device."""
    return gatherer(array.sharding, array.shape, piece.shape)(array, [np.int32(start) for start in piece.start])


@functools.cache
def gatherer(sharding: Sharding, shape: Shape, box: Shape) -> Callable[[jax.Array, Sequence[np.int32]], jax.Array]:
    """A function of an array of `shape` and a first index, that gives the box of that shape from there to all devices.

    Where a cut dimension has one index in the box, as that of experts, only the devices with that index give theirs:
    a slice along a cut dimension would have the partitioner make all of it whole first.
    """
    if not isinstance(sharding, NamedSharding):
        return jax.jit(partial(jax.lax.dynamic_slice, slice_sizes=box))
    mesh, spec = sharding.mesh, (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    picked = [d for d, axes in enumerate(spec) if axes and box[d] == 1 < shape[d]]
    replicated = NamedSharding(mesh, PartitionSpec())
    if not picked:
        return jax.jit(partial(jax.lax.dynamic_slice, slice_sizes=box), out_shardings=replicated)

    def pick(shard: jax.Array, *first: jax.Array) -> jax.Array:
        is_mine, start = jnp.bool_(True), list(first)
        sizes = [n if axes else b for n, b, axes in zip(shard.shape, box, spec, strict=True)]
        for d in picked:
            start[d] -= jax.lax.axis_index(spec[d]) * shard.shape[d]
            is_mine &= (start[d] >= 0) & (start[d] < shard.shape[d])
            sizes[d] = 1
        # as bits: a sum with zeros would lose the sign of -0.0
        bits = jax.lax.bitcast_convert_type(shard, f"uint{8 * shard.dtype.itemsize}")
        mine = jnp.where(is_mine, jax.lax.dynamic_slice(bits, start, sizes), 0)
        whole = jax.lax.psum(mine, [spec[d] for d in picked])
        return jax.lax.bitcast_convert_type(whole, shard.dtype)

    def gather(array: jax.Array, first: Sequence[np.int32]) -> jax.Array:
        kept = PartitionSpec(*(None if d in picked else axes for d, axes in enumerate(spec)))
        of_start = [PartitionSpec()] * len(first)
        inputs = (PartitionSpec(*spec), *of_start)
        return jax.shard_map(pick, mesh=mesh, in_specs=inputs, out_specs=kept, check_vma=False)(array, *first)

    return jax.jit(gather, out_shardings=replicated)


def _assembled(tensor: Stored, boxes: Sequence[jax.Array]) -> np.ndarray:
    """The bytes of a tensor, from what was gathered of its parts."""
    data = np.empty(math.prod(tensor.shape), tensor.dtype)
    for (_, piece), box in zip(tensor.parts, boxes, strict=True):
        found = np.asarray(box.addressable_data(0))
        if piece.scale != 1:
            found = found.astype(np.float32) / np.float32(piece.scale)
        strides = [k * data.itemsize for k in piece.strides]
        place: Any = np.lib.stride_tricks.as_strided(data[piece.offset :], piece.shape, strides)
        np.copyto(place, found, casting="unsafe")
    return data.view(np.uint8)


def _index(files: Mapping[str, list[str]], tensors: Mapping[str, Stored]) -> dict[str, bytes]:
    """Which tensor is in which file, where there are several."""
    if SINGLE in files:
        return {}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    return {INDEX: json.dumps(index, indent=2).encode()}
