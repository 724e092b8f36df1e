"""The upload of one capture in the worker: every file, each verified, the manifest last.

Theory of operation
    Progress is noted in upload.json in the capture's folder: the URL, the checksums of each finished file, and for an
    unfinished one what its sink needs to continue. The note counts only for the same URL. Local files of an ended
    capture never change; one that does is damaged and is not uploaded as if it were intact.

    A capture without its manifest is incomplete to any reader, and the manifest is written after every file has been
    verified in the store.

    A local file is read once, and written into a store of any kind, so that an object is either complete or absent:

    s3      parts of a multipart upload; a retry asks which have arrived and continues there
    file    a .part file that a retry continues, then a rename
    others  in one piece by the library, whose objects appear when they are complete; a retry begins anew

    `put` returns the entity tag to compare, or an empty text if the store is to be read back instead.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from kineto_trace.base.atomic_files import fsync_directory
from kineto_trace.errors import FileError
from kineto_trace.store import object_stores, upload_manifest
from kineto_trace.store import upload_manifest as manifest

from kinetod.store.path_guard import open_regular
from kinetod.uploads.worker_protocol import (
    BLOCK_BYTES,
    MANIFEST,
    MAX_PARTS,
    PART_BYTES,
    STATE_FILE,
    LocalDamage,
    Progress,
    RemoteDamage,
    Stored,
    WorkerOptions,
)

_TEMPORARY = ".tmp"
_PART_SUFFIX = ".part"
_STEP_S = 1.0


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
                    raise LocalDamage(self.name, "grew while it was being read")
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
        raise OSError(0, "it has become shorter")
    return b"".join(blocks)


class Throttle:
    """Limits the rate of sending: each amount is charged first, and the same user's next one waits until it is worked
    off. Rate 0: no limit.

    The rate is divided by the number of users with an upload in progress. So one user's debt, perhaps a file of hours,
    delays no other user.
    """

    def __init__(
        self,
        bytes_per_second: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at: dict[str, float] = {}  # by the clock, when each user's debt is worked off

    def share(self, user: str) -> "Share":
        """This user's share of the throttle."""
        return Share(self, user)

    def take(self, size: int, alive: Callable[[], None] = lambda: None, *, user: str = "") -> None:
        """Returns when `size` bytes may be sent; until then calls `alive` at least every second, which may raise."""
        if self._rate <= 0:
            return
        with self._lock:
            now = self._clock()
            self._free_at = {each: at for each, at in self._free_at.items() if at > now}
            begin = self._free_at.setdefault(user, now)
            self._free_at[user] = begin + size * len(self._free_at) / self._rate
        while (rest := begin - self._clock()) > 0:
            alive()
            self._sleep(min(rest, _STEP_S))


class Share:
    """One user's part of a throttle."""

    def __init__(self, throttle: Throttle, user: str) -> None:
        self._throttle = throttle
        self._user = user

    def take(self, size: int, alive: Callable[[], None] = lambda: None) -> None:
        """See Throttle.take."""
        self._throttle.take(size, alive, user=self._user)


class RetryNotes(Protocol):
    """Notes of one try for the next, per file; kept on disk."""

    def get(self, name: str, key: str) -> Any:
        """The note for a file; None if there is none."""
        ...

    def note(self, name: str, key: str, value: Any) -> None:
        """Writes a note; it is on disk when this returns."""
        ...


class Sink:
    """For stores that support nothing better."""

    def __init__(self, fs: Any, throttle: Share) -> None:
        self._fs = fs
        self._throttle = throttle

    def put(self, source: LocalFile, target: str, memory: RetryNotes, progress: Progress) -> str:
        """Uploads the file completely, or not at all. Raises errors of the file system, LocalDamage, Cancelled."""
        parts = source.parts()
        first = next(parts)
        for _ in parts:
            progress(0)
        source.stored()
        self._throttle.take(source.size, lambda: progress(0))
        if source.size <= source.part_bytes:
            self._fs.pipe_file(target, first.data)
        else:
            self._fs.put_file(str(source.path), target, callback=_callback(progress))
        progress(source.size)
        return ""

    def put_bytes(self, data: bytes, target: str) -> None:
        """Writes a small object completely, or not at all. Raises errors of the file system."""
        self._fs.pipe_file(target, data)


