"""One capture's folder in an object store: opened, verified, read and removed."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

from kineto_trace.errors import FileError
from kineto_trace.store import object_stores
from kineto_trace.store import upload_manifest as manifest

from kinetod.uploads.worker_protocol import BLOCK_BYTES, MANIFEST, RemoteDamage, Stored, WorkerOptions


def open_store(url: str, options: WorkerOptions) -> tuple[Any, str]:
    """fsspec's file system for a URL and the path in it. Credentials are the library's own matter."""
    return object_stores.open_store(url, endpoint=options.endpoint, timeout_s=options.timeout_s)


class RemoteCapture:
    """Reads what was uploaded; everything that it returns was verified."""

    def __init__(self, fs: Any, root: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._fs = fs
        self.root = root.rstrip("/")
        self._sleep = sleep

    def path(self, name: str) -> str:
        """The path in the store."""
        return f"{self.root}/{name}"

    def manifest(self, sha256: str = "") -> manifest.Manifest:
        """Reads the manifest. Raises RemoteDamage if it is missing or differs, and what the file system raises."""
        data = self._read(MANIFEST)
        found = hashlib.sha256(data).hexdigest()
        if sha256 and found != sha256:
            raise RemoteDamage(f"{self.path(MANIFEST)} has the SHA-256 {found} instead of {sha256}")
        try:
            return manifest.from_bytes(data)
        except FileError as exc:
            raise RemoteDamage(f"{self.path(MANIFEST)}: {exc}") from exc

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
        path = self.path(name)
        try:
            return object_stores.patiently(lambda: self._fs.cat_file(path, start=begin, end=end), self._sleep)
        except FileNotFoundError as exc:
            raise RemoteDamage(f"{path} is not there") from exc
