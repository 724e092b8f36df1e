"""Downloads a stored trace file: resumable, verified, never overwriting another file.

Theory of operation
    The bytes are written to NAME.part, which is locked meanwhile. What an earlier, interrupted download left
    there is kept: it is hashed, and the daemon continues from its size. Once size and SHA-256 match what was
    announced, the file is fsynced and linked to its name, which fails if another file has taken that name. An
    existing file with the right content counts as downloaded.

    The names come from the capture, but unsafe characters are replaced first: no answer of a daemon can make
    this client write outside the folder.
"""

import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.output_formats import STORED_SUFFIXES

from kinetoctl.client.daemon_client import Client
from kinetoctl.client.retry import RETRYABLE, Patience
from kinetoctl.errors import DownloadFailed, FileConflict, VerificationFailed

READ_BYTES = 1 << 20
OnBytes = Callable[[int], None]


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".") or "_"


def file_name(capture: pb.Capture, target: pb.Target, file: pb.TraceFile) -> str:
    """kineto-HOST-PID-CAPTURE plus the suffix of the format."""
    suffix = STORED_SUFFIXES.get(file.format, f".{_safe(file.format)}")
    return f"kineto-{_safe(capture.host)}-{target.pid}-{_safe(capture.id)}{suffix}"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _is_already_there(path: Path, file: pb.TraceFile) -> bool:
    if not path.exists():
        return False
    if path.stat().st_size == file.size_bytes and _sha256(path) == file.sha256:
        return True
    raise FileConflict(f"{path} exists and is not this trace")


def _open_part(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # the name is predictable: follow no link


def _check_regular(part: Path, stream: BinaryIO) -> None:
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        raise FileConflict(f"{part} exists and is not a regular file")


@contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    with open(part, "a+b", buffering=0, opener=_open_part) as stream:
        _check_regular(part, stream)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise FileConflict(f"another kinetoctl is writing {part}") from exc
        yield stream


def _hash_of_part(stream: BinaryIO, file: pb.TraceFile) -> "hashlib._Hash":
    digest = hashlib.sha256()
    if os.fstat(stream.fileno()).st_size > file.size_bytes:
        stream.truncate(0)
    stream.seek(0)
    while block := stream.read(READ_BYTES):
        digest.update(block)
    return digest


class _Fetch:
    """Receives one file of one target into the locked part file."""

    def __init__(
        self, client: Client, capture_id: str, pid: int, file: pb.TraceFile, stream: BinaryIO, on_bytes: OnBytes
    ) -> None:
        self._client = client
        self._capture_id = capture_id
        self._pid = pid
        self._file = file
        self._stream = stream
        self._on_bytes = on_bytes

    def _append(self, chunk: pb.TraceChunk, offset: int) -> None:
        if chunk.HasField("file") and (chunk.file.sha256, chunk.file.size_bytes) != (
            self._file.sha256,
            self._file.size_bytes,
        ):
            raise VerificationFailed(
                f"the daemon sends a different {self._file.format} file than the capture announces"
            )
        if chunk.offset != offset or offset + len(chunk.data) > self._file.size_bytes:
            raise VerificationFailed(
                f"the daemon sent {len(chunk.data)} bytes at offset {chunk.offset}; "
                f"expected offset {offset} of {self._file.size_bytes}"
            )
        rest = memoryview(chunk.data)
        while rest:
            rest = rest[self._stream.write(rest) :]  # unbuffered: it may take less

    def all(self) -> None:
        """Everything that is missing, over as many streams as it takes."""
        digest = _hash_of_part(self._stream, self._file)
        offset = os.fstat(self._stream.fileno()).st_size
        patience = Patience(self._client.timeout_s)
        while offset < self._file.size_bytes:
            try:
                for chunk in self._client.fetch(
                    self._capture_id, pid=self._pid, file_format=self._file.format, offset=offset
                ):
                    self._append(chunk, offset)
                    digest.update(chunk.data)
                    offset += len(chunk.data)
                    self._on_bytes(offset)
                    patience.progressed()
                self._check_complete(offset)
            except RETRYABLE as exc:
                patience.wait(exc)
        if digest.hexdigest() != self._file.sha256:
            raise VerificationFailed(
                f"the SHA-256 of the received {self._file.format} file is {digest.hexdigest()}, "
                f"the daemon announced {self._file.sha256}"
            )

    def _check_complete(self, offset: int) -> None:
        if offset < self._file.size_bytes:
            raise VerificationFailed(f"the daemon sent {offset} bytes of {self._file.size_bytes} and ended the stream")


def _publish(part: Path, path: Path) -> None:
    try:
        path.hardlink_to(part)
    except FileExistsError as exc:
        raise FileConflict(f"another program has created {path} meanwhile; the trace is in {part}") from exc
    except OSError:  # a file system without hard links
        part.rename(path)
    else:
        part.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _receive(fetch: _Fetch, stream: BinaryIO) -> None:
    resumed = os.fstat(stream.fileno()).st_size > 0
    try:
        fetch.all()
    except VerificationFailed:
        stream.truncate(0)
        if not resumed:
            raise
        fetch.all()  # perhaps the part of an earlier download was wrong
    os.fsync(stream.fileno())


def download(
    client: Client,
    capture: pb.Capture,
    target: pb.Target,
    file: pb.TraceFile,
    directory: Path,
    *,
    name: str = "",
    on_bytes: OnBytes = lambda _received: None,
) -> Path:
    """Write one trace file into the directory and verify it. Returns its path.

    name: name of the file, by default that of `file_name`. on_bytes: called with the number of bytes received so far.
    Raises DownloadFailed or a subclass for failures on this machine, and the client's errors for those of the daemon.
    """
    path = directory / (name or file_name(capture, target, file))
    part = path.with_name(path.name + ".part")
    try:
        if _is_already_there(path, file):
            return path
        with _locked(part) as stream:
            _receive(_Fetch(client, capture.id, target.pid, file, stream, on_bytes), stream)
            _publish(part, path)
    except OSError as exc:
        raise DownloadFailed(f"{part}: {exc.strerror or exc}") from exc
    return path