class S3Sink(Sink):
    """Multipart uploads through s3fs, which offers S3's own calls."""

    def put(self, source: LocalFile, target: str, memory: RetryNotes, progress: Progress) -> str:
        """See Sink.put."""
        if source.size <= source.part_bytes:
            super().put(source, target, memory, progress)
            return source.etag()
        bucket, key, _ = self._fs.split_path(target)
        where = {"Bucket": bucket, "Key": key}
        upload_id, there = self._begin(source, where, memory)
        tags: dict[int, str] = {}
        upload = {**where, "UploadId": upload_id}
        for part in source.parts():
            tag = self._known(part, there, memory, source)
            tags[part.number] = tag or self._send(part, upload, memory, source, progress)
            progress(len(part.data))
        try:
            source.stored()
        except LocalDamage:
            self._fs.call_s3("abort_multipart_upload", **upload)
            raise
        listed = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(tags.items())]
        self._fs.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": listed})
        self._fs.invalidate_cache(target)
        return source.etag()

    def _begin(
        self, source: LocalFile, where: dict[str, str], memory: RetryNotes
    ) -> tuple[str, dict[int, tuple[str, int]]]:
        """The upload to continue and its parts: tag and size by number."""
        if (upload_id := memory.get(source.name, "upload_id")) is not None:
            with contextlib.suppress(FileNotFoundError):  # no such upload: it was completed or aborted in between
                return upload_id, self._list_parts({**where, "UploadId": upload_id})
        self._abort_lost(where)
        created = self._fs.call_s3("create_multipart_upload", **where)
        memory.note(source.name, "upload_id", created["UploadId"])
        return created["UploadId"], {}

    def _abort_lost(self, where: dict[str, str]) -> None:
        """Aborts uploads to this key that began just before an interruption, so that no note lists them."""
        with contextlib.suppress(OSError):  # listing them may not be permitted
            page = self._fs.call_s3("list_multipart_uploads", Bucket=where["Bucket"], Prefix=where["Key"])
            for each in page.get("Uploads", ()):
                if each["Key"] == where["Key"]:
                    self._fs.call_s3("abort_multipart_upload", **where, UploadId=each["UploadId"])

    def _list_parts(self, upload: dict[str, str]) -> dict[int, tuple[str, int]]:
        found: dict[int, tuple[str, int]] = {}
        more: dict[str, Any] = {}
        while True:
            page = self._fs.call_s3("list_parts", **upload, **more)
            for part in page.get("Parts", ()):
                found[part["PartNumber"]] = part["ETag"], part["Size"]
            if not page.get("IsTruncated"):
                return found
            more = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def _known(self, part: Part, there: dict[int, tuple[str, int]], memory: RetryNotes, source: LocalFile) -> str:
        """The tag of a part that has arrived, else an empty text."""
        tag, size = there.get(part.number, ("", -1))
        ours = part.md5.hex(), memory.get(source.name, f"part {part.number}")
        return tag if size == len(part.data) and tag.strip('"') in ours else ""

    def _send(
        self, part: Part, upload: dict[str, str], memory: RetryNotes, source: LocalFile, progress: Progress
    ) -> str:
        self._throttle.take(len(part.data), lambda: progress(0))
        answer = self._fs.call_s3("upload_part", **upload, PartNumber=part.number, Body=part.data)
        tag: str = answer["ETag"]
        if tag.strip('"') != part.md5.hex():  # encrypted with a key of the store: only our note shows that it is ours
            memory.note(source.name, f"part {part.number}", tag.strip('"'))
        return tag


class FileSink(Sink):
    """A local or mounted folder."""

    def put(self, source: LocalFile, target: str, memory: RetryNotes, progress: Progress) -> str:
        """See Sink.put."""
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        part_path = path.with_name(path.name + _PART_SUFFIX)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(part_path, flags, 0o600), "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size > source.size:
                file.truncate(0)
            for part in source.parts():
                begin = file.tell()
                if not _same(file.read(len(part.data)), part):
                    file.seek(begin)
                    self._throttle.take(len(part.data), lambda: progress(0))
                    rest = memoryview(part.data)
                    while rest:
                        rest = rest[file.write(rest) :]
                progress(len(part.data))
            os.fsync(file.fileno())
        try:
            source.stored()
        except LocalDamage:
            part_path.unlink()
            raise
        part_path.replace(path)
        fsync_directory(path.parent)
        return ""

    def put_bytes(self, data: bytes, target: str) -> None:
        """See Sink.put_bytes."""
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        part_path = path.with_name(path.name + _PART_SUFFIX)
        with part_path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part_path.replace(path)
        fsync_directory(path.parent)


def sink_for(scheme: str, fs: Any, throttle: Share) -> Sink:
    """The best way into a store of this scheme."""
    return {"s3": S3Sink, "file": FileSink}.get(scheme, Sink)(fs, throttle)


def _same(found: bytes, part: Part) -> bool:
    return len(found) == len(part.data) and hashlib.md5(found, usedforsecurity=False).digest() == part.md5


def _callback(progress: Progress) -> Any:
    import fsspec

    class Alive(fsspec.callbacks.Callback):  # type: ignore[misc]  # fsspec has no types
        """Reports progress without a size; the bytes are counted at the end."""

        def relative_update(self, inc: int = 1) -> None:
            progress(0)

        def absolute_update(self, value: int) -> None:
            progress(0)

    return Alive()


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
            raise RemoteDamage(f"{self.path(name)} differs from what was uploaded, from byte {begin} on")
        return data

    def verify(self, name: str, stored: Stored, etag: str = "", alive: Callable[[int], None] = lambda _: None) -> None:
        """Verifies size and checksum: by the store's own tag if that is `etag`, otherwise by reading everything. Raises
        like `block`.
        """
        try:
            info = self._fs.info(self.path(name))
        except FileNotFoundError as exc:
            raise RemoteDamage(f"{self.path(name)} does not exist") from exc
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
            raise RemoteDamage(f"{path} does not exist") from exc


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
            raise LocalDamage(name, "is missing" if name not in done else "differs from what was written")
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
