"""Implements collector_binding.Collector for another process, by packets to its kc_serve (remote/serve.h).

Theory of operation
    One packet out, one packet back, under a lock, each with a time limit. The other process is not trusted: an answer
    that is not exactly what was asked for ends the connection. After that, and after a time-out, every call fails
    like a collector that has nothing to record, and `on_end` has been called once.
"""

import ctypes
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple, TypeVar

from kineto_agent.sources.cupti import cuda_devices
from kineto_agent.sources.cupti.collector_binding import (
    LONG_SETTLE_MS,
    Collector,
    CollectorConfig,
    CollectorResult,
    DetachResult,
    DrainResult,
    DrainWish,
    OtherUsers,
    busy,
)
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.native_interface import EnableResult, NativeCounts

from kinetod.base.unix_sockets import DESCRIPTORS_SPACE, descriptors

_REQUEST = struct.Struct("=4sII")  # magic, command, sequence
_ANSWER = struct.Struct("=4sIIiII")  # magic, command, sequence, code, result bytes, text bytes
_REQUEST_MAGIC, _ANSWER_MAGIC = b"KSRQ", b"KSAN"
_PACKET_BYTES = 8192
_INT, _UINT = struct.Struct("=i"), struct.Struct("=I")

(
    _ABI, _OPEN, _PREPARE, _KEEP_CALLS, _SUBSCRIBE, _RECORD_CALLS, _YIELD, _START, _COUNTS, _STOP, _DETACH, _CLOSE,
    _RESULT_TEXT, _DEVICE, _LEAVE, _OTHERS, _DRAIN,
) = range(1, 18)  # fmt: skip

_LIMIT_S = 10.0  # enough to open a library and back an arena with memory on a busy machine
_SYSTEM, _BUSY = -2, -6
_NOT_ASKED = -1
_ENDED = "its collector's thread has ended"

_Struct = TypeVar("_Struct", bound=ctypes.Structure)


class RemoteEnded(Exception):
    """The process or its collector's thread is gone, or breaks the protocol. The message says which."""


class _Answer(NamedTuple):
    code: int
    result: bytes
    text: str
    fd: int  # -1: none


def _parsed(packet: bytes) -> tuple[int, int, int, bytes, str]:
    """Returns command, sequence, code, result and text. Raises RemoteEnded."""
    if len(packet) < _ANSWER.size:
        raise RemoteEnded(f"its collector sent a packet of {len(packet)} bytes")
    magic, command, sequence, code, result_bytes, text_bytes = _ANSWER.unpack_from(packet)
    if magic != _ANSWER_MAGIC or _ANSWER.size + result_bytes + text_bytes != len(packet):
        raise RemoteEnded("its collector sent a packet that is not a valid reply")
    body = packet[_ANSWER.size :]
    return command, sequence, code, body[:result_bytes], body[result_bytes:].decode("utf-8", "replace")


def read_greeting(packet: bytes) -> None:
    """Checks the first packet of kc_serve. Raises RemoteEnded if it is no greeting or has another version."""
    command, sequence, code, result, text = _parsed(packet)
    if command != _ABI or sequence != 0 or len(result) != _UINT.size:
        raise RemoteEnded("its collector sent no greeting")
    if code != 0:
        raise RemoteEnded(text or f"its collector refused with error {code}")
    _check_abi(result)


def _check_abi(result: bytes) -> None:
    (abi,) = _UINT.unpack(result)
    if abi != Collector.ABI:
        versions = f"interface version {abi}, but this daemon needs version {Collector.ABI}"
        raise RemoteEnded(f"its collector has {versions}: restart the process")


