"""Checks whether this host can read the checkpoint, and how fast."""

from collections.abc import Iterator

from shardplan.checkpoint.adapter.adapter import read_adapter
from shardplan.checkpoint.format.index import read_index
from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.read_rate import measure_reads
from shardplan.doctor.subject import HostSubject
from shardplan.model.huggingface.hf_config import read_config
from shardplan.runtime.progress import size_text
from shardplan.storage import open_adapter, open_folder


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Read config.json, the index, all headers and a sample of the checkpoint, and the headers of its adapter."""
    config, model = subject.config, subject.config.model
    folder = open_folder(model.ref)
    read_config(model.config, folder, config.model_class, config.load.keep_dtype)
    tensors = read_index(folder)
    files = list({tensor.file_name: tensor.file for tensor in tensors.values()}.values())
    rate = measure_reads(files, subject.hardware)
    size = size_text(sum(file.size for file in files))
    yield HostFinding(Level.OK, f"{folder.ref}: {len(tensors)} tensors, {size} in {len(files)} files; {rate}")
    adapter = open_adapter(model.adapter)
    if adapter is not None:
        parts = read_adapter(adapter)
        changed = len(parts.pairs.keys() | parts.saved.keys())
        yield HostFinding(Level.OK, f"{adapter.ref}: an adapter that changes {changed} of the tensors")
