"""Records counters of some GPUs into files, with one thread for all of them.

Theory of operation
    Each GPU has a file in each of its folders: those of the captured processes that use it. The thread empties the
    rings every POLL_S and appends to the files, which kineto_trace.spool.counter_samples reads. When a folder's window
    is over, it leaves (`leave`): its files get the rows up to there, if they arrive in time, and are closed, while
    other folders continue. Rows are written whole, so files left by a killed daemon can be read.

    A slow or full disk never makes kinetod-counters wait: rows are dropped and counted, or the file ends and the result
    says why. `stop` ends the sampling first, so that the rings have their last rows when the thread empties them again.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
from kineto_trace.base.array_types import Structs
from kineto_trace.spool.counter_samples import (
    MAX_FILE_BYTES,
    SUFFIX,
    CounterHeader,
    SampledMetric,
    write_header,
    write_rows,
)

from kinetod.base.safe_text import clean
from kinetod.counters.counter_client import CounterClient, CounterLosses, CounterSession
from kinetod.counters.interface import MOST_DURATION_NS, CounterCode, CounterError, CounterPlan, WantedCounters
from kinetod.counters.sample_rings import RingError

log = logging.getLogger(__name__)

POLL_S = 0.1
_JOIN_S = 30.0
_LATE_S = 1.0  # of the thread, beyond the time that a folder waits for its rows


class RecordedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one GPU. files: empty if it could not be sampled (`losses` says why). plan: what was measured.

    start_ns, end_ns: Unix time of the first and the last row; 0: there is none.
    """

    gpu_uuid: str
    gpu_index: int | None
    files: tuple[Path, ...]
    losses: CounterLosses
    plan: CounterPlan
    interval_ns: int = 0
    start_ns: int = 0
    end_ns: int = 0


class _File:
    """One file. It ends at the first error."""

    def __init__(self, path: Path, header: CounterHeader, max_bytes: int) -> None:
        """Creates the file. Raises OSError, ValueError."""
        self.path = path
        self.problem = ""
        self._left = max_bytes
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file: IO[bytes] = os.fdopen(os.open(path, flags, 0o600), "wb")
        write_header(self._file, header)
        self._file.flush()

    @property
    def is_open(self) -> bool:
        return not self._file.closed

    def append(self, rows: Structs) -> None:
        if self.problem or not self.is_open:
            return
        self._left -= rows.nbytes
        try:
            if self._left < 0:
                raise OSError("the file has reached its maximum size")
            write_rows(self._file, rows)
            self._file.flush()  # whole rows: for a daemon that recovers the files of this one
        except OSError as exc:
            self._fail(exc)

    def _fail(self, exc: OSError) -> None:
        self.problem = self.problem or clean(f"sampling ended early: {exc.strerror or exc}", 300)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as exc:
            self._fail(exc)


