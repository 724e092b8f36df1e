"""Records power, clocks, temperature and throttling of some GPUs into files, with one process for each recording.

Theory of operation
    Each GPU has a file in each of its folders: those of the captured processes that use it. The daemon opens the files
    and hands their descriptors to the process (power_process.py), which writes the same rows into all of them; so a
    full disk, a hanging driver or a dead process costs rows and nothing else. `record_power` returns after START_S at
    most, whatever the driver does: a GPU whose driver is slower has later rows, or none.

    When a folder's window is over, `leave` waits for the rows up to there and returns the results of its GPUs; its
    files also get later rows, outside of the window. Losses are times without a reading, derived from the rows. `stop`
    closes the process's standard input and kills it after STOP_S.
"""

import asyncio
import contextlib
import logging
import os
import re
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from kineto_trace.base.quantities import format_duration, times
from kineto_trace.errors import FileError
from kineto_trace.spool.counter_samples import last_end_ns, read_counter_samples

from kinetod.base.safe_text import clean
from kinetod.counters.counter_client import CounterLosses
from kinetod.counters.interface import MOST_DURATION_NS, CounterCode, CounterError
from kinetod.counters.power.interface import (
    MAX_FILE_BYTES,
    PERIOD_NS,
    POWER_SUFFIX,
    PowerNews,
    PowerRequest,
    PowerTarget,
)
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.gpu_types import GpuQuestion, Snapshot
from kinetod.supervise import child

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.counters.power.power_process")
START_S = 4.0  # for the process to begin; drivers without persistence mode take longer
STOP_S = 3.0  # longer than the process gives its threads
LOOK_S = 0.02  # how often to check whether a folder's last rows have arrived
_MAX_LINE_BYTES = 4096
_NVIDIA = "nvidia"
_LATE = "the driver did not answer in time; readings are missing"
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:.-]{0,63}")  # AMD's and Intel's may be PCI addresses


