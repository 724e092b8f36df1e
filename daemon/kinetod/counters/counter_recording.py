"""Counters of some GPUs into files, one thread for all of them.

Theory of operation
    The thread empties the rings every POLL_S and appends to the files, which kineto_trace.spool.counter_samples reads.
    A slow or full disk never makes kinetod-counters wait: rows are dropped and counted, or the file ends and the result
    says why. `stop` ends the sampling first, so that the rings have their last rows when the thread empties them again.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec
from kineto_trace.spool.counter_samples import (
    MAX_FILE_BYTES,
    SUFFIX,
    CounterHeader,
    SampledMetric,
    row_type,
    write_header,
    write_rows,
)

from kinetod.base.safe_text import clean
from kinetod.counters.counter_client import CounterClient, CounterLosses, CounterSession
from kinetod.counters.interface import MOST_DURATION_NS, CounterCode, CounterError, WantedCounters
from kinetod.counters.sample_rings import RingError

log = logging.getLogger(__name__)

POLL_S = 0.1
_JOIN_S = 30.0


class RecordedCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a GPU. path: its file; None: it could not be sampled, and `losses` says why."""

    gpu_uuid: str
    path: Path | None
    losses: CounterLosses


class _Recorded:
    """A session and its file. Used by the thread."""

    def __init__(self, session: CounterSession, path: Path, wanted: WantedCounters, max_bytes: int) -> None:
        """Creates the file. Raises OSError."""
        self.session = session
        self.path = path
        self.problem = ""
        self._left = max_bytes
        self._row_bytes = row_type(len(session.plan.metrics)).itemsize
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file: IO[bytes] = os.fdopen(os.open(path, flags, 0o600), "wb")
        write_header(self._file, _header(session, wanted))

    def empty(self) -> None:
        """Appends what is in the ring; after an error nothing more."""
        while not self.problem:
            try:
                rows = self.session.take()
                if not len(rows):
                    return
                self._left -= len(rows) * self._row_bytes
                if self._left < 0:
                    raise OSError("the file has its largest size")
                write_rows(self._file, rows)
            except (OSError, RingError) as exc:
                self.problem = clean(f"the counters end early: {exc}", 300)
                self.session.request_stop()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as exc:
            self.problem = self.problem or clean(f"the counters end early: {exc}", 300)

    def result(self) -> RecordedCounters:
        losses = self.session.verdict()
        if self.problem:
            losses = msgspec.structs.replace(losses, code=losses.code or CounterCode.FAILED, reason=self.problem)
        return RecordedCounters(gpu_uuid=self.session.gpu.uuid, path=self.path, losses=losses)


class CounterRecording:
    """Some GPUs that are being recorded. refused: those that could not be."""

    def __init__(self, recorded: Sequence[_Recorded], refused: Sequence[RecordedCounters]) -> None:
        self.refused = tuple(refused)
        self.gpus = tuple(each.session.gpu.uuid for each in recorded)
        self._recorded = recorded
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="counters to files", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._wake.wait(POLL_S):
            for each in self._recorded:
                each.empty()

    async def stop(self) -> list[RecordedCounters]:
        """Ends it and returns what became of each GPU, the refused ones, too. Raises nothing."""
        await asyncio.gather(*(each.session.stop() for each in self._recorded))
        await asyncio.to_thread(self._finish)
        return [*(each.result() for each in self._recorded), *self.refused]

    def _finish(self) -> None:
        self._wake.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            log.error("the disk does not take counters; their files are left as they are")
            return
        for each in self._recorded:
            each.empty()
            each.close()

    def close(self) -> None:
        """Lets go of the rings, after `stop`."""
        if not self._thread.is_alive():
            for each in self._recorded:
                each.session.close()


async def record_counters(
    client: CounterClient,
    gpus: Sequence[str],
    wanted: WantedCounters,
    interval_ns: int,
    folder: Path,
    *,
    most_ns: int = MOST_DURATION_NS,
    max_bytes: int = MAX_FILE_BYTES,
) -> CounterRecording:
    """Samples these GPUs into FOLDER/<uuid>.counters from now on. GPUs that refuse are in `refused`. Raises nothing.

    interval_ns: 0: each GPU's default.
    """
    started = await asyncio.gather(
        *(client.start(uuid, wanted, interval_ns, most_ns=most_ns) for uuid in gpus), return_exceptions=True
    )
    recorded, refused = list[_Recorded](), list[RecordedCounters]()
    for uuid, session in zip(gpus, started, strict=True):
        if isinstance(session, CounterSession):
            try:
                recorded.append(_Recorded(session, folder / f"{uuid}{SUFFIX}", wanted, max_bytes))
            except (OSError, ValueError) as exc:
                session.request_stop()
                session.close()
                refused.append(_refused(uuid, CounterError(CounterCode.FAILED, f"GPU {uuid}: {exc}")))
        elif isinstance(session, CounterError):
            refused.append(_refused(uuid, session))
        else:
            log.error("the counters of %s failed", uuid, exc_info=session)
            refused.append(_refused(uuid, CounterError(CounterCode.FAILED, f"GPU {uuid}: an internal error")))
    return CounterRecording(recorded, refused)


def _refused(uuid: str, error: CounterError) -> RecordedCounters:
    losses = CounterLosses(code=error.code, reason=error.reason, rows=0, gaps=0, lost_ns=0, dropped_rows=0)
    return RecordedCounters(gpu_uuid=uuid, path=None, losses=losses)


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
