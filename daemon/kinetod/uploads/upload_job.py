"""The upload of one capture, as the worker does it: every file, each verified, the manifest last.

Theory of operation
    What has been done is noted in upload.json in the capture's folder: the URL, for each finished file its checksums,
    for an unfinished one what its sink needs to go on. The note counts only for the same URL. Local files of an
    ended capture never change; one that does is damaged, and nothing of it is uploaded as if it were right.

    No reader takes a capture without its manifest for complete, and the manifest is written after every file has
    been verified in the store.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kineto_trace.store import upload_manifest

from kinetod.uploads.local_source import LocalFile
from kinetod.uploads.remote_capture import RemoteCapture
from kinetod.uploads.sinks import Sink
from kinetod.uploads.worker_protocol import MANIFEST, STATE_FILE, LocalDamage, Progress, Stored

_TEMPORARY = ".tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadJob:
    """An upload that the daemon asks for. The keys of `known` and `damaged` are paths below `folder`/targets."""

    folder: Path
    url: str
    capture: Mapping[str, Any]  # for the manifest
    known: Mapping[str, tuple[int, str]]  # size and SHA-256 as recorded
    damaged: Mapping[str, str]  # not to be uploaded, and why


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
    """The manifest's SHA-256 and the bytes of all files.

    Raises LocalDamage, RemoteDamage, Cancelled, and what the file systems raise.
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
