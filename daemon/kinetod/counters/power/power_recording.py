"""Power, clocks, temperature and throttling of some GPUs into files, by a process for each recording.

Theory of operation
    The daemon opens the files and hands their descriptors to the process (power_process.py), which writes them; so
    a full disk, a driver that hangs or a process that dies costs rows and nothing else. `record_power` returns after
    START_S at most, whatever the driver does: a GPU whose driver is slower has later rows, or none. `stop` ends the
    process by the end of its standard input and kills it after STOP_S. What the files then hold, and what the process
    said, is what became of each GPU.

    Losses are the times in which nobody could look, by the rows themselves.
"""

import asyncio
import contextlib
import logging
import os
import re
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from kineto_trace.errors import FileError
from kineto_trace.spool.counter_samples import SUFFIX, read_counter_samples

from kinetod.base.safe_text import clean
from kinetod.counters.counter_client import CounterLosses
from kinetod.counters.counter_recording import RecordedCounters
from kinetod.counters.interface import MOST_DURATION_NS, CounterCode
from kinetod.counters.power.interface import MAX_FILE_BYTES, PERIOD_NS, PowerNews, PowerRequest, PowerTarget
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.gpu_types import GpuQuestion, Snapshot
from kinetod.supervise import child

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.counters.power.power_process")
START_S = 2.0  # for the process to begin; drivers without persistence mode take longer
STOP_S = 3.0  # beyond what the process gives its threads
_MAX_LINE_BYTES = 4096
_NVIDIA = "nvidia"
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:.-]{0,63}")  # AMD's and Intel's may be PCI addresses


class PowerRecording:
    """Some GPUs that are being recorded. refused: those that could not be, as far as that is known."""

    def __init__(self, paths: dict[str, Path], refused: Sequence[RecordedCounters]) -> None:
        """paths: the file of each GPU, in the order of the process's request."""
        self._paths = paths
        self._uuids = tuple(paths)
        self._unopened = tuple(refused)
        self._news: dict[str, PowerNews] = {}  # the latest of each GPU
        self._started: set[str] = set()
        self._process: Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._failure = ""
        self._begun = asyncio.Event()

    @property
    def gpus(self) -> tuple[str, ...]:
        """Those that are being recorded, or still being asked."""
        return tuple(uuid for uuid in self._uuids if not self._refusal(uuid)[0])

    @property
    def refused(self) -> tuple[RecordedCounters, ...]:
        """Those that could not be, as far as that is known."""
        refusals = ((uuid, self._refusal(uuid)) for uuid in self._uuids)
        return (*self._unopened, *(_nothing(uuid, code, reason) for uuid, (code, reason) in refusals if code))

    def _refusal(self, uuid: str) -> tuple[str, str]:
        """Code and reason for a GPU that has no row and will have none; empty for others."""
        if uuid in self._started:
            return "", ""
        if news := self._news.get(uuid):
            return news.code, news.reason
        return (CounterCode.FAILED, self._failure) if self._failure else ("", "")

    def fail(self, reason: str) -> None:
        """The process could not be started."""
        self._failure = reason

    async def start(self, command: Sequence[str], request: PowerRequest) -> None:
        """Starts the process and waits until all GPUs have begun, START_S at most. Raises OSError."""
        descriptors = [gpu.descriptor for gpu in request.gpus]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_MAX_LINE_BYTES, pass_fds=descriptors
        )
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
        except (ValueError, IndexError) as exc:  # msgspec's errors are ValueErrors
            self._failure = f"the process that reads power gave an invalid answer: {exc}"
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        finally:
            self._begun.set()

    async def stop(self) -> list[RecordedCounters]:
        """Ends it and returns what became of each GPU, the refused ones, too. Raises nothing."""
        process, self._process = self._process, None
        if process is not None:
            in_time = await _ended_by_itself(process)
            how = await child.end(process, readers=self._readers)
            if not in_time:
                self._failure = self._failure or f"the driver did not answer within {STOP_S:g} s"
            elif process.returncode:
                self._failure = (
                    self._failure or f"the process that reads power failed ({how}); the daemon's log has more"
                )
        found = await asyncio.to_thread(lambda: [self._result(uuid) for uuid in self._uuids])
        return [*found, *self._unopened]

    def close(self) -> None:
        """Kills the process, where `stop` was not called."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _result(self, uuid: str) -> RecordedCounters:
        """Deletes the file of a GPU that was never read."""
        path, news = self._paths[uuid], self._news.get(uuid)
        code, reason = (news.code, news.reason) if news is not None and news.code else ("", self._failure)
        try:
            samples = read_counter_samples(path)
        except FileError as exc:
            with contextlib.suppress(OSError):
                path.unlink()
            return _nothing(uuid, code or CounterCode.FAILED, reason or str(exc))
        between = samples.start_ns[1:] - samples.end_ns[:-1]
        gaps, lost_ns = int(np.count_nonzero(between)), int(between.sum())
        missing = f"readings of {lost_ns / 1e6:.1f} ms are missing, in {gaps} places" if gaps else ""
        losses = CounterLosses(
            code=code or (CounterCode.FAILED if reason else ""),
            reason="; ".join(filter(None, (reason, missing))),
            rows=len(samples.start_ns),
            gaps=gaps,
            lost_ns=lost_ns,
            dropped_rows=0,
        )
        return RecordedCounters(gpu_uuid=uuid, path=path, losses=losses)


async def _ended_by_itself(process: Process) -> bool:
    """Whether it did within STOP_S after the end of its standard input."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_S)
    return process.returncode is not None


