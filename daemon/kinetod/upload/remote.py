"""One capture's folder in an object store: opened, verified, read and removed."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

from kinetod.upload import manifest
from kinetod.upload.interface import BLOCK_BYTES, MANIFEST, RemoteDamage, Stored, WorkerOptions
from kinetod.upload.urls import scheme_of

_CONNECT_S = 10.0
_S3_TRIES = 2  # of one request: the queue has more patience than the library, and shows what is wrong
READ_TRIES = 4
_PAUSE_S = 0.5


def open_store(url: str, options: WorkerOptions) -> tuple[Any, str]:
    """fsspec's file system for a URL and the path in it. Credentials are the library's own matter."""
    import fsspec

    scheme = scheme_of(url)
    arguments: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        config = {"connect_timeout": _CONNECT_S, "read_timeout": options.timeout_s, "retries": {"max_attempts": 1}}
        arguments |= {"config_kwargs": config}
        if options.endpoint:
            arguments |= {"endpoint_url": options.endpoint}
    fs, path = fsspec.core.url_to_fs(url, **arguments)
    if scheme == "s3":
        fs.retries = _S3_TRIES
    return fs, path


class RemoteCapture:
    """Reads what was uploaded; everything that it returns was verified."""

    def __init__(self, fs: Any, root: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._fs = fs
        self.root = root.rstrip("/")
        self._sleep = sleep

    def path(self, name: str) -> str:
        """In the store."""
        return f"{self.root}/{name}"

    def manifest(self, sha256: str = "") -> manifest.Manifest:
        """Raises RemoteDamage if it is gone or has another checksum, and what the file system raises."""
        data = self._read(MANIFEST)
        found = hashlib.sha256(data).hexdigest()
        if sha256 and found != sha256:
            raise RemoteDamage(f"{self.path(MANIFEST)} has the SHA-256 {found} instead of {sha256}")
        return manifest.from_bytes(data)

    def block(self, name: str, stored: Stored, number: int) -> bytes:
        """One block of a file, from 0. Raises RemoteDamage, and what the file system raises."""
        begin = number * BLOCK_BYTES
        data = self._read(name, begin, min(begin + BLOCK_BYTES, stored.size_bytes))
        if hashlib.sha256(data).hexdigest() != stored.blocks[number]:
            raise RemoteDamage(f"{self.path(name)} is not what was uploaded, from byte {begin} on")
        return data

    def verify(self, name: str, stored: Stored, etag: str = "", alive: Callable[[int], None] = lambda _: None) -> None:
        """Size, and checksum: the store's own tag if it is `etag`, else by reading all. Raises like `block`."""
        try:
            info = self._fs.info(self.path(name))
        except FileNotFoundError as exc:
            raise RemoteDamage(f"{self.path(name)} is not there") from exc
        if info["size"] != stored.size_bytes:
            raise RemoteDamage(f"{self.path(name)} has {info['size']} bytes instead of {stored.size_bytes}")
        if etag and str(info.get("ETag", "")).strip('"') == etag:
            return
        for number in range(len(stored.blocks)):
            self.block(name, stored, number)
            alive(0)

    def remove(self) -> None:
        """The manifest first: what is left after an interruption is not a capture. Raises what the store raises."""
        for name in (self.path(MANIFEST), self.root):
            if self._fs.exists(name):
                self._fs.rm(name, recursive=True)

    def _read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """Some bytes or all, with a few tries. Raises RemoteDamage if there is no such object."""
        if begin is not None and begin == end:
            return b""
        for attempt in range(READ_TRIES):
            try:
                data: bytes = self._fs.cat_file(self.path(name), start=begin, end=end)
            except FileNotFoundError as exc:
                raise RemoteDamage(f"{self.path(name)} is not there") from exc
            except Exception:
                if attempt + 1 == READ_TRIES:
                    raise
                self._sleep(_PAUSE_S * 2**attempt)
            else:
                return data
        raise AssertionError("unreachable")
