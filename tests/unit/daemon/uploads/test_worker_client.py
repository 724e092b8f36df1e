"""Whose reads of uploaded captures the worker does when."""

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.fair_slots import fair_share_key
from kinetod.uploads.upload_worker import MAX_JOBS
from kinetod.uploads.worker_client import LONG_JOBS, READS, OnProgress, RemoteReader, UploadWorker
from kinetod.uploads.worker_protocol import WorkerOptions
from support.waiting import soon

UPLOAD = pb.Upload(url="s3://b/h/c1")


class Slow(UploadWorker):
    """Ends no job."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), WorkerOptions)
        self.jobs: list[str] = []

    async def ask(self, job: Mapping[str, Any], _: OnProgress = lambda _: None) -> tuple[dict[str, Any], bytes]:
        self.jobs.append(f"{fair_share_key.get()} {job['do']}")
        await asyncio.Event().wait()
        return {}, b""


async def by(user: str, work: Coroutine[Any, Any, Any]) -> None:
    fair_share_key.set(user)
    await work


async def first_block(reader: RemoteReader) -> None:
    async for _ in reader.blocks(UPLOAD, "trace", 1, 0):
        break


def test_who_has_whole_captures_compared_leaves_threads_to_uploads_and_other_users() -> None:
    async def main() -> list[str]:
        worker = Slow()
        reader = RemoteReader(worker)
        tasks = [asyncio.create_task(by("ada", reader.verify(UPLOAD))) for _ in range(64)]
        tasks += [asyncio.create_task(by("ada", first_block(reader))) for _ in range(64)]
        await soon(lambda: len(worker.jobs) == LONG_JOBS + READS, "ada has all that she may have")
        tasks += [asyncio.create_task(by("bob", work)) for work in (reader.verify(UPLOAD), first_block(reader))]
        await soon(lambda: len(worker.jobs) == LONG_JOBS + READS + 2, "bob has one of each")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return worker.jobs

    jobs = asyncio.run(main())
    assert (jobs.count("ada verify"), jobs.count("ada read")) == (LONG_JOBS, READS)
    assert (jobs.count("bob verify"), jobs.count("bob read")) == (1, 1)
    assert 2 * LONG_JOBS + READS + READS // 2 + 33 <= MAX_JOBS  # upload.parallel is 32 at most, and one more
