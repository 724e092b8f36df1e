"""Reads uploaded captures for callers: block by block, each verified by the worker.

The worker's threads also serve uploads. So reads get some of them at a time, and long jobs (comparing or removing a
whole capture) a few, in turns by user (`base.fair_slots`): no user waits for all of another user's requests.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.base.errors import DataLoss, KinetodError, Precondition, Reason
from kinetod.base.fair_slots import FairSlots
from kinetod.uploads.worker_client import UploadWorker
from kinetod.uploads.worker_protocol import BLOCK_BYTES, RemoteDamage, UploadError

READS = 14  # at a time, of worker.MAX_JOBS
LONG_JOBS = 4


class RemoteReader:
    """Reads from the object store named in a capture's record."""

    def __init__(self, worker: UploadWorker) -> None:
        self._worker = worker
        self._reads = FairSlots(READS, spare=READS // 2)
        self._long = FairSlots(LONG_JOBS, spare=LONG_JOBS)

    async def blocks(self, upload: pb.Upload, name: str, size: int, offset: int) -> AsyncIterator[bytes]:
        """The bytes from an offset on, at least one value; the next block is read ahead. Raises KinetodError."""
        number, last = offset // BLOCK_BYTES, max(0, (size - 1) // BLOCK_BYTES)
        if offset >= size:
            yield b""
            return
        ahead = asyncio.ensure_future(self._block(upload, name, number))
        try:
            while True:
                data = await ahead
                if number < last:
                    ahead = asyncio.ensure_future(self._block(upload, name, number + 1))
                begin = number * BLOCK_BYTES
                yield data[max(0, offset - begin) :]
                if number == last:
                    return
                number += 1
        finally:
            if not ahead.done():
                ahead.cancel()
                with contextlib.suppress(asyncio.CancelledError, KinetodError):
                    await ahead

    async def _block(self, upload: pb.Upload, name: str, number: int) -> bytes:
        job = {"do": "read", "url": upload.url, "manifest_sha256": upload.manifest_sha256}
        try:
            async with self._reads.turn():
                _, data = await self._worker.ask({**job, "name": name, "block": number})
        except UploadError as exc:
            raise _translated(exc, upload) from exc
        return data

    async def verify(self, upload: pb.Upload) -> list[tuple[str, int, str]]:
        """Each file's name, size and problem (empty: none). Raises KinetodError."""
        job = {"do": "verify", "url": upload.url, "manifest_sha256": upload.manifest_sha256}
        try:
            async with self._long.turn():
                answer, _ = await self._worker.ask(job)
        except UploadError as exc:
            raise _translated(exc, upload) from exc
        return [(str(name), int(size), str(problem)) for name, size, problem in answer["files"]]

    async def remove(self, upload: pb.Upload) -> None:
        """Deletes the uploaded copy. Raises KinetodError."""
        try:
            async with self._long.turn():
                await self._worker.ask({"do": "remove", "url": upload.url})
        except UploadError as exc:
            raise _translated(exc, upload) from exc


def _translated(exc: UploadError, upload: pb.Upload) -> KinetodError:
    if isinstance(exc, RemoteDamage):
        return DataLoss(Reason.FILE_DAMAGED, f"the uploaded copy {upload.url}: {exc}; it was changed or removed there")
    return Precondition(
        Reason.OBJECT_STORE_FAILED,
        f"the object store cannot be used for {upload.url}: {exc}; check its address, its credentials and the network, "
        "then try again",
    )
