"""Objects in stores (gs, s3, az) and files on web servers, read by ranges with obstore.

obstore checks that a server sends the range that was asked for. What is added here: every answer is checked to be of
the version that was opened, and a read that fails goes on at the byte where it stopped.
"""

import os
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import obstore
import obstore.store
from obstore import exceptions

from shardplan.errors import CheckpointError, ConfigError, one_line
from shardplan.storage.checksums import Checksum, of_url
from shardplan.storage.folder import REMOTE, File, asked, changed, ends_early, opened

TIMEOUT = timedelta(seconds=60)
"""For one request, its body included; obstore's 30 are too few for 16 MiB on a busy link."""
PROGRESS_BYTES = 64 * 1024
"""Least that a request must bring within the time for the read to go on; what comes is kept in such portions."""
ATTEMPTS = 6
"""In a row without progress, before a read is given up."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds between attempts: doubled each time, less up to half at random, so that hosts do not return together."""
UNKNOWN = "unknown"
"""The version of what a web server says nothing about."""
FINAL = (
    exceptions.NotSupportedError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError,
    exceptions.InvalidPathError, exceptions.UnknownConfigurationKeyError,
)  # fmt: skip
"""Errors that another attempt would meet too."""


class ObjectFile:
    """An object in a store, read by ranges."""

    pace = REMOTE
    is_shared = True

    def __init__(self, store: Any, path: str, url: str):
        meta = obstore.head(store, path)
        self._store, self._path, self.name = store, path, url
        self.size: int = meta["size"]
        self.version = _version(meta)
        self._condition = {"if_match": meta["e_tag"]} if meta["e_tag"] and not meta["e_tag"].startswith("W/") else {}

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        if offset + len(buffer) > self.size:
            raise ends_early(self, self.size, offset + len(buffer) - self.size)
        done, failures = 0, 0
        while done < len(buffer):
            before = done
            try:
                for count in self._stream(offset + done, buffer[done:]):
                    done += count
                problem = "the answer ended early"
            except (exceptions.PreconditionError, FileNotFoundError) as error:
                raise changed(self, one_line(error)) from error
            except FINAL as error:
                raise self._unreadable(offset, buffer, one_line(error)) from error
            except exceptions.BaseError as error:
                problem = one_line(error)
            failures = 0 if done > before else failures + 1
            if failures == ATTEMPTS:
                raise self._unreadable(offset, buffer, f"{ATTEMPTS} attempts brought nothing; the last: {problem}")
            if done < len(buffer):
                time.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2**failures) * random.uniform(0.5, 1))

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`."""
        return asked(self, lambda: of_url(self.name))

    def _stream(self, offset: int, buffer: memoryview) -> Iterator[int]:
        """Fill `buffer` from `offset` on, as far as one request brings it; yields the bytes as they come."""
        options: Any = {"range": (offset, offset + len(buffer)), **self._condition}
        answer = obstore.get(self._store, self._path, options=options)
        version, size = _version(answer.meta), answer.meta["size"]
        if size != self.size or version not in (self.version, UNKNOWN):
            raise changed(self, f"{self.version} of {self.size} bytes is now {version} of {size}")
        done = 0
        for chunk in answer.stream(min_chunk_size=PROGRESS_BYTES):
            data = memoryview(chunk)[: len(buffer) - done]
            buffer[done : done + len(data)] = data
            done += len(data)
            yield len(data)

    def _unreadable(self, offset: int, buffer: memoryview, why: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: bytes {offset}+{len(buffer)} cannot be read: {why}")


def _version(meta: Any) -> str:
    """An object's generation or ETag; a web server that sends neither may have the time of the last change."""
    time_of_change = str(meta["last_modified"]) if meta["last_modified"].timestamp() else UNKNOWN
    return str(meta["version"] or meta["e_tag"] or time_of_change)


def open_store(ref: str, is_retried: bool = False) -> Any:
    """The obstore store that `ref` names.

    Args:
        is_retried: whether obstore is to repeat what fails.
    """
    plain = any(url.startswith("http://") for url in (ref, os.environ.get("AWS_ENDPOINT_URL", "")))
    options: Any = {"timeout": TIMEOUT, "allow_http": plain}
    retries: Any = None if is_retried else {"max_retries": 0}
    return obstore.store.from_url(ref.rstrip("/"), client_options=options, retry_config=retries)


class ObjectFolder:
    """A prefix in an object store or a folder on a web server."""

    def __init__(self, ref: str):
        self.ref = ref.rstrip("/")
        try:
            self._store = open_store(ref)
        except Exception as error:
            raise ConfigError(f"model.ref {ref!r} cannot be opened: {one_line(error)}") from error

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        url = f"{self.ref}/{name}"
        return opened(url, lambda: ObjectFile(self._store, name, url))