class _Recorded:
    """A session and its files. Used by the thread."""

    def __init__(
        self, session: CounterSession, folders: Sequence[Path], wanted: WantedCounters, max_bytes: int
    ) -> None:
        """Creates the files. Raises OSError, ValueError."""
        self.session = session
        self.problem = ""
        self.start_ns = self.end_ns = 0
        self.bytes_written = 0
        self.stopped_for: CounterError | None = None
        self._last_look = False
        header = _header(session, wanted)
        self.files: dict[Path, _File] = {}
        try:
            for folder in folders:
                self.files[folder] = _File(folder / f"{session.gpu.uuid}{SUFFIX}", header, max_bytes)
        except BaseException:
            for file in self.files.values():
                file.close()
                file.path.unlink(missing_ok=True)
            raise

    def empty(self, check: Callable[[], None]) -> None:
        """Appends the ring's rows; after an error nothing more. check: raises OSError if nothing may be written."""
        while not self.problem:
            try:
                self._last_look = self.session.status().ended or self.session.gone()
                rows = self.session.take()
                if not len(rows):
                    return
                check()
            except (OSError, RingError) as exc:
                self._fail(f"sampling ended early: {exc.strerror or exc}" if isinstance(exc, OSError) else str(exc))
                return
            self.start_ns = self.start_ns or int(rows["start_ns"][0])
            self.end_ns = int(rows["end_ns"][-1])
            for file in self.files.values():
                file.append(rows)
            opened = [file for file in self.files.values() if file.is_open]
            self.bytes_written += rows.nbytes * len(opened)
            if opened and all(file.problem for file in opened):
                self._fail(opened[0].problem)

    def _fail(self, problem: str) -> None:
        self.problem = clean(problem, 300)
        self.session.request_stop()

    def covers(self, until_ns: int) -> bool:
        """Whether there are rows up to this time, or no more will come."""
        return bool(self.problem) or self.end_ns >= until_ns or self._last_look

    def leave(self, folder: Path) -> None:
        """Closes the folder's file; the sampling ends with the last file."""
        file = self.files.get(folder)
        if file is not None:
            file.close()
            if not any(each.is_open for each in self.files.values()):
                self.session.request_stop()

    def close(self) -> None:
        for file in self.files.values():
            file.close()
            self.problem = self.problem or file.problem

    def result(self, folder: Path | None = None) -> RecordedGpu:
        """Result for this GPU, or for its file in this folder."""
        losses = self.session.verdict()
        problem = self.problem or (self.files[folder].problem if folder is not None else "")
        if self.stopped_for is not None:
            losses = msgspec.structs.replace(losses, code=self.stopped_for.code, reason=self.stopped_for.reason)
        elif problem:
            losses = msgspec.structs.replace(losses, code=losses.code or CounterCode.FAILED, reason=problem)
        return RecordedGpu(
            gpu_uuid=self.session.gpu.uuid,
            gpu_index=self.session.gpu.index,
            files=tuple(file.path for file in self.files.values()),
            losses=losses,
            plan=self.session.plan,
            interval_ns=self.session.interval_ns,
            start_ns=self.start_ns,
            end_ns=self.end_ns,
        )


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A folder that waits for its last rows. done: called with the results of its GPUs."""

    folder: Path
    until_ns: int
    deadline_s: float
    done: Callable[[list[RecordedGpu]], None]


class CounterRecording:
    """Records some GPUs. refused: those that could not be recorded."""

    def __init__(
        self,
        recorded: Sequence[_Recorded],
        refused: Sequence[RecordedGpu],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.refused = tuple(refused)
        self.gpus = tuple(each.session.gpu.uuid for each in recorded)
        self._recorded = recorded
        self._check = check
        self._leaving: list[_Leaving] = []
        self._wake = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._work, name="counters to files", daemon=True)
        self._thread.start()

    @property
    def bytes_written(self) -> int:
        """Bytes written to all files."""
        return sum(each.bytes_written for each in self._recorded)

    def _work(self) -> None:
        while not self._ends:
            self._wake.wait(POLL_S)
            self._wake.clear()
            for each in self._recorded:
                each.empty(self._check)
            for leaving in list(self._leaving):
                self._let_go(leaving)

    def _let_go(self, leaving: _Leaving) -> None:
        its = [each for each in self._recorded if leaving.folder in each.files]
        if time.monotonic() < leaving.deadline_s and not all(each.covers(leaving.until_ns) for each in its):
            return
        self._leaving.remove(leaving)
        for each in its:
            each.leave(leaving.folder)
        leaving.done([each.result(leaving.folder) for each in its])

    def results(self) -> list[RecordedGpu]:
        """Current results of all GPUs, including refused ones."""
        return [*(each.result() for each in self._recorded), *self.refused]

    async def leave(self, folder: Path, until_ns: int, within_s: float) -> list[RecordedGpu]:
        """Ends the folder's files with the rows up to until_ns, or those that arrive within within_s. Raises nothing.

        Returns the results of its GPUs; none if the disk does not accept the rows.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[RecordedGpu]] = loop.create_future()

        def answer(found: list[RecordedGpu]) -> None:
            if not done.done():
                done.set_result(found)

        def tell(found: list[RecordedGpu]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(answer, found)

        self._leaving.append(_Leaving(folder, until_ns, time.monotonic() + within_s, tell))
        self._wake.set()
        try:
            return await asyncio.wait_for(done, within_s + _LATE_S)
        except TimeoutError:
            log.error("the counters could not be written to disk in time; the files in %s are left as they are", folder)
            return []

    def let_go(self, folder: Path) -> None:
        """Ends the folder's files at once."""
        self._leaving.append(_Leaving(folder, 0, 0.0, lambda _found: None))
        self._wake.set()

    def end_gpu(self, uuid: str, error: CounterError) -> None:
        """Ends one GPU early, for this reason. Does not wait for its end."""
        for each in self._recorded:
            if each.session.gpu.uuid == uuid and each.stopped_for is None:
                each.stopped_for = error
                each.session.request_stop()

    async def stop(self) -> list[RecordedGpu]:
        """Ends the recording and returns the results of all GPUs, including refused ones. Raises nothing."""
        await asyncio.gather(*(each.session.stop() for each in self._recorded))
        await asyncio.to_thread(self._finish)
        return self.results()

    def _finish(self) -> None:
        self._ends = True
        self._wake.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            log.error("the counters could not be written to disk in time; their files are left as they are")
            return
        for each in self._recorded:
            each.empty(self._check)
            each.close()

    def abandon(self) -> None:
        """Ends the recording without waiting for the last rows, in place of `stop`. Raises nothing."""
        self._ends = True
        self._wake.set()
        for each in self._recorded:
            each.session.request_stop()
        self._thread.join(_LATE_S)
        if not self._thread.is_alive():
            for each in self._recorded:
                each.close()
        self.close()

    def close(self) -> None:
        """Releases the rings, after `stop`."""
        if not self._thread.is_alive():
            for each in self._recorded:
                each.session.close()


async def record_counters(
    client: CounterClient,
    folders: Mapping[str, Sequence[Path]],
    wanted: WantedCounters,
    interval_ns: int,
    *,
    most_ns: int = MOST_DURATION_NS,
    max_bytes: int = MAX_FILE_BYTES,
    check: Callable[[], None] = lambda: None,
) -> CounterRecording:
    """Samples each GPU into <folder>/<uuid>.counters of its folders from now on. Raises nothing.

    GPUs that cannot be sampled are in `refused`. interval_ns: 0: each GPU's default. max_bytes: of each file. check:
    called before rows are written; if it raises OSError, the GPU ends with its text.
    """
    starting = [asyncio.create_task(client.start(uuid, wanted, interval_ns, most_ns=most_ns)) for uuid in folders]
    try:
        started = await asyncio.gather(*starting, return_exceptions=True)
    except asyncio.CancelledError:
        for task in starting:
            task.add_done_callback(_ended_at_once)
        raise
    recorded, refused = list[_Recorded](), list[RecordedGpu]()
    for uuid, session in zip(folders, started, strict=True):
        if isinstance(session, CounterSession):
            try:
                recorded.append(_Recorded(session, folders[uuid], wanted, max_bytes))
            except (OSError, ValueError) as exc:
                session.request_stop()
                session.close()
                refused.append(refusal(uuid, CounterError(CounterCode.FAILED, f"GPU {uuid}: {exc}")))
        elif isinstance(session, CounterError):
            refused.append(refusal(uuid, session))
        else:
            log.error("sampling the counters of %s failed", uuid, exc_info=session)
            refused.append(refusal(uuid, CounterError(CounterCode.FAILED, f"GPU {uuid}: internal error")))
    return CounterRecording(recorded, refused, check)


def _ended_at_once(task: asyncio.Task[CounterSession]) -> None:
    """Ends a sampling whose caller had stopped waiting before it began."""
    if not task.cancelled() and task.exception() is None:
        task.result().request_stop()
        task.result().close()


def refusal(uuid: str, error: CounterError, index: int | None = None) -> RecordedGpu:
    """Result for a GPU that could not be sampled."""
    losses = CounterLosses(code=error.code, reason=error.reason, rows=0, gaps=0, lost_ns=0, dropped_rows=0)
    return RecordedGpu(gpu_uuid=uuid, gpu_index=index, files=(), losses=losses, plan=CounterPlan(metrics=()))


def _header(session: CounterSession, wanted: WantedCounters) -> CounterHeader:
    return CounterHeader(
        gpu_uuid=session.gpu.uuid,
        gpu_index=session.gpu.index,
        chip=session.gpu.chip,
        interval_ns=session.interval_ns,
        metrics=tuple(
            SampledMetric(name=metric.name, label=metric.label, unit=metric.unit) for metric in session.plan.metrics
        ),
        set=wanted.set_name,
        backend=session.backend,
        library_version=session.library_version,
    )