class RecordedPower(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one GPU. path: its file; None if it could not be read (`losses` says why).

    start_ns, end_ns: Unix time of the first and the last row; 0: there is none.
    """

    gpu_uuid: str
    path: Path | None
    losses: CounterLosses
    interval_ns: int = PERIOD_NS
    start_ns: int = 0
    end_ns: int = 0


class PowerRecording:
    """Records some GPUs."""

    def __init__(self, files: Mapping[str, Sequence[Path]], unopened: Mapping[str, OSError | ValueError]) -> None:
        """files: by GPU. unopened: the GPUs whose files could not be created, and why."""
        self._files = dict(files)
        self._unopened = dict(unopened)
        self._uuids = tuple(uuid for uuid in files if uuid not in unopened)  # in the order of the process's request
        self._news: dict[str, PowerNews] = {}  # the latest for each GPU
        self._started: set[str] = set()
        self._stopped_for: dict[str, CounterError] = {}
        self._process: Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._failure = ""
        self._ended = False
        self._begun = asyncio.Event()

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPUs that are being recorded or still starting."""
        return tuple(uuid for uuid in self._files if not self._refusal(uuid)[0])

    @property
    def refused(self) -> tuple[RecordedPower, ...]:
        """GPUs that are known to have failed to start."""
        refusals = ((uuid, *self._refusal(uuid)) for uuid in self._files)
        return tuple(_nothing(uuid, code, reason) for uuid, code, reason in refusals if code)

    def _refusal(self, uuid: str) -> tuple[str, str]:
        """Code and reason for a GPU that has no row and will get none; empty for others."""
        if uuid in self._started:
            return "", ""
        return self._end(uuid)

    def _end(self, uuid: str) -> tuple[str, str]:
        """Code and reason for a GPU that gets no more rows; empty for others."""
        if uuid in self._unopened:
            return CounterCode.FAILED, f"GPU {uuid}: {clean(str(self._unopened[uuid]), 200)}"
        if error := self._stopped_for.get(uuid):
            return error.code, error.reason
        if (news := self._news.get(uuid)) and news.code:
            return news.code, news.reason
        if self._failure or self._ended:
            return CounterCode.FAILED, self._failure or "the process that reads power has ended"
        return "", ""

    @property
    def bytes_written(self) -> int:
        """Bytes written to all files."""
        written = 0
        for path in (path for paths in self._files.values() for path in paths):
            with contextlib.suppress(OSError):
                written += path.stat().st_size
        return written

    async def start(self, command: Sequence[str], request: PowerRequest) -> None:
        """Starts the process and waits, START_S at most, until all GPUs have begun. Raises nothing."""
        descriptors = [descriptor for gpu in request.gpus for descriptor in gpu.descriptors]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_MAX_LINE_BYTES, pass_fds=descriptors
            )
        except OSError as exc:
            self._failure = f"the process that reads power cannot be started: {exc.strerror}"
            return
        self._process = process
        assert process.stdin is not None
        self._readers = [
            asyncio.create_task(child.log_errors(process, log, "power readings", logging.WARNING)),
            asyncio.create_task(self._listen(process)),
        ]
        try:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(msgspec.json.encode(request) + b"\n")
                await process.stdin.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._begun.wait(), START_S)
        except BaseException:
            await child.end(process, readers=self._readers)
            raise

    async def _listen(self, process: Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                news = msgspec.json.decode(line, type=PowerNews)
                uuid = self._uuids[news.gpu]
                self._news[uuid] = news
                if not news.code:
                    self._started.add(uuid)
                if len(self._news) == len(self._uuids):
                    self._begun.set()
            if (status := await process.wait()) and not self._failure:
                self._failure = f"the process that reads power failed (exit status {status}); see the daemon's log"
        except (ValueError, IndexError) as exc:  # msgspec's errors are ValueErrors
            self._failure = f"the process that reads power sent an invalid answer: {exc}"
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        finally:
            self._ended = True
            self._begun.set()

    async def leave(self, folder: Path, until_ns: int, within_s: float) -> list[RecordedPower]:
        """Waits for the folder's rows up to until_ns, or those that arrive within within_s. Raises nothing.

        Returns the results of its GPUs.
        """
        deadline = time.monotonic() + within_s
        paths = {uuid: path for uuid, files in self._files.items() for path in files if path.parent == folder}
        awaited = list(paths)
        while True:
            awaited = [uuid for uuid in awaited if not self._end(uuid)[0] and _last_end_ns(paths[uuid]) < until_ns]
            if not awaited or time.monotonic() > deadline:
                break
            await asyncio.sleep(LOOK_S)
        ends = {uuid: (CounterCode.FAILED, _LATE) if uuid in awaited else self._end(uuid) for uuid in paths}
        return await asyncio.to_thread(lambda: [self._result(uuid, path, *ends[uuid]) for uuid, path in paths.items()])

    def _result(self, uuid: str, path: Path, code: str, reason: str) -> RecordedPower:
        return _nothing(uuid, code, reason) if uuid in self._unopened else _read_result(uuid, path, code, reason)

    def end_gpu(self, uuid: str, error: CounterError) -> None:
        """Ends one GPU early, for this reason. Does not wait for its end."""
        process = self._process
        if process is None or uuid not in self._uuids or uuid in self._stopped_for:
            return
        self._stopped_for[uuid] = error
        assert process.stdin is not None
        process.stdin.write(b"%d\n" % self._uuids.index(uuid))

    async def stop(self) -> None:
        """Ends the recording. Raises nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        await child.end(process, patience_s=STOP_S, readers=self._readers)

    def abandon(self) -> None:
        """Ends the recording without waiting, in place of `stop`. Raises nothing."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


async def record_power(
    reader: GpuReader,
    folders: Mapping[str, Sequence[Path]],
    *,
    period_ns: int = PERIOD_NS,
    most_ns: int = MOST_DURATION_NS,
    max_bytes: int = MAX_FILE_BYTES,
    command: Sequence[str] = COMMAND,
) -> PowerRecording:
    """Reads each GPU into <folder>/<uuid>.power.counters of its folders from now on. Raises nothing.

    folders: by UUID. GPUs that cannot be read appear in `refused`, now or later. max_bytes: of each file.
    """
    addresses = await asyncio.to_thread(_addresses, reader, folders)
    files = {uuid: [folder / f"{uuid}{POWER_SUFFIX}" for folder in places] for uuid, places in folders.items()}
    targets, unopened = list[PowerTarget](), dict[str, OSError | ValueError]()
    try:
        for uuid, paths in files.items():
            try:
                descriptors = _created(uuid, paths)
            except (OSError, ValueError) as exc:
                unopened[uuid] = exc
            else:
                targets.append(PowerTarget(uuid=uuid, descriptors=descriptors, pci_bus_id=addresses.get(uuid, "")))
        recording = PowerRecording(files, unopened)
        if targets:
            request = PowerRequest(gpus=tuple(targets), period_ns=period_ns, most_ns=most_ns, max_bytes=max_bytes)
            await recording.start(command, request)
        return recording
    finally:
        for target in targets:
            _close(target.descriptors)


def _created(uuid: str, paths: Sequence[Path]) -> tuple[int, ...]:
    """Creates the files and returns their descriptors. Raises OSError, ValueError."""
    if not _UUID.fullmatch(uuid):
        raise ValueError("not a valid GPU UUID")
    made: list[int] = []
    try:
        for path in paths:
            made.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except BaseException:
        _close(made)
        for path in paths[: len(made)]:
            path.unlink(missing_ok=True)
        raise
    return tuple(made)


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


def _addresses(reader: GpuReader, gpus: Collection[str]) -> dict[str, str]:
    """PCI addresses of the AMD and Intel GPUs; NVML finds NVIDIA's, and unknown ones, by their UUIDs."""
    known = _by_uuid(reader.latest(question=GpuQuestion.PROCESSES))
    if not set(gpus) <= set(known):
        known |= _by_uuid(reader.read(question=GpuQuestion.PROCESSES))
    return {uuid: known[uuid] for uuid in gpus if known.get(uuid)}


def _by_uuid(snapshot: Snapshot) -> dict[str, str]:
    return {gpu.uuid: "" if gpu.vendor == _NVIDIA else gpu.pci_bus_id for gpu in snapshot.gpus}


def _last_end_ns(path: Path) -> int:
    try:
        return last_end_ns(path)
    except FileError:  # nothing is written yet
        return 0


def _read_result(uuid: str, path: Path, code: str, reason: str) -> RecordedPower:
    """Result for a GPU's file. Deletes it if nothing was written."""
    try:
        samples = read_counter_samples(path)
    except FileError as exc:
        with contextlib.suppress(OSError):
            path.unlink()
        return _nothing(uuid, code or CounterCode.FAILED, reason or str(exc))
    between = samples.start_ns[1:] - samples.end_ns[:-1]
    gaps, lost_ns = int(np.count_nonzero(between)), int(between.sum())
    missing = f"{format_duration(lost_ns)} of readings are missing, in {times(gaps, 'place')}" if gaps else ""
    rows = len(samples.start_ns)
    return RecordedPower(
        gpu_uuid=uuid,
        path=path,
        losses=CounterLosses(
            code=code,
            reason="; ".join(filter(None, (reason, missing))),
            rows=rows,
            gaps=gaps,
            lost_ns=lost_ns,
            dropped_rows=0,
        ),
        start_ns=int(samples.start_ns[0]) if rows else 0,
        end_ns=int(samples.end_ns[-1]) if rows else 0,
        interval_ns=samples.header.interval_ns,
    )


def _nothing(uuid: str, code: str, reason: str) -> RecordedPower:
    losses = CounterLosses(code=code, reason=reason, rows=0, gaps=0, lost_ns=0, dropped_rows=0)
    return RecordedPower(gpu_uuid=uuid, path=None, losses=losses)
