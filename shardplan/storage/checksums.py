"""Checksums of files: what stores have on record, and cyclic redundancy checks (CRC) put together from parts.

A CRC is a remainder of polynomials over two elements, so that of a file follows from those of its parts, whoever read
them and in whatever order; a SHA does not. Method of zlib's crc32_combine (https://github.com/madler/zlib).
"""

import base64
import hashlib
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol, cast

import crc32c

from shardplan.errors import ConfigError

SHA256 = "sha256"
POLYNOMIALS = {"crc32c": 0x82F63B78, "crc32": 0xEDB88320}
"""Algorithm -> its polynomial, with the bits reversed."""
_CRCS: Mapping[str, Callable[[memoryview], int]] = {"crc32c": crc32c.crc32c, "crc32": zlib.crc32}
WAIT = 60.0
"""Seconds that a server has to answer."""


@dataclass(frozen=True)
class Checksum:
    """A checksum of a whole file."""

    algorithm: str
    """crc32c, crc32 or sha256."""
    digest: bytes

    @property
    def is_crc(self) -> bool:
        """Whether it can be put together from those of parts."""
        return self.algorithm in POLYNOMIALS

    def __str__(self) -> str:
        return f"{self.algorithm} {self.digest.hex()}"

    @classmethod
    def of_crc(cls, algorithm: str, value: int) -> "Checksum":
        """The checksum that is a CRC."""
        return cls(algorithm, value.to_bytes(4, "big"))

    @classmethod
    def from_base64(cls, algorithm: str, text: str) -> "Checksum":
        """As stores write it."""
        return cls(algorithm, base64.b64decode(text.strip().strip(":")))


def crc(algorithm: str, data: memoryview) -> int:
    """The CRC of some bytes."""
    return _CRCS[algorithm](data)


def joined(algorithm: str, before: int, after: int, nbytes: int) -> int:
    """The CRC of two parts in sequence, of which the second has `nbytes` bytes."""
    return _product(_power(algorithm, 8 * nbytes), before, POLYNOMIALS[algorithm]) ^ after


@lru_cache
def _power(algorithm: str, exponent: int) -> int:
    """x to the power of `exponent`, modulo the polynomial."""
    result, square = 1 << 31, 1 << 30  # x^0, x^1
    while exponent:
        if exponent & 1:
            result = _product(result, square, POLYNOMIALS[algorithm])
        square = _product(square, square, POLYNOMIALS[algorithm])
        exponent >>= 1
    return result


def _product(a: int, b: int, polynomial: int) -> int:
    """a * b modulo the polynomial; the highest bit is x^0."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = (b >> 1) ^ (polynomial if b & 1 else 0)
    return result


class _Readable(Protocol):
    size: int

    def read_into(self, offset: int, buffer: memoryview) -> None: ...


def sha256(file: _Readable, nbytes: int) -> Checksum:
    """The SHA-256 of a file, read from its first byte to its last, `nbytes` at a time."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(nbytes, file.size)))
    for offset in range(0, file.size, nbytes):
        part = buffer[: file.size - offset]
        file.read_into(offset, part)
        digest.update(part)
    return Checksum(SHA256, digest.digest())


def of_url(url: str) -> Checksum | None:
    """What a store or server has on record of the file at `url`, or None where that is nothing that can be checked.

    Raises:
        ConfigError: it can only be asked with a package that is not installed.
    """
    scheme, _, path = url.partition("://")
    if scheme == "gs":
        import gcsfs  # of Levanter's dependencies

        return of_properties(gcsfs.GCSFileSystem().info(path))
    if scheme == "s3":
        return _of_headers(_s3_headers(*path.split("/", 1)))
    if scheme in ("http", "https"):
        wanted = {"x-amz-checksum-mode": "ENABLED", "Want-Repr-Digest": "crc32c=2, sha-256=1"}
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD", headers=wanted), timeout=WAIT) as answer:
            found = answer.headers
            return _of_headers({name.lower(): ", ".join(found.get_all(name)) for name in found})
    return None


def of_properties(properties: Mapping[str, Any]) -> Checksum | None:
    """What fsspec says of a file: Google's crc32c, or the SHA-256 of a large file on the Hugging Face hub."""
    if properties.get("crc32c"):
        return Checksum.from_base64("crc32c", properties["crc32c"])
    digest = getattr(properties.get("lfs"), "sha256", None)
    return Checksum(SHA256, bytes.fromhex(digest)) if digest else None


@cache
def _s3_client() -> Any:
    try:
        import botocore.session
    except ImportError as error:
        raise ConfigError("checksums of s3:// files need botocore: pip install 'shardplan[s3-checksums]'") from error
    return botocore.session.get_session().create_client("s3")


def _s3_headers(bucket: str, key: str) -> dict[str, str]:
    answer = _s3_client().head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
    return cast(dict[str, str], answer["ResponseMetadata"]["HTTPHeaders"])


def _of_headers(headers: Mapping[str, str]) -> Checksum | None:
    """Amazon's, Google's, and those of RFC 9530; by lower-case names."""
    for algorithm in (*POLYNOMIALS, SHA256):
        text = headers.get(f"x-amz-checksum-{algorithm}")
        if text and "-" not in text:  # a number behind it: a checksum of the checksums of parts
            return Checksum.from_base64(algorithm, text)
    for name in ("x-goog-hash", "repr-digest"):
        entries = dict(entry.strip().partition("=")[::2] for entry in headers.get(name, "").split(","))
        for key, algorithm in (("crc32c", "crc32c"), ("sha-256", SHA256)):
            if entries.get(key):
                return Checksum.from_base64(algorithm, entries[key])
    return None
