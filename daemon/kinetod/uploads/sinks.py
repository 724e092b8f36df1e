"""Reads a local file once, and writes it into a store of any kind, so that an object is either complete or absent.

    s3      parts of a multipart upload; a retry asks which have arrived and continues there file    a .part file that a
    retry continues, then a rename others  in one piece by the library, whose objects appear when they are complete; a
    retry begins anew

`put` returns the entity tag to compare, or an empty text if the store is to be read back instead.
"""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from kineto_trace.base.atomic_files import fsync_directory

from kinetod.store.path_guard import open_regular
from kinetod.uploads.worker_protocol import BLOCK_BYTES, MAX_PARTS, PART_BYTES, LocalDamage, Progress, Stored

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
