"""Write a sharded model out: as Hugging Face safetensors, or as a Levanter (tensorstore) checkpoint.

Every process writes its own parts. For safetensors the loader's program is read backwards: it says which boxes of which
arrays a tensor is made of. One tensor after the other is gathered over the interconnect, and kept by the process whose
file it belongs to; nothing else is ever whole.
"""

import itertools
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from levanter.checkpoint import save_checkpoint

from shardplan.checkpoint.header import DTYPES
from shardplan.checkpoint.index import INDEX, SINGLE, check_tensors, read_index
from shardplan.checkpoint.program import StateDictProgram, trace_program
from shardplan.checkpoint.views import Piece, Shape
from shardplan.errors import CheckpointError, ConfigError, one_line
from shardplan.model.axes import named_leaves
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.peers import Peers, watched
from shardplan.runtime.progress import progress_bar
from shardplan.storage import open_folder
from shardplan.storage.writing import Target

FILE_BYTES = 5 * 10**9
"""Most bytes of tensors in a file; as transformers writes them."""
WAITING = 2
"""Tensors that are gathered and not yet written, of one process."""
LEVANTER_MARK = "metadata.json"
"""What Levanter writes last, and takes a folder for a checkpoint by."""
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


def save_levanter(model: Any, ref: str) -> None:
    """Write `model` as a Levanter checkpoint, which `levanter.checkpoint.load_checkpoint(..., subpath="model")` opens.

    Args:
        model: a Levanter model, sharded in any way; every process calls this.
        ref: folder, local or of an object store.

    Raises:
        ConfigError: there is a checkpoint already, or the folder cannot be written.
    """
    path = ref if "://" in ref else str(Path(ref).absolute())
    with watched() as peers:
        peers.agree("target", lambda: _check_new(path, LEVANTER_MARK), lambda _: {})
        try:
            save_checkpoint({"model": model}, step=0, checkpoint_path=path, is_temporary=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"output {ref!r} cannot be written: {one_line(error)}") from error
        peers.gather("saved", None)


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
        others: more files, name -> content.

    Raises:
        ConfigError: there is a checkpoint already, or the folder cannot be written.
        CheckpointError: a tensor cannot be made of the model's arrays.
    """
    program = program or trace_program(eqx.filter_eval_shape(lambda: model))
    tensors = stored_tensors(model, program)
    target = Target(ref)
    with watched() as peers:
        peers.agree("target", lambda: _check_new(ref, CONFIG, INDEX, SINGLE), lambda _: {})
        files = split({name: tensor.nbytes for name, tensor in tensors.items()}, peers.count)
        try:
            _write_files(target, files, tensors, peers)
            peers.gather("written", None)
            if is_first_process():
                _write_rest(target, files, tensors, config, others or {})
        except OSError as error:
            raise ConfigError(f"output {ref!r} cannot be written: {one_line(error)}") from error
        peers.gather("whole", None)
        peers.agree("result", lambda: _check_whole(ref, program.tensors), lambda _: {})


def stored_tensors(model: Any, program: StateDictProgram) -> dict[str, Stored]:
    """Tensor name -> what it is made of.

    Raises:
        CheckpointError: there are elements of a tensor that no array holds.
    """
    arrays = {path: getattr(leaf, "array", leaf) for path, leaf in named_leaves(model)}
    parts: defaultdict[str, list[tuple[jax.Array, Piece]]] = defaultdict(list)
    for path, view in program.views.items():
        for piece in view.pieces:
            parts[piece.tensor].append((arrays[path], piece))
    for name, shape in program.tensors.items():
        if sum(piece.size for _, piece in parts[name]) < math.prod(shape):
            raise CheckpointError(f"{name} {list(shape)} cannot be written: the model does not hold all of it")
    return {
        name: Stored(shape, np.result_type(*(array.dtype for array, _ in parts[name])), tuple(parts[name]))
        for name, shape in program.tensors.items()
    }


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


def _check_new(ref: str, *names: str) -> None:
    """Complain of files that would be written over."""
    try:
        folder = open_folder(ref)
    except ConfigError:
        return  # there is no such folder yet
    for name in names:
        if folder.open(name) is not None:
            raise ConfigError(f"output {ref} holds {name} already; name another folder, or remove it")


def _check_whole(ref: str, expected: Mapping[str, Shape]) -> None:
    """See that what all processes have written is there: each may have a disk of its own under that name."""
    try:
        check_tensors(read_index(open_folder(ref)), expected, ref)
    except CheckpointError as error:
        raise CheckpointError(f"what was written is not whole ({error}); give all processes one folder") from error


def _write_files(target: Target, files: Mapping[str, list[str]], tensors: Mapping[str, Stored], peers: Peers) -> None:
    """Each process one file at a time: all gather a tensor of each of these files in turn."""
    names = [*files]
    with progress_bar(sum(tensor.nbytes for tensor in tensors.values()), "saving", "B") as bar:
        for first in range(0, len(names), peers.count):
            group = names[first : first + peers.count]
            mine = group[peers.here] if peers.here < len(group) else None
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
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return _slicer(sharding, piece.shape)(array, [np.int32(start) for start in piece.start])


@cache
def _slicer(sharding: Sharding, shape: Shape) -> Callable[[jax.Array, list[np.int32]], jax.Array]:
    return jax.jit(partial(jax.lax.dynamic_slice, slice_sizes=shape), out_shardings=sharding)


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


def _write_rest(
    target: Target,
    files: Mapping[str, list[str]],
    tensors: Mapping[str, Stored],
    config: Mapping[str, Any],
    others: Mapping[str, bytes],
) -> None:
    """What is there once: config.json, and the index last."""
    dtype = str(next(iter(tensors.values())).dtype)
    key = "dtype" if "dtype" in config else "torch_dtype"
    texts = {**others, CONFIG: json.dumps({**config, key: dtype}, indent=2).encode()}
    if SINGLE not in files:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        texts[INDEX] = json.dumps(index, indent=2).encode()
    for name, text in texts.items():
        with target.create(name) as writer:
            writer.write(text)