class RemoteCollector(Collector):
    """The collector at the other end of `channel`, which this object owns. Raises SourceError with the collector's
    reason.

    on_end: called once, on the calling thread, if the connection ends unexpectedly.
    """

    def __init__(self, channel: socket.socket, on_end: Callable[[], None] = lambda: None) -> None:
        self._channel = channel
        self._channel.setblocking(False)
        self._on_end = on_end
        self._lock = Lock()
        self._sequence = 0
        self._why = ""  # why it has ended
        self._arena_fd = -1

    @property
    def ended(self) -> str:
        """Returns why the collector can no longer be used; "" while it can."""
        return self._why

    def fileno(self) -> int:
        """Descriptor that becomes readable when the other end closes."""
        return self._channel.fileno()

    # ------------------------------------------------------------ packets

    def _ask(self, command: int, argument: bytes = b"", limit_s: float = _LIMIT_S, size: int | None = None) -> _Answer:
        """Sends one command and returns the answer. size: bytes of the result. Raises RemoteEnded."""
        with self._lock:
            if self._why:
                raise RemoteEnded(self._why)
            try:
                return self._exchange(command, argument, time.monotonic() + limit_s, size)
            except (RemoteEnded, OSError) as exc:
                self._why = _ENDED if isinstance(exc, ConnectionError) else str(exc)
                self._channel.close()
                reason = self._why
        self._on_end()
        raise RemoteEnded(reason)

    def _exchange(self, command: int, argument: bytes, deadline: float, size: int | None) -> _Answer:
        self._sequence = self._sequence % 0xFFFFFFFF + 1
        self._wait(select.POLLOUT, deadline)
        self._channel.send(_REQUEST.pack(_REQUEST_MAGIC, command, self._sequence) + argument, socket.MSG_NOSIGNAL)
        while True:
            self._wait(select.POLLIN, deadline)
            packet, ancillary, flags, _ = self._channel.recvmsg(
                _PACKET_BYTES, DESCRIPTORS_SPACE, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
            answer = self._checked(packet, descriptors(ancillary), flags, command)
            if answer is not None:
                if size is not None and len(answer.result) not in (0, size):
                    raise RemoteEnded(f"its collector sent a result of {len(answer.result)} bytes instead of {size}")
                return answer

    def _checked(self, packet: bytes, fds: list[int], flags: int, command: int) -> _Answer | None:
        """Returns the answer; None for the greeting."""
        try:
            if not packet:
                raise RemoteEnded(_ENDED)
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise RemoteEnded("its collector sent more than was asked for")
            theirs, sequence, code, result, text = _parsed(packet)
            if sequence == 0:
                read_greeting(packet)
                return None
            if (theirs, sequence) != (command, self._sequence):
                raise RemoteEnded("its collector replied to a different request")
            if len(fds) > 1 or (fds and (command != _PREPARE or code != 0)):
                raise RemoteEnded("its collector sent descriptors that were not asked for")
            return _Answer(code, result, text, fds.pop() if fds else -1)
        finally:
            for fd in fds:
                os.close(fd)

    def _wait(self, event: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(self._channel, event)
        if not poller.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise RemoteEnded("its collector is not responding")

    def _asked(self, command: int, argument: bytes = b"", size: int = 0) -> _Answer:
        """Like _ask, for calls that must succeed. Raises SourceError."""
        try:
            answer = self._ask(command, argument, size=size)
        except RemoteEnded as exc:
            raise SourceError("COLLECTOR_GONE", f"the process can no longer be recorded: {exc}") from exc
        if answer.code < 0:
            raise SourceError(self.REASONS.get(answer.code, "SOURCE_FAILED"), answer.text or f"error {answer.code}")
        if len(answer.result) != size:
            raise SourceError("SOURCE_FAILED", "the collector returned no result")
        return answer

    def _quietly(self, command: int, argument: bytes = b"", size: int = 0, limit_s: float = _LIMIT_S) -> _Answer:
        """Like _ask, but returns an empty answer if the collector is gone."""
        try:
            return self._ask(command, argument, limit_s, size)
        except RemoteEnded as exc:
            return _Answer(_SYSTEM, b"", str(exc), -1)

    def _structure(
        self, kind: type[_Struct], command: int, argument: bytes = b"", limit_s: float = _LIMIT_S
    ) -> _Struct:
        """Returns a result structure, zeros if there is none."""
        answer = self._quietly(command, argument, ctypes.sizeof(kind), limit_s)
        return kind.from_buffer_copy(answer.result) if answer.result else kind()

    # ------------------------------------------------------------ collector_binding.Collector

    def open(self, path: str) -> int:
        """Opens libcupti and returns its version number."""
        _check_abi_of(self)
        version: int = _UINT.unpack(self._asked(_OPEN, os.fsencode(path), _UINT.size).result)[0]
        return version

    def drain(self, limit_ms: int, streams: Sequence[int] = ()) -> DrainResult:
        """Waits, before prepare(), for a moment at which CUPTI's first call does not block on the GPU."""
        return self._structure(DrainResult, _DRAIN, bytes(DrainWish(limit_ms, LONG_SETTLE_MS, 0)))

    def prepare(self, config: CollectorConfig) -> int:
        """Creates the arena; returns a descriptor of ours for it, valid until close()."""
        answer = self._asked(_PREPARE, bytes(config))
        if answer.fd < 0:
            raise SourceError("ARENA_FAILED", "the collector returned no arena")
        self._close_arena()
        self._arena_fd = answer.fd
        return self._arena_fd

    def keep_calls(self, domain: int, patterns: Sequence[str]) -> None:
        """Chooses the API calls of a domain (1 driver, 2 runtime) to record, by fnmatch patterns."""
        joined = b"".join(pattern.encode() + b"\0" for pattern in patterns) + b"\0"
        self._asked(_KEEP_CALLS, _UINT.pack(domain) + joined)

    def subscribe(self) -> int:
        """Takes CUPTI's only subscriber; returns CUPTI's result: 39 if another tool has it. After prepare()."""
        answer = self._quietly(_SUBSCRIBE, size=_INT.size)
        result: int = _INT.unpack(answer.result)[0] if answer.result else _NOT_ASKED
        if answer.code == _BUSY:
            raise busy(result)  # then a kc_drain_outcome
        return result

    def others(self) -> OtherUsers:
        """Returns the other users of CUPTI; zeros when nothing is recorded."""
        return self._structure(OtherUsers, _OTHERS)

    def record_calls(self) -> str:
        """Records the chosen API calls through the subscriber; returns the reason if that fails. After start()."""
        answer = self._quietly(_RECORD_CALLS)
        return answer.text if answer.code < 0 else ""

    def yield_subscriber(self) -> None:
        """Releases the subscriber."""
        self._quietly(_YIELD)

    def start(self, kinds: Sequence[int]) -> EnableResult:
        """Starts the recording; never raises."""
        answer = self._quietly(_START, struct.pack(f"={len(kinds)}I", *kinds), _INT.size * len(kinds))
        results = struct.unpack(f"={len(kinds)}i", answer.result) if answer.result else (0,) * len(kinds)
        return EnableResult(answer.code, dict(zip(kinds, results, strict=True)), answer.text)

    def counts(self) -> NativeCounts:
        """Returns the records so far; zeros when nothing is recorded."""
        return self._structure(NativeCounts, _COUNTS)

    def stop(self, limit_ms: int) -> CollectorResult:
        """Ends the recording; zeros when nothing was recorded. If the process is gone or silent, `timed_out` is set."""
        result = self._structure(CollectorResult, _STOP, _UINT.pack(limit_ms), limit_ms / 1000 + _LIMIT_S)
        if self._why:
            result.timed_out = 1
        return result

    def detach(self, limit_ms: int) -> DetachResult:
        """Takes CUPTI out of the process at the end of its next CUDA call."""
        return self._structure(DetachResult, _DETACH, _UINT.pack(limit_ms), limit_ms / 1000 + _LIMIT_S)

    def close(self) -> None:
        """Frees the arena, unless CUPTI still uses it."""
        self._close_arena()
        self._quietly(_CLOSE)

    def result_text(self, result: int) -> str:
        """Returns CUPTI's own text for one of its results."""
        return self._quietly(_RESULT_TEXT, _INT.pack(result)).text

    # ------------------------------------------------------------ additions to it

    def device(self, index: int, attributes: bytes) -> bytes:
        """See Collector.device; b"" if the process is gone."""
        return self._quietly(_DEVICE, _UINT.pack(index) + attributes, cuda_devices.FACTS.size).result

    def leave(self, limit_s: float = _LIMIT_S) -> None:
        """Ends any recording, takes CUPTI out and ends the thread. Nothing can be asked afterwards."""
        self._quietly(_LEAVE, limit_s=limit_s)
        with self._lock:
            self._why = self._why or "the daemon has released its collector"
            self._channel.close()
        self._close_arena()

    def _close_arena(self) -> None:
        fd, self._arena_fd = self._arena_fd, -1
        if fd >= 0:
            os.close(fd)


def _check_abi_of(collector: RemoteCollector) -> None:
    try:
        _check_abi(collector._asked(_ABI, size=_UINT.size).result)
    except RemoteEnded as exc:
        raise SourceError("COLLECTOR_MISSING", str(exc)) from exc
