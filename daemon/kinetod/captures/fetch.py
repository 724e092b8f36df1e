"""The bytes of a stored file, in chunks, from an offset on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.formats import STORED_NAMES

from kinetod.errors import DataLoss, NotFound, OutOfRange, Precondition, Reason, invalid
from kinetod.store import Store, key_of

CHUNK_BYTES = 1 << 20


async def fetch(store: Store, capture: pb.Capture, request: pb.FetchTraceRequest) -> AsyncIterator[pb.TraceChunk]:
    """The chunks; at least one, with the file's size and digest. Raises KinetodError."""
    target = _target(capture, request.pid)
    file = _file(capture, target, request.format)
    if request.offset < 0:
        raise invalid("offset", f"must not be negative, got {request.offset}")
    if request.offset > file.size_bytes:
        raise OutOfRange(
            Reason.OFFSET_BEYOND_END,
            f"the offset {request.offset} is beyond the {file.size_bytes} bytes of {file.name}; start again at 0",
            size_bytes=file.size_bytes,
        )
    path = store.target_dir(capture.id, key_of(target)) / STORED_NAMES[file.format]
    stream = await asyncio.to_thread(_open, path, file)
    try:
        offset = request.offset
        data = await asyncio.to_thread(_read, stream, offset, file)
        yield pb.TraceChunk(offset=offset, data=data, file=file)
        while data and offset + len(data) < file.size_bytes:
            offset += len(data)
            data = await asyncio.to_thread(_read, stream, offset, file)
            yield pb.TraceChunk(offset=offset, data=data)
    finally:
        stream.close()


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
            f"the trace of process {target.pid} is not stored yet; watch capture {capture.id} until it has ended",
            capture_id=capture.id,
        )
    for file in target.files:
        if not format_ or file.format == format_:
            return file
    stored = ", ".join(file.format for file in target.files) or f"nothing: {target.reason}"
    raise NotFound(
        Reason.NO_SUCH_FILE,
        f"capture {capture.id} has no {format_ or 'trace'} file for process {target.pid}; stored is {stored}",
        pid=target.pid,
    )


def _damaged(path: Path, problem: str) -> DataLoss:
    return DataLoss(Reason.FILE_DAMAGED, f"{path} {problem}; it was changed or removed behind the daemon's back")


def _open(path: Path, file: pb.TraceFile) -> BinaryIO:
    try:
        stream = path.open("rb", buffering=0)
    except OSError as exc:
        raise _damaged(path, f"cannot be read ({exc.strerror})") from exc
    size = path.stat().st_size
    if size != file.size_bytes:
        stream.close()
        raise _damaged(path, f"has {size} bytes instead of {file.size_bytes}")
    return stream


def _read(stream: BinaryIO, offset: int, file: pb.TraceFile) -> bytes:
    try:
        stream.seek(offset)
        data = stream.read(min(CHUNK_BYTES, file.size_bytes - offset))
    except OSError as exc:
        raise _damaged(Path(file.name), f"cannot be read at {offset} ({exc.strerror})") from exc
    if not data and offset < file.size_bytes:
        raise _damaged(Path(file.name), f"ends at {offset} instead of {file.size_bytes}")
    return data
