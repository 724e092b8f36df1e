"""A local file to be uploaded: read once, part by part, with every checksum that may be needed."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kinetod.store.path_guard import open_regular
from kinetod.uploads.worker_protocol import BLOCK_BYTES, MAX_PARTS, PART_BYTES, LocalDamage, Stored


class Part(NamedTuple):
    """A part, numbered from 1 as in S3."""

    number: int
    data: bytes
    md5: bytes


def part_bytes(size: int) -> int:
    """The part size for a file of that size: a multiple of BLOCK_BYTES, so that MAX_PARTS parts suffice."""
    needed = -(-size // MAX_PARTS)
    return max(PART_BYTES, -(-needed // BLOCK_BYTES) * BLOCK_BYTES)


class LocalFile:
    """One file; `stored` and `etag` are known when all parts were iterated over."""

    def __init__(self, path: Path, name: str, sha256: str = "") -> None:
        """name: for messages and manifests; sha256: as recorded; empty: unknown. Raises LocalDamage."""
        self.path = path
        self.name = name
        self._expected = sha256
        try:
            with open_regular(self.path) as file:
                self.size = os.fstat(file.fileno()).st_size
        except OSError as exc:
            raise LocalDamage(name, f"cannot be read ({exc.strerror})") from exc
        self.part_bytes = part_bytes(self.size)
        self._md5s: list[bytes] = []
        self._sha256 = hashlib.sha256()
        self._blocks: list[str] = []

    def parts(self) -> Iterator[Part]:
        """The parts: at least one, which may be empty. Raises LocalDamage."""
        self._md5s, self._blocks, self._sha256 = [], [], hashlib.sha256()
        try:
            with open_regular(self.path) as file:
                for number in range(1, max(1, -(-self.size // self.part_bytes)) + 1):
                    yield self._part(number, _read(file, min(self.part_bytes, self.size - file.tell())))
                if file.read(1):
                    raise LocalDamage(self.name, "grew while it was read")
        except OSError as exc:
            raise LocalDamage(self.name, f"cannot be read ({exc.strerror})") from exc

    def _part(self, number: int, data: bytes) -> Part:
        self._sha256.update(data)
        view = memoryview(data)
        for begin in range(0, len(data), BLOCK_BYTES):
            self._blocks.append(hashlib.sha256(view[begin : begin + BLOCK_BYTES]).hexdigest())
        md5 = hashlib.md5(data, usedforsecurity=False).digest()
        self._md5s.append(md5)
        return Part(number, data, md5)

    def stored(self) -> Stored:
        """The file as read. Raises LocalDamage if it differs from the record."""
        found = self._sha256.hexdigest()
        if self._expected and found != self._expected:
            raise LocalDamage(self.name, f"has the SHA-256 {found} instead of {self._expected}")
        return Stored(size_bytes=self.size, sha256=found, blocks=tuple(self._blocks))

    def etag(self) -> str:
        """The ETag that S3 gives a file of these parts, unless it encrypts with its own keys."""
        if len(self._md5s) == 1:
            return self._md5s[0].hex()
        joined = hashlib.md5(b"".join(self._md5s), usedforsecurity=False).hexdigest()
        return f"{joined}-{len(self._md5s)}"


def _read(file: BinaryIO, size: int) -> bytes:
    blocks = []
    while size > 0 and (block := file.read(size)):
        blocks.append(block)
        size -= len(block)
    if size:
        raise OSError(0, "it is shorter than it was")
    return b"".join(blocks)
