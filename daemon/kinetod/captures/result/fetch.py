"""Serves the bytes of a stored file in chunks, from an offset on, and never corrupt ones.

Theory of operation
    A file on this host is hashed while it is sent, from its beginning even if the caller wants only the rest, and the
    last chunk is held back until the checksum is confirmed: a caller that reaches the end of the stream without an
    error has the file. A damaged file is marked in the capture's record; if an uploaded copy exists, that is sent
    instead. In an uploaded file, each block has its own checksum, which the upload worker compares.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.output_formats import STORED_NAMES

from kinetod.base.errors import DataLoss, KinetodError, NotFound, OutOfRange, Precondition, Reason, invalid
from kinetod.store.capture_store import Store, key_of
from kinetod.store.path_guard import open_regular
from kinetod.uploads.upload_queue import stored_path
from kinetod.uploads.worker_client import RemoteReader

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
CHECKED_BYTES = 8 << 20  # per turn
VERIFIED_AGAIN_NS = 3600 * 10**9  # a correct checksum is noted at most this often


async def fetch(
    store: Store, remote: RemoteReader, capture: pb.Capture, request: pb.FetchTraceRequest
) -> AsyncIterator[pb.TraceChunk]:
    """Yields the file's chunks: at least one, which has its size and digest. Raises KinetodError."""
    target = _target(capture, request.pid)
    file = _file(capture, target, request.format)
    if request.offset < 0:
        raise invalid("offset", f"must not be negative, got {request.offset}")
    if request.offset > file.size_bytes:
        raise OutOfRange(
            Reason.OFFSET_BEYOND_END,
            f"offset {request.offset} is beyond the end of {file.name} ({file.size_bytes} bytes); start again at 0",
            size_bytes=file.size_bytes,
        )
    uploaded = capture.upload.state == pb.UPLOAD_STATE_UPLOADED
    stream: BinaryIO | None = None
    if is_here(capture) and not (uploaded and file.damage):
        path = store.target_dir(capture.id, key_of(target)) / STORED_NAMES[file.format]
        try:
            stream = await store.reading.in_thread(_open, path, file)
        except DataLoss as exc:
            await note_check(store, capture, target, file, exc.metadata["problem"])
            if not uploaded:
                raise
    if stream is not None:
        chunks = _local(store, capture, target, file, stream, request.offset)
    elif uploaded:
        chunks = _uploaded(remote, capture, target, file, request.offset)
    else:
        raise _damaged(file.name, "is not in the store")
    first = True
    async for chunk in chunks:
        if first:
            chunk.file.CopyFrom(file)
            first = False
        yield chunk


def is_here(capture: pb.Capture) -> bool:
    """Whether the capture's files are on this host."""
    return not capture.HasField("local_bytes") or capture.local_bytes > 0


async def check_local(store: Store, path: Path, file: pb.TraceFile) -> str:
    """The problem of a file ("" if none). Reads the whole file."""
    digest, done = hashlib.sha256(), 0
    try:
        stream = await store.reading.in_thread(_open, path, file)
        with contextlib.closing(stream):
            while done < file.size_bytes:
                size = min(CHECKED_BYTES, file.size_bytes - done)
                done += len(await store.reading.in_thread(_read_at, stream, done, size, digest, file))
    except DataLoss as exc:
        return exc.metadata["problem"]
    return "" if digest.hexdigest() == file.sha256 else _wrong_digest(digest.hexdigest(), file)


async def note_check(store: Store, capture: pb.Capture, target: pb.Target, file: pb.TraceFile, problem: str) -> None:
    """Records the result of a check in the capture's entry, if it has changed."""
    now_ns = time.time_ns()
    if problem == file.damage and (problem or now_ns - file.verified_ns < VERIFIED_AGAIN_NS):
        return
    try:
        await store.run(store.note_check, capture.id, key_of(target), file.format, damage=problem, now_ns=now_ns)
    except KinetodError as exc:
        log.error("cannot record the state of %s of capture %s: %s", file.format, capture.id, exc)


