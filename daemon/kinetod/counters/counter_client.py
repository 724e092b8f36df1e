"""The daemon's side of kinetod-counters: asks, samples, and knows what was lost. Everything raises CounterError.

Theory of operation
    One connection for each question, and one for each GPU that is sampled, which lives as long as the sampling: hanging
    up ends it. Rows come through a ring in shared memory and are taken by whoever has the session, in any one thread.
    The other side is not trusted: its answers are bounded and decoded strictly, its ring is checked in C.

    kinetod-counters may die at any moment. What it had written can still be taken, and `verdict` says that it is gone.
"""

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from kineto_trace.base.quantities import times

from kinetod.base.safe_text import clean
from kinetod.base.unix_sockets import receive
from kinetod.counters import messages
from kinetod.counters.interface import (
    MOST_DURATION_NS,
    CounterCode,
    CounterDevice,
    CounterError,
    CounterPlan,
    WantedCounters,
    check_interval,
)
from kinetod.counters.sample_rings import ERROR, TOO_LONG, NativeLibraryError, RingError, RingReader, RingStatus
from kinetod.counters.sampler_connections import SamplerConnections

ANSWER_S = 30.0  # beyond what the other side allows the driver
STOP_S = 10.0
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:.-]{0,63}")  # AMD's and Intel's may be PCI addresses
Said = TypeVar("Said", messages.GpusReply, messages.BaseMetricsReply, messages.PlanReply)


class SamplerEndedError(CounterError):
    """kinetod-counters ended before it answered."""

    def __init__(self, how: str) -> None:
        super().__init__(CounterCode.FAILED, f"kinetod-counters has ended: {how}; its log has more")


class CounterLosses(msgspec.Struct, frozen=True, kw_only=True):
    """How a sampling ended. code: a CounterCode if it ended before it was stopped; reason: that, or what was lost.

    Empty reason: every sample is there. lost_ns: time in which the hardware's samples are missing.
    """

    code: str
    reason: str
    rows: int
    gaps: int
    lost_ns: int
    dropped_rows: int


