"""The daemon's client of kinetod-counters: queries, samples, and tracks losses. Everything raises CounterError.

Theory of operation
    One connection for each query, and one for each sampled GPU, which lives as long as the sampling: closing it ends
    the sampling. Rows come through a ring in shared memory; the owner of the session takes them, in any one thread. The
    other side is not trusted: its answers are bounded and decoded strictly, its ring is checked in C.

    kinetod-counters may die at any moment. Rows that it has written can still be taken, and `verdict` says that it is
    gone.
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from kineto_trace.base.quantities import format_duration, times

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
from kinetod.supervise import child
from kinetod.supervise.child import WarmChild
from kinetod.supervise.helper_connection import connected

ANSWER_S = 30.0  # longer than the other side allows the driver
STOP_S = 10.0
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:.-]{0,63}")  # AMD's and Intel's may be PCI addresses
Said = TypeVar("Said", messages.GpusReply, messages.BaseMetricsReply, messages.PlanReply)
log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.counters", "--parent")
CONNECT_S = 20.0  # systemd may have to start the service first


class SamplerConnections(Protocol):
    """Source of connections."""

    async def connect(self) -> socket.socket:
        """Opens a new, non-blocking connection, which the caller owns. Raises CounterError."""

    def pids(self) -> set[int]:
        """Pid of our own process, if there is one."""

    async def stop(self) -> None:
        """Ends the process that was started."""


class CountersService:
    """The service that listens on `path`: root's, or our own user's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pids(self) -> set[int]:
        """Empty: the service belongs to another user."""
        return set()

    async def connect(self) -> socket.socket:
        """Connects."""
        try:
            async with asyncio.timeout(CONNECT_S):
                return await connected(self._path)
        except OSError as exc:  # a TimeoutError is one
            why = exc.strerror or str(exc) or "it is not responding"
            reason = f"kinetod-counters cannot be reached at {self._path}: {why}; is kinetod-counters.socket enabled?"
            raise CounterError(CounterCode.UNAVAILABLE, reason) from exc

    async def stop(self) -> None:
        """Does nothing: the service stays."""


class CountersChild:
    """A child of the daemon. It receives each connection as a descriptor, over a socket as its standard input."""

    def __init__(self, arguments: Sequence[str] = (), *, command: Sequence[str] = COMMAND) -> None:
        self._command = (*command, *arguments)
        self._lock = asyncio.Lock()
        self._child: WarmChild | None = None
        self._control: socket.socket | None = None

    def pids(self) -> set[int]:
        """The child, if it runs."""
        running = self._child
        return set() if running is None or running.process.returncode is not None else {running.process.pid}

    async def connect(self) -> socket.socket:
        """Starts the child if there is none."""
        async with self._lock:
            for _ in range(2):  # an idle child may have ended just now
                control = await self._started()
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
                with theirs:
                    try:
                        socket.send_fds(control, [b"\0"], [theirs.fileno()], socket.MSG_NOSIGNAL)
                    except OSError:
                        ours.close()
                        await self._end()
                        continue
                ours.setblocking(False)
                return ours
        raise CounterError(CounterCode.FAILED, "kinetod-counters exits as soon as it is started; see the daemon's log")

    async def _started(self) -> socket.socket:
        if self._child is not None and self._child.process.returncode is not None:
            await self._end()
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            with theirs:
                try:
                    process = await asyncio.create_subprocess_exec(
                        *self._command, stdin=theirs.fileno(), stdout=DEVNULL, stderr=PIPE
                    )
                except OSError as exc:
                    ours.close()
                    reason = f"kinetod-counters cannot be started: {exc.strerror}"
                    raise CounterError(CounterCode.FAILED, reason) from exc
            ours.setblocking(False)
            self._control, self._child = ours, WarmChild(process, log, "kinetod-counters")
        return self._control

    async def _end(self) -> None:
        control, self._control = self._control, None
        running, self._child = self._child, None
        if control is not None:
            control.close()
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                await running.stop(kill=False)

    async def stop(self) -> None:
        """Ends the child."""
        async with self._lock:
            await self._end()


class SamplerEndedError(CounterError):
    """kinetod-counters ended before it answered."""

    def __init__(self, how: str) -> None:
        super().__init__(CounterCode.FAILED, f"kinetod-counters has ended: {how}; see its log")


class CounterLosses(msgspec.Struct, frozen=True, kw_only=True):
    """How a sampling ended. code: a CounterCode if it ended before it was stopped; reason: why, or what was lost.

    Empty reason: no sample is missing. lost_ns: total time without samples from the hardware.
    """

    code: str
    reason: str
    rows: int
    gaps: int
    lost_ns: int
    dropped_rows: int


