"""The upload of one capture in the worker: every file, each verified, the manifest last.

Theory of operation
    Progress is noted in upload.json in the capture's folder: the URL, the checksums of each finished file, and for an
    unfinished one what its sink needs to continue. The note counts only for the same URL. Local files of an ended
    capture never change; one that does is damaged and is not uploaded as if it were intact.

    A capture without its manifest is incomplete to any reader, and the manifest is written after every file has been
    verified in the store.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kineto_trace.errors import FileError
from kineto_trace.store import object_stores, upload_manifest
from kineto_trace.store import upload_manifest as manifest

from kinetod.uploads.sinks import LocalFile, Sink
from kinetod.uploads.worker_protocol import (
    BLOCK_BYTES,
    MANIFEST,
    STATE_FILE,
    LocalDamage,
    Progress,
    RemoteDamage,
    Stored,
    WorkerOptions,
)

_TEMPORARY = ".tmp"


def open_store(url: str, options: WorkerOptions) -> tuple[Any, str]:
    """fsspec's file system for a URL and the path in it. The library itself finds credentials."""
    return object_stores.open_store(url, endpoint=options.endpoint, timeout_s=options.timeout_s)


class RemoteCapture:
    """Reads uploaded data; returns nothing unverified."""

    def __init__(self, fs: Any, root: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._fs = fs
        self.root = root.rstrip("/")
        self._sleep = sleep

    def path(self, name: str) -> str:
        """The path in the store."""
        return f"{self.root}/{name}"

    def manifest(self, sha256: str = "") -> manifest.Manifest:
        """Reads the manifest. Raises RemoteDamage if it is missing or differs, and errors of the file system."""
        data = self._read(MANIFEST)
        found = hashlib.sha256(data).hexdigest()
        if sha256 and found != sha256:
            raise RemoteDamage(f"{self.path(MANIFEST)} has the SHA-256 {found} instead of {sha256}")
        try:
            return manifest.from_bytes(data)
        except FileError as exc:
            raise RemoteDamage(f"{self.path(MANIFEST)}: {exc}") from exc

    def block(self, name: str, stored: Stored, number: int) -> bytes:
        """One block of a file, counted from 0. Raises RemoteDamage, and errors of the file system."""
        begin = number * BLOCK_BYTES
        data = self._read(name, begin, min(begin + BLOCK_BYTES, stored.size_bytes))
        if hashlib.sha256(data).hexdigest() != stored.blocks[number]:
            raise RemoteDamage(f"{self.path(name)} is not what was uploaded, from byte {begin} on")
        return data

    def verify(self, name: str, stored: Stored, etag: str = "", alive: Callable[[int], None] = lambda _: None) -> None:
        """Verifies size and checksum: by the store's own tag if that is `etag`, otherwise by reading everything. Raises
        like `block`.
        """
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
        """Deletes the manifest first: remains after an interruption are not a capture. Raises errors of the store."""
        for name in (self.path(MANIFEST), self.root):
            if self._fs.exists(name):
                self._fs.rm(name, recursive=True)

    def _read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """Reads some or all bytes, with a few tries. Raises RemoteDamage if there is no such object."""
        if begin is not None and begin == end:
            return b""
        path = self.path(name)
        try:
            return object_stores.with_retries(lambda: self._fs.cat_file(path, start=begin, end=end), self._sleep)
        except FileNotFoundError as exc:
            raise RemoteDamage(f"{path} is not there") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadJob:
    """An upload requested by the daemon. The keys of `known` and `damaged` are paths below `folder`/targets."""

    folder: Path
    url: str
    capture: Mapping[str, Any]  # for the manifest
    known: Mapping[str, tuple[int, str]]  # size and SHA-256 as recorded
    damaged: Mapping[str, str]  # not to be uploaded, with the reason


class Notes:
    """upload.json of one capture."""

    def __init__(self, folder: Path, url: str) -> None:
        self._path = folder / STATE_FILE
        self._files: dict[str, dict[str, Any]] = {}
        self._url = url
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            document = json.loads(self._path.read_bytes())
            if document["url"] == url:
                self._files = {str(name): dict(notes) for name, notes in document["files"].items()}

    def get(self, name: str, key: str) -> Any:
        """The note for a file; None if there is none."""
        return self._files.get(name, {}).get(key)

    def note(self, name: str, key: str, value: Any) -> None:
        """Writes a note; it is on disk when this returns. Raises OSError."""
        self._files.setdefault(name, {})[key] = value
        self._write()

    def done(self, name: str) -> Stored | None:
        """The record of a file that is uploaded and verified."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if (value := self.get(name, "stored")) is not None:
                return upload_manifest.to_stored(value)
        return None

    def finish(self, name: str, stored: Stored) -> None:
        """Records that a file is uploaded and verified. Raises OSError."""
        self._files[name] = {"stored": asdict(stored)}
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(self._path.name + _TEMPORARY)
        with temporary.open("wb") as file:
            file.write(json.dumps({"url": self._url, "files": self._files}).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)


def upload_capture(job: UploadJob, sink: Sink, remote: RemoteCapture, progress: Progress) -> tuple[str, int]:
    """Uploads a capture; returns the manifest's SHA-256 and the bytes of all files.

    Raises LocalDamage, RemoteDamage, Cancelled, and errors of the file systems.
    """
    notes = Notes(job.folder, job.url)
    done: dict[str, Stored] = {}
    for name in file_names(job.folder):
        if name in job.damaged:
            continue
        if (stored := notes.done(name)) is None:
            stored = _upload_file(job, name, notes, sink, remote, progress)
            notes.finish(name, stored)
        else:
            progress(stored.size_bytes)
        done[name] = stored
    for name, (size, sha256) in job.known.items():
        if name not in job.damaged and (
            name not in done or (done[name].size_bytes, done[name].sha256) != (size, sha256)
        ):
            raise LocalDamage(name, "is missing" if name not in done else "is not what was written")
    document = upload_manifest.Manifest(capture=job.capture, files=done, damaged=job.damaged).to_bytes()
    digest = hashlib.sha256(document).hexdigest()
    sink.put_bytes(document, remote.path(MANIFEST))
    remote.manifest(digest)
    return digest, sum(stored.size_bytes for stored in done.values())


def file_names(folder: Path) -> list[str]:
    """Regular files of a capture as target/file, in a stable order, small ones first."""
    root = folder / "targets"
    found = []
    for parent, folders, names in os.walk(root):
        folders.sort()
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink() and not name.endswith(_TEMPORARY):
                found.append((path.stat().st_size, str(path.relative_to(root))))
    return [name for _, name in sorted(found)]


def _upload_file(
    job: UploadJob, name: str, notes: Notes, sink: Sink, remote: RemoteCapture, progress: Progress
) -> Stored:
    size, sha256 = job.known.get(name, (None, ""))
    source = LocalFile(job.folder / "targets" / name, name, sha256)
    if size is not None and source.size != size:
        raise LocalDamage(name, f"has {source.size} bytes instead of {size}")
    etag = sink.put(source, remote.path(name), notes, progress)
    stored = source.stored()
    remote.verify(name, stored, etag, progress)
    return stored
