"""Checks whether and how fast this host can read the texts, and whether their copy fits on its disk."""

import shutil
import tempfile
from collections.abc import Iterator

from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.read_rate import measure_reads
from shardplan.doctor.subject import HostSubject
from shardplan.errors import CheckpointError, ConfigError
from shardplan.runtime.progress import size_text
from shardplan.storage.text_files import open_text_files


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Read a sample of the texts, which a run copies to a temporary file."""
    path = subject.config.data.path
    assert path is not None
    try:
        files = [file for _, file in open_text_files(path)]
        rate = measure_reads(files, None)
    except CheckpointError as error:  # of the storage, which mostly reads checkpoints
        raise ConfigError(f"data.path {path} cannot be read: {error}") from error
    nbytes, folder = sum(file.size for file in files), tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    measured = f"{path}: {size_text(nbytes)} in {len(files)} files; {rate}"
    if free < nbytes:
        yield HostFinding(
            Level.ERROR,
            f"{measured}; {size_text(free)} free in {folder}",
            f"{size_text(nbytes)} there, for the copy of the texts that a run makes",
            "make room, or name another folder in TMPDIR",
        )
    else:
        yield HostFinding(Level.OK, measured)
