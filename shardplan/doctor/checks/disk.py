"""Checks the folders that runs write besides their results: temporary files and caches."""

import os
import tempfile
from collections.abc import Iterator

from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.folder_space import check_folder
from shardplan.doctor.subject import HostSubject

COMPILATION_CACHE = "JAX_COMPILATION_CACHE_DIR"


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Check the folder for temporary files, and the caches for verdicts, compiled programs and the hub's files."""
    try:
        yield check_folder("TMPDIR", tempfile.gettempdir())
    except FileNotFoundError as error:  # none of the folders that Python tries can be written
        yield HostFinding(Level.ERROR, str(error), remedy="make room, or name another folder in TMPDIR")
    if subject.config.compiler.cache is not None:
        yield check_folder("compiler.cache", subject.config.compiler.cache, Level.WARNING)
    cache = os.environ.get(COMPILATION_CACHE)
    if cache and "://" not in cache:
        yield check_folder(COMPILATION_CACHE, cache, Level.WARNING)
    from huggingface_hub.constants import HF_HUB_CACHE

    yield check_folder("HF_HUB_CACHE", HF_HUB_CACHE, Level.WARNING)