async def record_power(
    reader: GpuReader,
    gpus: Sequence[str],
    folder: Path,
    *,
    period_ns: int = PERIOD_NS,
    most_ns: int = MOST_DURATION_NS,
    max_bytes: int = MAX_FILE_BYTES,
    command: Sequence[str] = COMMAND,
) -> PowerRecording:
    """Reads these GPUs into FOLDER/<uuid>.power.counters from now on.

    GPUs that cannot be read are in `refused`, now or when it is stopped. Raises nothing.
    """
    addresses = await asyncio.to_thread(_addresses, reader, gpus)
    paths, targets, refused = dict[str, Path](), list[PowerTarget](), list[RecordedCounters]()
    try:
        for uuid in dict.fromkeys(gpus):
            path = folder / f"{uuid}.power{SUFFIX}"
            try:
                if not _UUID.fullmatch(uuid):
                    raise ValueError("that is not the UUID of a GPU")
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except (OSError, ValueError) as exc:
                refused.append(_nothing(uuid, CounterCode.FAILED, f"GPU {uuid}: {clean(str(exc), 200)}"))
                continue
            paths[uuid] = path
            targets.append(PowerTarget(uuid=uuid, descriptor=descriptor, pci_bus_id=addresses.get(uuid, "")))
        recording = PowerRecording(paths, refused)
        if targets:
            request = PowerRequest(gpus=tuple(targets), period_ns=period_ns, most_ns=most_ns, max_bytes=max_bytes)
            try:
                await recording.start(command, request)
            except OSError as exc:
                recording.fail(f"the process that reads power cannot be started: {exc.strerror}")
        return recording
    finally:
        for target in targets:
            os.close(target.descriptor)


def _addresses(reader: GpuReader, gpus: Sequence[str]) -> dict[str, str]:
    """The PCI addresses of those that are AMD's or Intel's; NVIDIA's, and unknown ones, are NVML's by their UUIDs."""
    known = _by_uuid(reader.latest(question=GpuQuestion.PROCESSES))
    if not set(gpus) <= set(known):
        known |= _by_uuid(reader.read(question=GpuQuestion.PROCESSES))
    return {uuid: known[uuid] for uuid in gpus if known.get(uuid)}


def _by_uuid(snapshot: Snapshot) -> dict[str, str]:
    return {gpu.uuid: "" if gpu.vendor == _NVIDIA else gpu.pci_bus_id for gpu in snapshot.gpus}


def _nothing(uuid: str, code: str, reason: str) -> RecordedCounters:
    losses = CounterLosses(code=code, reason=reason, rows=0, gaps=0, lost_ns=0, dropped_rows=0)
    return RecordedCounters(gpu_uuid=uuid, path=None, losses=losses)
