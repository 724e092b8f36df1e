"""Whose captures are uploaded when: one user's do not hold up another's."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinetod.config.settings import Config, Settings
from kinetod.store.capture_store import Store
from kinetod.uploads.upload_queue import Uploader
from kinetod.uploads.worker_client import OnProgress, UploadWorker
from kinetod.uploads.worker_protocol import UploadError, WorkerOptions
from support.service.kept import put_capture
from support.waiting import soon

ADA, BOB = 1001, 1002


class Slow(UploadWorker):
    """Takes its time with every job, or fails at once."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), WorkerOptions)
        self.jobs: list[tuple[str, str]] = []
        self.go: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # by user
        self.fails = False

    async def ask(self, job: Mapping[str, Any], _: OnProgress = lambda _: None) -> tuple[dict[str, Any], bytes]:
        self.jobs.append((job["user"], job["url"].rpartition("/")[2]))
        if self.fails:
            raise UploadError("no")
        await self.go[job["user"]].wait()
        return {"size": 5, "manifest_sha256": "0" * 64}, b""


def run(path: Path, act: Callable[[Uploader, Slow, Store], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        store = Store(path / "state")
        config = Config(listen=(), agent_socket=Path("/s"), state_dir=store.state_dir)
        settings = Settings(replace(config, upload_url="s3://b", upload_parallel=2))
        worker = Slow()
        uploader = Uploader(settings, store, worker, jitter=lambda: 0)
        task = asyncio.create_task(uploader.run())
        try:
            await act(uploader, worker, store)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            store.close()

    asyncio.run(main())


async def begun(worker: Slow, count: int) -> None:
    await soon(lambda: len(worker.jobs) >= count, "the jobs have begun")


def put(uploader: Uploader, store: Store, number: int, uid: int) -> None:
    uploader.add(put_capture(store, number, uid=uid).id, uid)


def test_a_user_s_slow_uploads_keep_no_other_user_waiting(tmp_path: Path) -> None:
    async def act(uploader: Uploader, worker: Slow, store: Store) -> None:
        for number in range(5):
            put(uploader, store, number, ADA)
        await begun(worker, 2)
        put(uploader, store, 10, BOB)
        await begun(worker, 3)
        put(uploader, store, 11, BOB)
        for _ in range(100):  # turns of the loop, in which it would begin
            await asyncio.sleep(0)
        assert worker.jobs[2:] == [(str(BOB), "c10")]  # one more, and no fourth
        worker.go[str(BOB)].set()
        await begun(worker, 4)
        assert worker.jobs[3] == (str(BOB), "c11")
        worker.go[str(ADA)].set()
        await begun(worker, 7)

    run(tmp_path, act)


def test_a_retry_of_the_spare_turn_comes_when_it_is_due(tmp_path: Path) -> None:
    async def act(uploader: Uploader, worker: Slow, store: Store) -> None:
        for number in range(5):
            put(uploader, store, number, ADA)
        await begun(worker, 2)
        worker.fails = True
        put(uploader, store, 10, BOB)
        await begun(worker, 4)  # its second try, although both of ada's turns are taken all the time
        assert worker.jobs[2:4] == [(str(BOB), "c10")] * 2

    run(tmp_path, act)