async def _local(
    store: Store, capture: pb.Capture, target: pb.Target, file: pb.TraceFile, stream: BinaryIO, offset: int
) -> AsyncIterator[pb.TraceChunk]:
    digest = hashlib.sha256()
    try:
        done = 0
        while done < offset:  # the part that the caller already has: only its checksum is needed
            size = min(CHUNK_BYTES, offset - done)
            done += len(await store.reading.in_thread(_read_at, stream, done, size, digest, file))
        while True:
            data = await store.reading.in_thread(_read, stream, offset, digest, file)
            if offset + len(data) == file.size_bytes and digest.hexdigest() != file.sha256:
                raise _damaged(file.name, _wrong_digest(digest.hexdigest(), file))
            yield pb.TraceChunk(offset=offset, data=data)
            offset += len(data)
            if offset >= file.size_bytes:
                break
    except DataLoss as exc:
        log.error("capture %s: %s", capture.id, exc.message)
        await note_check(store, capture, target, file, exc.metadata["problem"])
        raise
    finally:
        stream.close()
    await note_check(store, capture, target, file, "")


async def _uploaded(
    remote: RemoteReader, capture: pb.Capture, target: pb.Target, file: pb.TraceFile, offset: int
) -> AsyncIterator[pb.TraceChunk]:
    name = stored_path(target, file.format)
    async for block in remote.blocks(capture.upload, name, file.size_bytes, offset):
        for begin in range(0, max(1, len(block)), CHUNK_BYTES):
            data = block[begin : begin + CHUNK_BYTES]
            yield pb.TraceChunk(offset=offset, data=data)
            offset += len(data)


def _target(capture: pb.Capture, pid: int) -> pb.Target:
    if pid == 0 and len(capture.targets) == 1:
        return capture.targets[0]
    if pid == 0:
        pids = ", ".join(str(target.pid) for target in capture.targets[:10])
        raise invalid("pid", f"capture {capture.id} has {len(capture.targets)} targets; choose one: {pids}")
    for target in capture.targets:
        if target.pid == pid:
            return target
    raise NotFound(Reason.NO_SUCH_TARGET, f"capture {capture.id} has no target with pid {pid}", pid=pid)


def _file(capture: pb.Capture, target: pb.Target, format_: str) -> pb.TraceFile:
    if target.state != pb.TARGET_STATE_ENDED:
        raise Precondition(
            Reason.CAPTURE_RUNNING,
            f"the trace of process {target.pid} has not been stored yet; watch capture {capture.id} until it has ended",
            capture_id=capture.id,
        )
    for file in target.files:
        if not format_ or file.format == format_:
            return file
    stored = ", ".join(file.format for file in target.files) or f"nothing ({target.reason})"
    raise NotFound(
        Reason.NO_SUCH_FILE,
        f"capture {capture.id} has no {format_ or 'trace'} file for process {target.pid}; stored: {stored}",
        pid=target.pid,
    )


def _damaged(what: Path | str, problem: str) -> DataLoss:
    return DataLoss(
        Reason.FILE_DAMAGED,
        f"{what} {problem}; something other than the daemon changed or removed it, or the disk is faulty",
        problem=problem,
    )


def _wrong_digest(digest: str, file: pb.TraceFile) -> str:
    return f"has the SHA-256 {digest} instead of {file.sha256}"


def _open(path: Path, file: pb.TraceFile) -> BinaryIO:
    try:
        stream = open_regular(path)
    except OSError as exc:
        raise _damaged(path, f"cannot be read ({exc.strerror})") from exc
    size = os.fstat(stream.fileno()).st_size
    if size != file.size_bytes:
        stream.close()
        raise _damaged(path, f"has {size} bytes instead of {file.size_bytes}")
    return stream


def _read(stream: BinaryIO, offset: int, digest: "hashlib._Hash", file: pb.TraceFile) -> bytes:
    return _read_at(stream, offset, min(CHUNK_BYTES, file.size_bytes - offset), digest, file)


def _read_at(stream: BinaryIO, offset: int, size: int, digest: "hashlib._Hash", file: pb.TraceFile) -> bytes:
    try:
        data = stream.read(size)
    except OSError as exc:
        raise _damaged(file.name, f"cannot be read at {offset} ({exc.strerror})") from exc
    if not data and size:
        raise _damaged(file.name, f"ends at {offset} instead of {file.size_bytes}")
    digest.update(data)
    return data
