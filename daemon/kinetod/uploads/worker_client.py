"""The daemon's client of the upload worker: starts it on demand, sends jobs, and ends it when it is idle or stuck.

`RemoteReader` reads uploaded captures for callers: block by block, each verified by the worker. The worker's threads
also serve uploads. So reads get some of them at a time, and long jobs (comparing or removing a whole capture) a few, in
turns by user (`base.fair_slots`): no user waits for all of another user's requests.
"""

import asyncio
import contextlib
import json
import logging
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.object_stores import scheme_of

from kinetod.base.errors import DataLoss, KinetodError, Precondition, Reason
from kinetod.base.fair_slots import FairSlots
from kinetod.base.object_store_urls import folder_of
from kinetod.base.safe_text import clean
from kinetod.config.settings import Config
from kinetod.supervise import child
from kinetod.uploads.worker_protocol import (
    BLOCK_BYTES,
    Cancelled,
    LocalDamage,
    RemoteDamage,
    UploadError,
    WorkerOptions,
    credential_variables,
)

READS = 14  # at a time, of worker.MAX_JOBS
LONG_JOBS = 4
log = logging.getLogger(__name__)
STUCK_S = 600.0  # without any progress of a job
IDLE_S = 60.0
_LINE_BYTES = 16 << 20
_MAX_DATA_BYTES = 16 << 20
OnProgress = Callable[[int], None]
Setup = tuple[WorkerOptions, Mapping[str, str]]  # and the variables added to the daemon's environment


