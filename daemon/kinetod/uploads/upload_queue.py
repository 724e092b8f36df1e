"""The queue of uploads: ended captures that are not uploaded yet, in turns by user, oldest first.

Theory of operation
    The store shows what to upload (ended, files present, not uploaded), so the queue needs no file of its own: a new
    daemon rebuilds it, and upload.json in each capture's folder records its progress. A failed upload is retried after
    a pause that doubles up to `upload.retry_pause`, with jitter, without limit: nothing is given up, and retention
    removes nothing that is not uploaded. Users take turns, and a user without an upload in progress does not wait for
    another one who occupies all of `upload.parallel`, however large and slow those uploads are. A local file that turns
    out to be damaged is marked in the index and left out; the rest goes on.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration, format_size
from kineto_trace.store.output_formats import STORED_NAMES

from kinetod.base import metrics
from kinetod.base.errors import KinetodError
from kinetod.base.object_store_urls import capture_url
from kinetod.config.settings import Config, Settings
from kinetod.store.capture_store import Store, key_of
from kinetod.uploads.upload_job import file_names
from kinetod.uploads.worker_client import UploadWorker
from kinetod.uploads.worker_protocol import STATE_FILE, LocalDamage, UploadError

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
_SPARE = 1  # beyond upload.parallel, for a user without an upload in progress
_MOST_DOUBLINGS = 30


@dataclass(slots=True)
class _Item:
    owner_uid: int | None = None
    due: float = 0.0  # by the loop's clock
    failures: int = 0
    url: str = ""
    bytes_done: int = 0
    total_bytes: int = 0
    task: "asyncio.Task[None] | None" = None


class Uploader:
    """Uploads every ended capture while `upload.url` is set."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        worker: UploadWorker,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._store = store
        self._worker = worker
        self.on_uploaded: Callable[[], None] = lambda: None  # called after each; retention can then remove files
        self._jitter = jitter
        self._items: dict[str, _Item] = {}
        self._damaged: dict[str, dict[str, str]] = {}  # damaged files that the record lacks, by capture
        self._turn = 0
        self._turns: dict[int | None, int] = {}  # when each user's last upload began
        self._wake = asyncio.Event()
        self._rescan = True
        settings.subscribe(self._reconfigured)

    @property
    def enabled(self) -> bool:
        """Whether captures are uploaded at all."""
        return bool(self._settings.current.upload_url)

    def add(self, capture_id: str, owner_uid: int | None) -> None:
        """Queues a capture that has ended."""
        if self.enabled:
            self._items.setdefault(capture_id, _Item(owner_uid=owner_uid))
            self._changed()

    def _reconfigured(self, _config: Config) -> None:
        self._rescan = True
        self._wake.set()

    def _changed(self) -> None:
        metrics.UPLOADS_WAITING.set(len(self._items))
        self._wake.set()

    async def run(self) -> None:
        """Uploads captures until it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self._rescan:
                    self._rescan = False
                    await self._scan()
                pause = self._start_due(loop.time())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), pause)
                self._wake.clear()
        finally:
            tasks = {each: item.task for each, item in self._items.items() if item.task is not None}
            for capture_id, task in tasks.items():
                task.cancel()
                log.warning(
                    "the upload of capture %s was interrupted because the daemon is stopping; the next one resumes it",
                    capture_id,
                )
            if waiting := len(self._items) - len(tasks):
                log.info("captures left for the next daemon to upload: %d", waiting)
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _scan(self) -> None:
        if not self.enabled:
            for capture_id in [each for each, item in self._items.items() if item.task is None]:
                del self._items[capture_id]
        else:
            for holding in await self._store.run(self._store.holdings):
                if holding.ended_ns and holding.local_bytes != 0 and not holding.uploaded:
                    self._items.setdefault(holding.id, _Item(owner_uid=holding.owner_uid))
        metrics.UPLOADS_WAITING.set(len(self._items))

    def _start_due(self, now: float) -> float | None:
        """Starts what may start; returns the seconds until more may, None: at the next event."""
        most = self._settings.current.upload_parallel
        running = Counter(item.owner_uid for item in self._items.values() if item.task is not None)
        if running and self._worker.outdated():
            return None  # the changed settings need another worker: let this one finish
        waiting = {each: item for each, item in self._items.items() if item.task is None} if self.enabled else {}
        while running.total() < most + _SPARE:
            due = [
                (self._turns.get(item.owner_uid, 0), item.due, each)
                for each, item in waiting.items()
                if item.due <= now and (running.total() < most or not running[item.owner_uid])
            ]
            if not due:
                break
            capture_id = min(due)[2]
            item = waiting.pop(capture_id)
            self._turn += 1
            self._turns[item.owner_uid] = self._turn
            item.task = asyncio.create_task(self._try(capture_id, item), name=f"upload {capture_id}")
            running[item.owner_uid] += 1
        return min((item.due - now for item in waiting.values() if item.due > now), default=None)

    async def _try(self, capture_id: str, item: _Item) -> None:
        try:
            if await self._upload(capture_id, item):
                self._items.pop(capture_id, None)
                self._damaged.pop(capture_id, None)
        except LocalDamage as exc:
            await self._mark(capture_id, exc)
        except (UploadError, KinetodError, OSError) as exc:
            await self._failed(capture_id, item, str(exc))
        except Exception:
            log.exception("uploading capture %s failed", capture_id)
            await self._failed(capture_id, item, "an internal error of the daemon; its log has the details")
        finally:
            item.task = None
            self._changed()

    async def _upload(self, capture_id: str, item: _Item) -> bool:
        """Uploads one capture; returns whether nothing is left to do. Raises UploadError, KinetodError."""
        began = time.monotonic()
        config = self._settings.current
        capture = await self._store.run(self._store.get, capture_id)
        folder = self._store.capture_dir(capture_id)
        if capture is None or not await asyncio.to_thread(file_names, folder):
            return True
        url = capture_url(config.upload_url, capture.host, capture_id)
        item.url, item.total_bytes, item.bytes_done = url, capture.local_bytes, 0
        capture.ClearField("upload")
        capture.ClearField("local_bytes")
        job = {
            "do": "upload",
            "user": str(item.owner_uid),
            "folder": str(folder),
            "url": url,
            "capture": json_format.MessageToDict(capture, preserving_proto_field_name=True),
            "known": _known(capture),
            "damaged": {**_damaged(capture), **self._damaged.get(capture_id, {})},
        }

        def progress(done: int) -> None:
            item.bytes_done = done

        answer, _ = await self._worker.ask(job, progress)
        upload = pb.Upload(
            state=pb.UPLOAD_STATE_UPLOADED,
            url=url,
            bytes=answer["size"],
            total_bytes=answer["size"],
            uploaded_ns=time.time_ns(),
            manifest_sha256=answer["manifest_sha256"],
        )
        await self._store.run(self._store.set_upload, capture_id, upload)
        metrics.uploaded(upload.bytes, time.monotonic() - began)
        log.info("capture %s was uploaded to %s and verified (%s)", capture_id, url, format_size(upload.bytes))
        await self._after(capture_id)
        return True

    async def _after(self, capture_id: str) -> None:
        with contextlib.suppress(OSError):
            await asyncio.to_thread((self._store.capture_dir(capture_id) / STATE_FILE).unlink, missing_ok=True)
        self.on_uploaded()

    async def _mark(self, capture_id: str, exc: LocalDamage) -> None:
        """Excludes a damaged file from the next try, which follows at once."""
        log.error("capture %s has a damaged file: %s; its other files are uploaded", capture_id, exc)
        metrics.upload_failed("local-damage")
        self._damaged.setdefault(capture_id, {})[exc.path] = exc.problem
        capture = await self._store.run(self._store.get, capture_id)
        for target in capture.targets if capture is not None else ():
            for file in target.files:
                if exc.path == stored_path(target, file.format):
                    note = self._store.note_check
                    with contextlib.suppress(KinetodError):
                        await self._store.run(
                            note, capture_id, key_of(target), file.format, damage=exc.problem, now_ns=time.time_ns()
                        )

    async def _failed(self, capture_id: str, item: _Item, problem: str) -> None:
        item.failures += 1
        metrics.upload_failed("store")
        pause_s = self._pause_s(item.failures)
        item.due = asyncio.get_running_loop().time() + pause_s
        log.warning(
            "uploading capture %s failed, attempt %d: %s; retrying in %s",
            capture_id, item.failures, problem, format_duration(int(pause_s * 1e9)),
        )  # fmt: skip
        upload = pb.Upload(
            state=pb.UPLOAD_STATE_RETRYING,
            url=item.url,
            failures=item.failures,
            error=problem,
            next_try_ns=time.time_ns() + int(pause_s * 1e9),
        )
        with contextlib.suppress(KinetodError):
            await self._store.run(self._store.set_upload, capture_id, upload)

    def _pause_s(self, failures: int) -> float:
        most = self._settings.current.upload_retry_pause_ns / 1e9
        longest = min(most, FIRST_PAUSE_S * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
        return longest * (0.5 + self._jitter() / 2)

    def annotate(self, capture: pb.Capture) -> None:
        """Adds the queue's facts to the public state of an ended capture."""
        item = self._items.get(capture.id)
        if item is None or capture.upload.state == pb.UPLOAD_STATE_UPLOADED:
            if item is None and capture.upload.state == pb.UPLOAD_STATE_RETRYING and not self.enabled:
                capture.upload.next_try_ns = 0  # none until uploads are switched on again
            return
        upload = capture.upload
        upload.url = item.url or capture_url(self._settings.current.upload_url, capture.host, capture.id)
        if item.task is not None:
            upload.state = pb.UPLOAD_STATE_RUNNING
            upload.bytes, upload.total_bytes = item.bytes_done, max(item.total_bytes, item.bytes_done)
        elif not item.failures:
            upload.state = pb.UPLOAD_STATE_WAITING

    def is_pending(self, capture_id: str) -> bool:
        """Whether it still has to be uploaded."""
        return capture_id in self._items

    async def withdraw(self, capture_id: str) -> None:
        """Removes a capture from the queue; returns when no upload of it is in progress."""
        item = self._items.pop(capture_id, None)
        if item is not None and item.task is not None:
            item.task.cancel()
            await asyncio.gather(item.task, return_exceptions=True)
        self._changed()


def stored_path(target: pb.Target, format_: str) -> str:
    """The path of a file below the folder of its capture's targets, and in the uploaded capture."""
    return f"{key_of(target)}/{STORED_NAMES[format_]}"


def _known(capture: pb.Capture) -> dict[str, Any]:
    return {
        stored_path(target, file.format): (file.size_bytes, file.sha256)
        for target in capture.targets
        for file in target.files
    }


def _damaged(capture: pb.Capture) -> dict[str, str]:
    return {
        stored_path(target, file.format): file.damage
        for target in capture.targets
        for file in target.files
        if file.damage
    }