class GpuList(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs, and what would measure them."""

    gpus: tuple[CounterDevice, ...]
    backend: str
    library_version: str


class CounterSession:
    """One GPU that is being sampled. `take` and `status` by one thread; the rest on the event loop."""

    def __init__(self, connection: "_Connection", started: messages.SamplingStarted, ring: RingReader) -> None:
        self.gpu = started.gpu
        self.plan: CounterPlan = started.plan
        self.backend = clean(started.backend, 64)
        self.library_version = clean(started.library_version, 64)
        self.interval_ns = started.interval_ns
        self.take = ring.take
        self.status = ring.status
        self.request_stop = ring.stop
        self._ring = ring
        self._connection = connection
        self._asked_to_stop = False

    def gone(self) -> bool:
        """Whether kinetod-counters has ended meanwhile."""
        return self._connection.hung_up()

    async def stop(self) -> None:
        """Ends the sampling; afterwards the ring has its last row. Raises nothing: `verdict` tells the rest."""
        self._asked_to_stop = True
        self.request_stop()
        with contextlib.suppress(CounterError):
            await self._connection.ask(messages.StopSampling(), STOP_S)
        self._connection.close()

    def verdict(self) -> CounterLosses:
        """How it goes, or went once `stop` has returned and all rows are taken."""
        try:
            status = self.status()
        except RingError as exc:
            failed = CounterCode.FAILED
            return CounterLosses(code=failed, reason=str(exc), rows=0, gaps=0, lost_ns=0, dropped_rows=0)
        code, reason = self._end(status)
        return CounterLosses(
            code=code,
            reason="; ".join(filter(None, (reason, *_lost(status)))),
            rows=status.written,
            gaps=status.gaps,
            lost_ns=status.lost_ns,
            dropped_rows=status.dropped,
        )

    def _end(self, status: RingStatus) -> tuple[str, str]:
        if status.ended and status.end == ERROR:
            text = clean(f"{status.failed_call}: {status.failure} ({status.failed_result})", 300)
            return CounterCode.FAILED, f"the counters end early: {text}"
        if status.ended and status.end == TOO_LONG:
            return CounterCode.FAILED, "the counters end early: the longest duration of a sampling is over"
        if not status.ended and (self._asked_to_stop or self.gone()):
            return CounterCode.FAILED, "kinetod-counters has ended or does not answer; samples since then are missing"
        return "", ""

    def close(self) -> None:
        """Lets go of the ring. No other thread may be using it."""
        self._connection.close()
        self._ring.close()


def _lost(status: RingStatus) -> Sequence[str]:
    lost = []
    if status.gaps:
        lost.append(f"samples of {status.lost_ns / 1e6:.1f} ms are missing, in {times(status.gaps, 'place')}")
    if status.dropped:
        dropped = times(status.dropped, "sample was", "samples were")
        lost.append(f"{dropped} dropped because they were not stored fast enough")
    if status.disordered:
        lost.append(f"{times(status.disordered, 'sample')} had impossible times")
    return lost


class CounterClient:
    """Asks kinetod-counters."""

    def __init__(self, connections: SamplerConnections, *, answer_s: float = ANSWER_S) -> None:
        self._connections = connections
        self._answer_s = answer_s

    def pids(self) -> set[int]:
        """The daemon's own kinetod-counters, if it runs."""
        return self._connections.pids()

    async def stop(self) -> None:
        """Ends what was started."""
        await self._connections.stop()

    async def problem(self) -> str:
        """Why kinetod-counters does not answer; empty: it does. No driver is asked."""
        try:
            connection, said, descriptor = await self._exchange(messages.StopSampling())
        except CounterError as exc:
            return exc.reason
        connection.close()
        _close(descriptor)
        return "" if isinstance(said, messages.SamplingStopped) else _refusal(said).reason

    async def gpus(self) -> GpuList:
        """Every GPU that could be measured, and why others cannot."""
        said = await self._ask(messages.ListGpus(), messages.GpusReply)
        gpus = tuple(map(_shown, said.gpus))
        return GpuList(gpus=gpus, backend=clean(said.backend, 64), library_version=clean(said.library_version, 64))

    async def base_metrics(self, uuid: str) -> list[str]:
        """What a GPU has."""
        said = await self._ask(messages.ListBaseMetrics(gpu=uuid), messages.BaseMetricsReply)
        return [clean(name, 128) for name in said.names]

    async def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """What would be sampled."""
        question = messages.PlanSampling(gpu=uuid, set_name=wanted.set_name, metrics=wanted.metrics)
        return (await self._ask(question, messages.PlanReply)).plan

    async def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, *, most_ns: int = MOST_DURATION_NS
    ) -> CounterSession:
        """Begins to sample a GPU; samples come when this returns. interval_ns: 0: the GPU's default."""
        if interval_ns:
            check_interval(interval_ns)
        if not _UUID.fullmatch(uuid):
            raise CounterError(CounterCode.UNAVAILABLE, f"{clean(uuid, 64)!r} is not the UUID of a GPU")
        question = messages.StartSampling(
            gpu=uuid, interval_ns=interval_ns, most_ns=most_ns, set_name=wanted.set_name, metrics=wanted.metrics
        )
        connection, said, descriptor = await self._exchange(question)
        try:
            if not isinstance(said, messages.SamplingStarted) or descriptor is None:
                _close(descriptor)
                raise _refusal(said)
            try:
                ring = RingReader(descriptor, len(said.plan.metrics))
            except (RingError, OSError, NativeLibraryError) as exc:
                raise CounterError(CounterCode.FAILED, f"GPU {uuid}: {exc}") from exc
        except BaseException:
            connection.close()
            raise
        return CounterSession(connection, said, ring)

    async def _ask(self, question: messages.CounterRequest, wanted: type[Said]) -> Said:
        connection, said, descriptor = await self._exchange(question)
        connection.close()
        _close(descriptor)
        if not isinstance(said, wanted):
            raise _refusal(said)
        return said

    async def _exchange(
        self, question: messages.CounterRequest
    ) -> tuple["_Connection", messages.CounterAnswer, int | None]:
        """Asks on a new connection, which is the caller's like the descriptor; once more if the process had ended."""
        for last in (False, True):
            connection = _Connection(await self._connections.connect())
            try:
                return connection, *(await connection.ask(question, self._answer_s))
            except SamplerEndedError:
                connection.close()
                if last:
                    raise
            except BaseException:
                connection.close()
                raise
        raise AssertionError


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def close(self) -> None:
        self._sock.close()

    def hung_up(self) -> bool:
        """Whether the other side is gone. It says nothing unasked."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def ask(self, asked: messages.CounterRequest, within_s: float) -> tuple[messages.CounterAnswer, int | None]:
        """The answer and its descriptor, which the caller owns."""
        if self._sock.fileno() < 0:
            raise CounterError(CounterCode.FAILED, "the connection to kinetod-counters is closed")
        fds: list[int] = []
        try:
            async with asyncio.timeout(within_s):
                await asyncio.get_running_loop().sock_sendall(self._sock, messages.encode(asked))
                packet, fds = await receive(self._sock, messages.MAX_ANSWER_BYTES + 1)
            if not packet:
                raise SamplerEndedError("it hung up")
            said = messages.answer(packet)
            return said, fds.pop() if len(fds) == 1 else None
        except TimeoutError as exc:
            reason = f"kinetod-counters did not answer within {within_s:g} s"
            raise CounterError(CounterCode.FAILED, reason) from exc
        except OSError as exc:
            raise SamplerEndedError(exc.strerror or str(exc)) from exc
        except messages.BadCounterMessage as exc:
            raise CounterError(CounterCode.FAILED, f"kinetod-counters: {exc}") from exc
        finally:
            for fd in fds:
                os.close(fd)


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _refusal(said: messages.CounterAnswer) -> CounterError:
    if not isinstance(said, messages.CountersRefused):
        return CounterError(CounterCode.FAILED, "kinetod-counters gave an unexpected answer")
    known = said.code in {each.value for each in CounterCode}
    return CounterError(CounterCode(said.code) if known else CounterCode.FAILED, clean(said.reason, 2000))


def _shown(gpu: CounterDevice) -> CounterDevice:
    texts = {name: clean(getattr(gpu, name), 500) for name in ("uuid", "name", "chip", "pci_bus_id", "code", "problem")}
    return msgspec.structs.replace(gpu, **texts)