class GpuList(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs, and the backend that would measure them."""

    gpus: tuple[CounterDevice, ...]
    backend: str
    library_version: str


class CounterSession:
    """One GPU that is being sampled. Call `take` and `status` in one thread, the rest on the event loop."""

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
        """Whether kinetod-counters has ended."""
        return self._connection.hung_up()

    async def stop(self) -> None:
        """Ends the sampling; afterwards the ring has its last row. Raises nothing: `verdict` reports errors."""
        self._asked_to_stop = True
        self.request_stop()
        with contextlib.suppress(CounterError):
            await self._connection.ask(messages.StopSampling(), STOP_S)
        self._connection.close()

    def verdict(self) -> CounterLosses:
        """The losses so far; final once `stop` has returned and all rows are taken."""
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
            return CounterCode.FAILED, f"sampling ended early: {text}"
        if status.ended and status.end == TOO_LONG:
            return CounterCode.FAILED, "sampling ended early: the maximum duration was reached"
        if not status.ended and (self._asked_to_stop or self.gone()):
            return CounterCode.FAILED, "kinetod-counters has ended or is not responding; later samples are missing"
        return "", ""

    def close(self) -> None:
        """Releases the ring. No other thread may be using it."""
        self._connection.close()
        self._ring.close()


def _lost(status: RingStatus) -> Sequence[str]:
    lost = []
    if status.gaps:
        lost.append(f"{format_duration(status.lost_ns)} of samples are missing, in {times(status.gaps, 'place')}")
    if status.dropped:
        dropped = times(status.dropped, "sample was", "samples were")
        lost.append(f"{dropped} dropped because they were not stored fast enough")
    if status.disordered:
        lost.append(f"{times(status.disordered, 'sample')} had impossible timestamps")
    return lost


class CounterClient:
    """Client of kinetod-counters."""

    def __init__(self, connections: SamplerConnections, *, answer_s: float = ANSWER_S) -> None:
        self._connections = connections
        self._answer_s = answer_s

    def pids(self) -> set[int]:
        """The daemon's own kinetod-counters, if it runs."""
        return self._connections.pids()

    async def stop(self) -> None:
        """Ends the process that was started."""
        await self._connections.stop()

    async def problem(self) -> str:
        """Why kinetod-counters does not answer; empty if it does. Does not call any driver."""
        try:
            connection, said, descriptor = await self._exchange(messages.StopSampling())
        except CounterError as exc:
            return exc.reason
        connection.close()
        _close(descriptor)
        return "" if isinstance(said, messages.SamplingStopped) else _refusal(said).reason

    async def gpus(self) -> GpuList:
        """Every GPU that can be measured, and why others cannot."""
        said = await self._ask(messages.ListGpus(), messages.GpusReply)
        gpus = tuple(map(_shown, said.gpus))
        return GpuList(gpus=gpus, backend=clean(said.backend, 64), library_version=clean(said.library_version, 64))

    async def base_metrics(self, uuid: str) -> list[str]:
        """The metrics of a GPU."""
        said = await self._ask(messages.ListBaseMetrics(gpu=uuid), messages.BaseMetricsReply)
        return [clean(name, 128) for name in said.names]

    async def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """What would be sampled."""
        question = messages.PlanSampling(gpu=uuid, set_name=wanted.set_name, metrics=wanted.metrics)
        return (await self._ask(question, messages.PlanReply)).plan

    async def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, *, most_ns: int = MOST_DURATION_NS
    ) -> CounterSession:
        """Starts sampling a GPU; samples arrive once this returns. interval_ns: 0: the GPU's default."""
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
        """Sends a request on a new connection; the caller owns it and the descriptor. Tries once more if the process
        had ended.
        """
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
        """Whether the other side is gone. It never sends unasked."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def ask(self, asked: messages.CounterRequest, within_s: float) -> tuple[messages.CounterAnswer, int | None]:
        """Returns the answer and its descriptor, which the caller owns."""
        if self._sock.fileno() < 0:
            raise CounterError(CounterCode.FAILED, "the connection to kinetod-counters is closed")
        fds: list[int] = []
        try:
            async with asyncio.timeout(within_s):
                await asyncio.get_running_loop().sock_sendall(self._sock, messages.encode(asked))
                packet, fds = await receive(self._sock, messages.MAX_ANSWER_BYTES + 1)
            if not packet:
                raise SamplerEndedError("it closed the connection")
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
        return CounterError(CounterCode.FAILED, "kinetod-counters sent an unexpected answer")
    known = said.code in {each.value for each in CounterCode}
    return CounterError(CounterCode(said.code) if known else CounterCode.FAILED, clean(said.reason, 2000))


def _shown(gpu: CounterDevice) -> CounterDevice:
    texts = {name: clean(getattr(gpu, name), 500) for name in ("uuid", "name", "chip", "pci_bus_id", "code", "problem")}
    return msgspec.structs.replace(gpu, **texts)
