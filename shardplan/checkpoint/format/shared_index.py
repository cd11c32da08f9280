"""The tensors of a checkpoint in shared storage: one process reads the index and all headers, and sends them to all."""

import base64
import json
import threading
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex, read_tensor_index
from shardplan.errors import CheckpointError
from shardplan.runtime.garbage import without_garbage_collection
from shardplan.runtime.processes.group import ProcessGroup
from shardplan.storage import File, Folder
from shardplan.storage.checksums import Checksum
from shardplan.storage.folder import ReadTuning, changed_error


class DeferredFile:
    """A file whose size and version process 0 has sent; this process opens it when it first reads from it."""

    is_shared = True

    def __init__(self, folder: Folder, name: str, size: int, version: str, tuning: ReadTuning):
        """Describe the file `name` of `folder` without access to the store."""
        self._folder, self._name = folder, name
        self.name = f"{folder.ref}/{name}"
        self.size, self.version, self.tuning = size, version, tuning
        self._lock = threading.Lock()

    @cached_property
    def _file(self) -> File:
        file = self._folder.open(self._name)
        if file is None:
            raise CheckpointError(
                f"{self.name}: process 0 reads this file, here it is missing; name the same folder in all"
            )
        if (file.size, file.version) != (self.size, self.version):
            raise changed_error(
                self, f"version {self.version} of {self.size} bytes, and {file.version} of {file.size} here"
            )
        return file

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        with self._lock:
            file = self._file
        file.read_into(offset, buffer)

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`."""
        with self._lock:
            file = self._file
        return file.recorded_checksum()


def read_shared_index(folder: Folder, processes: ProcessGroup) -> TensorIndex:
    """Return the tensors of a checkpoint, as `read_tensor_index` does, from the headers that process 0 has read.

    Every process calls this. If files are not shared, each process has its own copy and reads the headers itself.

    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.numpy import save_file
    >>> from shardplan.runtime.processes.group import open_process_group
    >>> from shardplan.storage import open_folder
    >>> with TemporaryDirectory() as folder, open_process_group() as processes:
    ...     save_file({"norm": np.ones(4, np.float32)}, f"{folder}/model.safetensors")
    ...     read_shared_index(open_folder(folder), processes).tensors["norm"].shape
    (4,)

    Raises:
        CheckpointError: see `read_tensor_index`; raised in all processes.
    """
    if processes.process_count == 1:
        return read_tensor_index(folder)
    own: list[TensorIndex] = []

    def read() -> str | None:
        own.append(read_tensor_index(folder))
        return pack_index(own[0]) if all(tensor.file.is_shared for tensor in own[0].tensors.values()) else None

    description = processes.broadcast("headers", read)
    if processes.process_index == 0:
        return own[0]
    return read_tensor_index(folder) if description is None else unpack_index(folder, description)


def pack_index(index: TensorIndex) -> str:
    """Pack tensors and their files into compressed JSON, which process 0 sends to thousands of hosts.

    >>> from types import SimpleNamespace
    >>> file = SimpleNamespace(size=64, version="1", tuning=ReadTuning(2**24, 32))
    >>> norm = Tensor(file, 48, (4,), np.dtype(np.float32), "model.safetensors")
    >>> text = pack_index(TensorIndex({"norm": norm}))
    >>> json.loads(zlib.decompress(base64.b64decode(text)))["tensors"]
    {'norm': ['model.safetensors', 48, [4], 'float32', True]}
    """
    tensors = [*index.tensors.values(), *index.single.values(), *(tensor for _, tensor in index.rivals)]
    files = {tensor.file_name: tensor.file for tensor in tensors}
    description = {
        "files": {
            name: [file.size, file.version, file.tuning.bytes_per_read, file.tuning.concurrent_reads]
            for name, file in files.items()
        },
        "tensors": _pack_tensors(index.tensors),
        "single": _pack_tensors(index.single),
        "missing_files": index.missing_files,
        "absent": index.absent,
        "is_stale": index.is_stale,
        "rivals": [(name, _pack_tensor(tensor)) for name, tensor in index.rivals],
    }
    return base64.b64encode(zlib.compress(json.dumps(description).encode())).decode()


def _pack_tensors(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {name: _pack_tensor(tensor) for name, tensor in tensors.items()}


def _pack_tensor(tensor: Tensor) -> list[Any]:
    return [tensor.file_name, tensor.offset, tensor.shape, tensor.dtype.name, tensor.is_listed]


@without_garbage_collection()
def unpack_index(folder: Folder, text: str) -> TensorIndex:
    """Unpack the result of `pack_index`; files are opened when they are first read.

    >>> from types import SimpleNamespace
    >>> file = SimpleNamespace(size=64, version="1", tuning=ReadTuning(2**24, 32))
    >>> norm = Tensor(file, 48, (4,), np.dtype(np.float32), "model.safetensors")
    >>> index = unpack_index(SimpleNamespace(ref="gs://bucket/model"), pack_index(TensorIndex({"norm": norm})))
    >>> index.tensors["norm"].shape, index.tensors["norm"].file.name
    ((4,), 'gs://bucket/model/model.safetensors')
    """
    description = json.loads(zlib.decompress(base64.b64decode(text)))
    files = {
        name: DeferredFile(folder, name, size, version, ReadTuning(*tuning))
        for name, (size, version, *tuning) in description["files"].items()
    }

    def unpack(packed: list[Any]) -> Tensor:
        file, offset, shape, dtype, is_listed = packed
        return Tensor(files[file], offset, tuple(shape), np.dtype(dtype), file, is_listed)

    return TensorIndex(
        {name: unpack(packed) for name, packed in description["tensors"].items()},
        {name: unpack(packed) for name, packed in description["single"].items()},
        tuple(description["missing_files"]),
        tuple(description["absent"]),
        description["is_stale"],
        tuple((name, unpack(packed)) for name, packed in description["rivals"]),
    )
