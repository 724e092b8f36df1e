"""Measures, uploads, pins, removes and verifies captures that have ended.

Everything that changes the files of an ended capture goes through here, so that retention, uploads and callers do not
work on the same capture at once.
"""

import logging
from collections.abc import AsyncIterator

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.base.errors import KinetodError, Precondition, Reason
from kinetod.captures.result.fetch import check_local, is_here, note_check
from kinetod.store.capture_store import Store
from kinetod.store.retention import Retention
from kinetod.uploads.upload_queue import Uploader, stored_path
from kinetod.uploads.worker_client import RemoteReader

log = logging.getLogger(__name__)


class Keeping:
    """Keeps, pins, verifies and deletes ended captures."""

    def __init__(self, store: Store, retention: Retention, uploader: Uploader, remote: RemoteReader) -> None:
        self._store = store
        self.retention = retention
        self._uploader = uploader
        self.remote = remote

    def ended(self, capture: pb.Capture) -> None:
        """Called when a capture has been stored completely."""
        if capture.local_bytes:
            self._uploader.add(capture.id, capture.owner_uid if capture.HasField("owner_uid") else None)
        self.retention.wake()

    def annotate(self, capture: pb.Capture) -> pb.Capture:
        """Adds the upload state that only the upload queue knows."""
        self._uploader.annotate(capture)
        return capture

    async def pin(self, capture: pb.Capture, pinned: bool) -> None:
        """Pins the capture against retention, or unpins it. Raises KinetodError."""
        await self._store.run(self._store.set_pinned, capture.id, pinned)
        log.info("capture %s is %s", capture.id, "pinned" if pinned else "unpinned")
        if not pinned:
            self.retention.wake()

    async def delete(self, capture: pb.Capture, *, keep_uploaded: bool) -> None:
        """Deletes a capture. Raises Precondition if it is pinned or its uploaded copy cannot be removed."""
        if capture.pinned:
            raise Precondition(
                Reason.CAPTURE_PINNED,
                f"capture {capture.id} is pinned; run `kinetoctl captures unpin {capture.id}` first",
                capture_id=capture.id,
            )
        await self._uploader.withdraw(capture.id)
        try:
            if capture.upload.url and not keep_uploaded:  # including remains of an unfinished upload
                await self.remote.remove(capture.upload)
            await self._store.run(self._store.set_upload, capture.id, None)
        except KinetodError:
            if is_here(capture) and capture.upload.state != pb.UPLOAD_STATE_UPLOADED:
                self._uploader.add(capture.id, capture.owner_uid if capture.HasField("owner_uid") else None)
            raise
        await self._store.remove(capture.id)
        log.info("capture %s was deleted%s", capture.id, "; its uploaded copy was kept" if keep_uploaded else "")

    async def verify(self, capture: pb.Capture, *, uploaded: bool) -> AsyncIterator[pb.FileCheck]:
        """Rereads and checks every file. Raises KinetodError."""
        if capture.ended_ns == 0:
            raise Precondition(
                Reason.CAPTURE_RUNNING, f"capture {capture.id} is running; verify it once it has ended",
                capture_id=capture.id,
            )  # fmt: skip
        here = is_here(capture)
        for target in capture.targets if here else ():
            for file in target.files:
                path = self._store.capture_dir(capture.id) / "targets" / stored_path(target, file.format)
                problem = await check_local(self._store, path, file)
                await note_check(self._store, capture, target, file, problem)
                if problem:
                    log.error("capture %s: %s: %s", capture.id, path, problem)
                yield _check(target.pid, file, problem)
        if capture.upload.state == pb.UPLOAD_STATE_UPLOADED and (uploaded or not here):
            async for check in self._verify_uploaded(capture):
                yield check

    async def _verify_uploaded(self, capture: pb.Capture) -> AsyncIterator[pb.FileCheck]:
        files = {
            stored_path(target, file.format): (target, file) for target in capture.targets for file in target.files
        }
        for name, size, problem in await self.remote.verify(capture.upload):
            target, file = files.pop(name, (None, None))
            check = pb.FileCheck(name=name, size_bytes=size, problem=problem, uploaded=True)
            if target is not None and file is not None:
                check = _check(target.pid, file, problem, uploaded=True)
                if not is_here(capture):
                    await note_check(self._store, capture, target, file, problem)
            yield check
        for target, file in files.values():  # it was damaged before it could be uploaded
            yield _check(target.pid, file, file.damage or "is not among the uploaded files", uploaded=True)


def _check(pid: int, file: pb.TraceFile, problem: str, *, uploaded: bool = False) -> pb.FileCheck:
    return pb.FileCheck(
        pid=pid,
        format=file.format,
        name=file.name,
        size_bytes=file.size_bytes,
        problem=problem,
        uploaded=uploaded,
    )
