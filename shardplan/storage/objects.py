"""Objects in stores (gs, s3, az) and files on web servers, read by ranges with obstore.

obstore checks that a server sends the requested range. This module adds two things: every response must be of the
version that was opened, and a read that fails continues at the byte where it stopped.
"""

import os
import random
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import obstore
import obstore.store
from obstore import exceptions

from shardplan.errors import ConfigError, one_line
from shardplan.storage.checksums import Checksum, fetch_checksum
from shardplan.storage.folder import (
    REMOTE,
    File,
    RefKey,
    changed_error,
    open_or_none,
    query_checksum,
    truncated_error,
    unreadable_error,
)

TIMEOUT = timedelta(seconds=60)
"""Timeout of one request, body included; obstore's 30 s are too short for 16 MiB on a busy link."""
PROGRESS_BYTES = 64 * 1024
"""Bytes that a request must deliver within the timeout to count as progress; data is kept in portions of this size."""
ATTEMPTS = 8
"""Consecutive attempts without progress after which a read fails, about half a minute."""
ATTEMPTS_TO_OPEN = 4
"""Attempts to open an object, about 2 seconds: a wrong address fails in the same way as a busy server."""
FIRST_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.2, 10.0
"""Seconds between attempts: doubled each time, minus up to half at random, so that hosts do not retry in step."""
UNKNOWN = "unknown"
"""Version of a file for which a web server sends neither ETag nor date."""
PERMANENT_ERRORS = (
    exceptions.NotSupportedError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError,
    exceptions.InvalidPathError, exceptions.UnknownConfigurationKeyError,
)  # fmt: skip
"""Errors after which another attempt is useless."""


class ObjectFile:
    """An object in a store, read by ranges."""

    tuning = REMOTE
    is_shared = True

    def __init__(self, store: Any, path: str, url: str, version: str | None = None):
        """Open the object at `path`.

        Args:
            version: version of a file that cannot change, such as a file at a commit; default: the version that the
                store reports.

        Raises:
            FileNotFoundError: there is no such object.
        """
        meta = _head(store, path)
        self._store, self._path, self.name = store, path, url
        self.size: int = meta["size"]
        self.version = version or _version(meta)
        self._is_fixed = version is not None
        is_strong = meta["e_tag"] and not meta["e_tag"].startswith("W/") and not self._is_fixed
        self._condition = {"if_match": meta["e_tag"]} if is_strong else {}

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        if offset + len(buffer) > self.size:
            raise truncated_error(self, self.size, offset + len(buffer) - self.size)
        done, failures = 0, 0
        while done < len(buffer):
            before = done
            try:
                for count in self._stream(offset + done, buffer[done:]):
                    done += count
                problem = "the response ended early"
            except (exceptions.PreconditionError, FileNotFoundError) as error:
                raise changed_error(self, one_line(error)) from error
            except PERMANENT_ERRORS as error:
                raise unreadable_error(self, offset, len(buffer), one_line(error)) from error
            except exceptions.BaseError as error:
                problem = one_line(error)
            failures = 0 if done > before else failures + 1
            if failures == ATTEMPTS:
                why = f"no data in {ATTEMPTS} attempts; last error: {problem}"
                raise unreadable_error(self, offset, len(buffer), why)
            if done < len(buffer):
                _wait(failures)

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`."""
        return query_checksum(self, lambda: fetch_checksum(self.name))

    def _stream(self, offset: int, buffer: memoryview) -> Iterator[int]:
        """Fill `buffer` by one request for the data from `offset` on; yield the size of each chunk that arrives."""
        options: Any = {"range": (offset, offset + len(buffer)), **self._condition}
        response = obstore.get(self._store, self._path, options=options)
        version, size = self.version if self._is_fixed else _version(response.meta), response.meta["size"]
        if size != self.size or version not in (self.version, UNKNOWN):
            raise changed_error(self, f"version {self.version} of {self.size} bytes is now {version} of {size}")
        done = 0
        for chunk in response.stream(min_chunk_size=PROGRESS_BYTES):
            data = memoryview(chunk)[: len(buffer) - done]
            buffer[done : done + len(data)] = data
            done += len(data)
            yield len(data)


def _head(store: Any, path: str) -> Any:
    """Return the properties of an object, repeating failed requests."""
    for failures in range(1, ATTEMPTS_TO_OPEN):
        try:
            return obstore.head(store, path)
        except (FileNotFoundError, *PERMANENT_ERRORS):
            raise
        except exceptions.BaseError:
            _wait(failures)
    return obstore.head(store, path)


def _wait(failures: int) -> None:
    """Wait after the given number of consecutive failures."""
    time.sleep(min(MAX_RETRY_DELAY_S, FIRST_RETRY_DELAY_S * 2**failures) * random.uniform(0.5, 1))


def _version(meta: Any) -> str:
    """Return an object's generation or ETag, or the modification time if a web server sends only that."""
    modification_time = str(meta["last_modified"]) if meta["last_modified"].timestamp() else UNKNOWN
    return str(meta["version"] or meta["e_tag"] or modification_time)


def open_store(ref: str, retries: bool = False, headers: Mapping[str, str] | None = None) -> Any:
    """Return the obstore store that `ref` names.

    Args:
        retries: whether obstore repeats requests that fail.
        headers: headers of every request; after a redirect to another host, headers with credentials are left out.
    """
    is_plain_http = any(url.startswith("http://") for url in (ref, os.environ.get("AWS_ENDPOINT_URL", "")))
    options: Any = {"timeout": TIMEOUT, "allow_http": is_plain_http, "default_headers": dict(headers or {})}
    retry_config: Any = None if retries else {"max_retries": 0}
    return obstore.store.from_url(ref.rstrip("/"), client_options=options, retry_config=retry_config)


class ObjectFolder:
    """A prefix in an object store or a folder on a web server."""

    def __init__(self, ref: str, key: RefKey = RefKey.MODEL):
        self.ref = ref.rstrip("/")
        try:
            self._store = open_store(ref)
        except Exception as error:
            raise ConfigError(f"{key} {ref!r} cannot be opened: {one_line(error)}") from error

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        url = f"{self.ref}/{name}"
        return open_or_none(url, lambda: ObjectFile(self._store, name, url))