class _Process(child.WarmChild):
    """One worker process and its jobs."""

    def __init__(self, process: Process, setup: Setup) -> None:
        super().__init__(process, log, "upload worker", logging.DEBUG)
        self.setup = setup
        self.jobs: dict[int, asyncio.Queue[tuple[dict[str, Any], bytes] | None]] = {}
        self._answers = asyncio.create_task(self._read())
        self.readers.append(self._answers)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                answer = json.loads(line)
                size = int(answer.pop("bytes", 0))
                if not 0 <= size <= _MAX_DATA_BYTES:
                    raise ValueError(f"it announces {size} bytes of data")
                data = await self.process.stdout.readexactly(size) if size else b""
                if (queue := self.jobs.get(answer["id"])) is not None:
                    queue.put_nowait((answer, data))
        except (OSError, ValueError, KeyError, TypeError, asyncio.IncompleteReadError) as exc:
            log.error("the upload worker's answer cannot be decoded: %r", exc)
            self.kill()
        for queue in self.jobs.values():
            queue.put_nowait(None)

    def send(self, job: Mapping[str, Any]) -> None:
        """Sends a job. Jobs are small; the pipe accepts them without blocking."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")

    @property
    def is_alive(self) -> bool:
        """Whether it can accept jobs."""
        return self.process.returncode is None and not self._answers.done()

    def kill(self) -> None:
        """Kills the process at once; its jobs fail."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class UploadWorker:
    """Client of the worker process. `environ`: variables added to the daemon's own; may block and raise OSError."""

    def __init__(
        self,
        lock_path: Path,
        options: Callable[[], WorkerOptions],
        environ: Callable[[], Mapping[str, str]] = dict,
        *,
        idle_s: float = IDLE_S,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._lock_path = lock_path
        self._options = options
        self._environ = environ
        self._idle_s = idle_s
        self._stuck_s = stuck_s
        self._starting = asyncio.Lock()
        self._current: _Process | None = None
        self._numbers = 0
        self._folders: tuple[str, ...] = ()
        self._idle: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[str]] = set()

    def pids(self) -> set[int]:
        """The pid of the running worker."""
        return {self._current.process.pid} if self._current is not None and self._current.is_alive else set()

    def outdated(self) -> bool:
        """Whether the running worker has other options than a new one would get."""
        current = self._current
        return current is not None and current.is_alive and current.setup[0] != self._wanted()

    def _wanted(self) -> WorkerOptions:
        return replace(self._options(), folders=self._folders)

    async def ask(
        self, job: Mapping[str, Any], on_progress: OnProgress = lambda _: None
    ) -> tuple[dict[str, Any], bytes]:
        """Returns the answer and its data. Raises UploadError and its subclasses."""
        if (folder := folder_of(str(job["url"]))) and folder not in self._folders:
            self._folders += (folder,)
        worker = await self._worker()
        self._numbers += 1
        number = self._numbers
        queue: asyncio.Queue[tuple[dict[str, Any], bytes] | None] = asyncio.Queue()
        worker.jobs[number] = queue
        finished = False
        try:
            worker.send({**job, "id": number})
            answer, data = await self._answer(worker, queue, on_progress)
            finished = True
        finally:
            if not finished and worker.is_alive:
                with contextlib.suppress(OSError):
                    worker.send({"do": "cancel", "job": number})
            del worker.jobs[number]
            self._rest(worker)
        if answer["ok"] is not True:
            raise _error(answer)
        return answer, data

    async def _answer(
        self, worker: _Process, queue: "asyncio.Queue[tuple[dict[str, Any], bytes] | None]", on_progress: OnProgress
    ) -> tuple[dict[str, Any], bytes]:
        while True:
            try:
                told = await asyncio.wait_for(queue.get(), self._stuck_s)
            except TimeoutError:
                worker.kill()
                raise UploadError(
                    f"the upload worker was killed because it made no progress for {self._stuck_s:g} s"
                ) from None
            if told is None:
                raise UploadError("the upload worker ended in the middle of a job")
            if "ok" in told[0]:
                return told
            on_progress(int(told[0].get("progress", 0)))

    async def _worker(self) -> _Process:
        async with self._starting:
            try:
                setup = self._wanted(), await asyncio.to_thread(self._environ)
            except OSError as exc:
                raise UploadError(f"the credentials cannot be read: {exc}") from exc
            current = self._current
            if current is not None and current.is_alive and (current.setup == setup or current.jobs):
                return current
            if current is not None:
                await current.stop(kill=False)
            self._current = await self._start(setup)
            return self._current

    async def _start(self, setup: Setup) -> _Process:
        options, variables = setup
        command = child.python("kinetod.uploads.upload_worker", str(self._lock_path))
        environ = {**os.environ, **variables}
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_LINE_BYTES, env=environ
            )
        except OSError as exc:
            raise UploadError(f"the upload worker cannot be started: {exc.strerror}") from exc
        worker = _Process(process, setup)
        worker.send(asdict(options))
        return worker

    def _rest(self, worker: _Process) -> None:
        """Ends a worker that is no longer needed."""
        if worker.jobs or worker is not self._current:
            return
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._retire, worker)

    def _retire(self, worker: _Process) -> None:
        if not worker.jobs and worker is self._current and not self._starting.locked():
            self._current = None
            task = asyncio.create_task(worker.stop(kill=False))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        """Ends the process; unfinished jobs fail."""
        if self._idle is not None:
            self._idle.cancel()
        async with self._starting:
            current, self._current = self._current, None
            if current is not None:
                current.kill()
                await current.stop(kill=False)
        if self._ending:
            await asyncio.wait(self._ending)


def _error(answer: Mapping[str, Any]) -> UploadError:
    text = clean(str(answer.get("error", "")), 1000) or "the upload worker gave no reason"
    kind = answer.get("kind")
    if kind == "local-damage":
        path = str(answer.get("path", ""))
        return LocalDamage(path, text.removeprefix(f"{path}: "))
    if kind == "cancelled":
        return Cancelled()
    return RemoteDamage(text) if kind == "remote-damage" else UploadError(text)


def worker_options(config: Config) -> WorkerOptions:
    """The options of the next worker."""
    return WorkerOptions(
        bytes_per_second=config.upload_bytes_per_second,
        endpoint=config.upload_endpoint,
        timeout_s=config.upload_timeout_ns / 1e9,
    )


def worker_environ(config: Config) -> dict[str, str]:
    """The variables that point the store's library to `upload.credentials`. Blocking. Raises OSError."""
    if config.upload_credentials is None or not config.upload_url:
        return {}
    return credential_variables(scheme_of(config.upload_url), config.upload_credentials)


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
        return DataLoss(
            Reason.FILE_DAMAGED, f"the uploaded copy {upload.url} is damaged: {exc}; it was changed or removed there"
        )
    return Precondition(
        Reason.OBJECT_STORE_FAILED,
        f"the object store cannot be used for {upload.url}: {exc}; check its address, its credentials and the network, "
        "then try again",
    )
