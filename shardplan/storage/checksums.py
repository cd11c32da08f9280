"""Checksums of files: recorded by a store, or combined from the CRCs of a file's parts.

A CRC is a remainder of polynomials over GF(2). Therefore the CRC of a file follows from the CRCs of its parts, in
whatever order and by whichever process these were read; a SHA does not. The method is that of zlib's crc32_combine
(https://github.com/madler/zlib).
"""

import base64
import hashlib
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, Protocol, cast

import crc32c

from shardplan.errors import ConfigError


class ChecksumAlgorithm(StrEnum):
    """The checksum algorithms that stores use."""

    CRC32C = "crc32c"
    CRC32 = "crc32"
    SHA256 = "sha256"


POLYNOMIALS: Mapping[ChecksumAlgorithm, int] = {
    ChecksumAlgorithm.CRC32C: 0x82F63B78,
    ChecksumAlgorithm.CRC32: 0xEDB88320,
}
"""CRC algorithm -> its polynomial, with the bits reversed."""
_CRCS: Mapping[ChecksumAlgorithm, Callable[[memoryview], int]] = {
    ChecksumAlgorithm.CRC32C: crc32c.crc32c,
    ChecksumAlgorithm.CRC32: zlib.crc32,
}
REQUEST_TIMEOUT_S = 60.0
"""Seconds within which a server must respond."""


@dataclass(frozen=True)
class Checksum:
    """A checksum of a complete file."""

    algorithm: ChecksumAlgorithm
    digest: bytes

    @property
    def is_crc(self) -> bool:
        """Whether checksums of parts can be combined to a checksum of this kind."""
        return self.algorithm in POLYNOMIALS

    def __str__(self) -> str:
        return f"{self.algorithm} {self.digest.hex()}"

    @classmethod
    def from_crc(cls, algorithm: ChecksumAlgorithm, value: int) -> "Checksum":
        """Return the checksum whose digest is the CRC `value`, big-endian."""
        return cls(algorithm, value.to_bytes(4, "big"))

    @classmethod
    def from_base64(cls, algorithm: ChecksumAlgorithm, text: str) -> "Checksum":
        """Parse the base64 text in which stores write a digest, with or without colons around it."""
        return cls(algorithm, base64.b64decode(text.strip().strip(":")))


def compute_crc(algorithm: ChecksumAlgorithm, data: memoryview) -> int:
    """Return the CRC of `data`."""
    return _CRCS[algorithm](data)


def combine_crcs(algorithm: ChecksumAlgorithm, first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC of two consecutive parts from their CRCs; the second part has `second_nbytes` bytes."""
    return _multiply(_power(algorithm, 8 * second_nbytes), first, POLYNOMIALS[algorithm]) ^ second


@lru_cache
def _power(algorithm: ChecksumAlgorithm, exponent: int) -> int:
    """Return x to the power of `exponent`, modulo the polynomial."""
    result, square = 1 << 31, 1 << 30  # x^0, x^1
    while exponent:
        if exponent & 1:
            result = _multiply(result, square, POLYNOMIALS[algorithm])
        square = _multiply(square, square, POLYNOMIALS[algorithm])
        exponent >>= 1
    return result


def _multiply(a: int, b: int, polynomial: int) -> int:
    """Return a * b modulo the polynomial; the highest bit is x^0."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = (b >> 1) ^ (polynomial if b & 1 else 0)
    return result


class _Readable(Protocol):
    size: int

    def read_into(self, offset: int, buffer: memoryview) -> None: ...


def compute_sha256(file: _Readable, nbytes: int) -> Checksum:
    """Return the SHA-256 of a file, which is read from start to end, `nbytes` at a time."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(nbytes, file.size)))
    for offset in range(0, file.size, nbytes):
        part = buffer[: file.size - offset]
        file.read_into(offset, part)
        digest.update(part)
    return Checksum(ChecksumAlgorithm.SHA256, digest.digest())


def fetch_checksum(url: str) -> Checksum | None:
    """Return the checksum that the store or server at `url` has recorded for a file; None if there is none.

    Raises:
        ConfigError: the request needs a package that is not installed.
    """
    scheme, _, path = url.partition("://")
    if scheme == "gs":
        import gcsfs  # a dependency of Levanter

        return checksum_from_properties(gcsfs.GCSFileSystem().info(path))
    if scheme == "s3":
        return _checksum_from_headers(_s3_headers(*path.split("/", 1)))
    if scheme in ("http", "https"):
        request = urllib.request.Request(
            url,
            method="HEAD",
            headers={"x-amz-checksum-mode": "ENABLED", "Want-Repr-Digest": "crc32c=2, sha-256=1"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            headers = response.headers
            return _checksum_from_headers({name.lower(): ", ".join(headers.get_all(name)) for name in headers})
    return None


def checksum_from_properties(properties: Mapping[str, Any]) -> Checksum | None:
    """Return the checksum in fsspec's properties (Google's crc32c, or the hub's SHA-256 of a large file); else None."""
    if properties.get("crc32c"):
        return Checksum.from_base64(ChecksumAlgorithm.CRC32C, properties["crc32c"])
    digest = getattr(properties.get("lfs"), "sha256", None)
    return Checksum(ChecksumAlgorithm.SHA256, bytes.fromhex(digest)) if digest else None


@cache
def _s3_client() -> Any:
    try:
        import botocore.session
    except ImportError as error:
        raise ConfigError("checksums of s3:// files need botocore: pip install botocore") from error
    return botocore.session.get_session().create_client("s3")


def _s3_headers(bucket: str, key: str) -> dict[str, str]:
    response = _s3_client().head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
    return cast(dict[str, str], response["ResponseMetadata"]["HTTPHeaders"])


def _checksum_from_headers(headers: Mapping[str, str]) -> Checksum | None:
    """Return the whole file's checksum in HTTP headers of Amazon, Google or RFC 9530; None without one.

    Header names are lower-case.
    """
    for algorithm in ChecksumAlgorithm:
        text = headers.get(f"x-amz-checksum-{algorithm}")
        if text and "-" not in text:  # a number after the dash: a checksum of the checksums of parts
            return Checksum.from_base64(algorithm, text)
    for name in ("x-goog-hash", "repr-digest"):
        entries = dict(entry.strip().partition("=")[::2] for entry in headers.get(name, "").split(","))
        for key, algorithm in (("crc32c", ChecksumAlgorithm.CRC32C), ("sha-256", ChecksumAlgorithm.SHA256)):
            if entries.get(key):
                return Checksum.from_base64(algorithm, entries[key])
    return None
