"""The daemon's half of a served collector does not trust the other: what it is not to answer ends the connection."""

import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from kineto_agent.sources.cupti import cuda_devices
from kineto_agent.sources.cupti.collector_binding import Collector, CollectorConfig
from kineto_agent.sources.interface import SourceError
from kinetod.attach.channel.remote_collector import RemoteCollector, RemoteEnded, read_greeting

ABI, PREPARE, COUNTS, DEVICE = 1, 3, 9, 14


def answer(command: int, sequence: int, *, code: int = 0, result: bytes = b"", text: bytes = b"") -> bytes:
    """A packet of kc_serve."""
    return struct.pack("=4sIIiII", b"KSAN", command, sequence, code, len(result), len(text)) + result + text


class Liar:
    """Answers each request with the next of its packets."""

    def __init__(self, *packets: bytes, fds: int = 0) -> None:
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends = 0
        self.remote = RemoteCollector(ours, self._on_end)
        self._packets, self._fds = packets, fds
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _on_end(self) -> None:
        self.ends += 1

    def _answer(self) -> None:
        for packet in self._packets:
            if not self._theirs.recv(8192):
                break
            socket.send_fds(self._theirs, [packet], [self._theirs.fileno()] * self._fds)

    def close(self) -> None:
        """End both sides."""
        self._theirs.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._theirs.close()
        self.remote.leave(1)


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    gc.collect()  # what other tests have left
    before = descriptors()
    yield
    assert descriptors() <= before


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"x", "a packet of 1 bytes"),
        (b"XXXX" + bytes(20), "a packet that is not a valid reply"),
        (answer(COUNTS, 1, result=bytes(24))[:-1], "a packet that is not a valid reply"),
        (answer(COUNTS, 1, result=bytes(8)), "a result of 8 bytes instead of 24"),
        (answer(COUNTS, 2, result=bytes(24)), "replied to a different request"),
        (answer(DEVICE, 1, result=bytes(24)), "replied to a different request"),
        (answer(COUNTS, 1, text=bytes(9000)), "more than was asked for"),
        (answer(COUNTS, 0, result=bytes(4)), "sent no greeting"),
        (
            answer(ABI, 0, result=struct.pack("=I", 99)),
            f"interface version 99, but this daemon needs version {Collector.ABI}",
        ),
        (answer(ABI, 0, code=-5, result=bytes(4), text=b"forked"), "forked"),
    ],
)
def test_a_wrong_answer_ends_the_connection_once(packet: bytes, why: str) -> None:
    liar = Liar(packet)
    assert (liar.remote.counts().records, liar.remote.counts().records) == (0, 0)
    assert why in liar.remote.ended
    assert liar.ends == 1
    liar.close()


@pytest.mark.parametrize("fds", [1, 2, 5])
def test_descriptors_that_nobody_asked_for_are_closed(fds: int) -> None:
    liar = Liar(answer(COUNTS, 1, result=bytes(24)), fds=fds)
    assert liar.remote.counts().records == 0
    assert "asked for" in liar.remote.ended
    liar.close()


def test_an_arena_is_closed_with_the_recording() -> None:
    liar = Liar(answer(PREPARE, 1), answer(12, 2), fds=1)
    arena = liar.remote.prepare(CollectorConfig())
    assert os.fstat(arena)
    liar.remote.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(arena)
    liar.close()


def test_a_prepared_recording_without_an_arena_is_refused() -> None:
    liar = Liar(answer(PREPARE, 1))
    with pytest.raises(SourceError, match="returned no arena"):
        liar.remote.prepare(CollectorConfig())
    liar.close()


def test_an_unknown_error_has_its_number() -> None:
    liar = Liar(answer(PREPARE, 1, code=-77))
    with pytest.raises(SourceError, match="error -77") as caught:
        liar.remote.prepare(CollectorConfig())
    assert caught.value.reason_code == "SOURCE_FAILED"
    liar.close()


def test_a_result_that_is_missing_is_an_error_where_it_is_needed() -> None:
    liar = Liar(answer(ABI, 1))
    with pytest.raises(SourceError, match="returned no result"):
        liar.remote.open("/lib.so")
    liar.close()


def test_devices_without_end_are_cut() -> None:
    facts = struct.pack(
        "=iiiIQ32i256s16sI4x", 2**31 - 1, 1, 2, 2**32 - 1, 5, *range(32), b"\xff" * 256, b"\xff" * 16, 9
    )
    liar = Liar(*(answer(DEVICE, number, result=facts) for number in range(1, 65)))
    found = cuda_devices.describe(liar.remote.device)
    assert len(found["devices"]) == 64
    assert (found["cuda_driver_version"], found["cuda_runtime_version"]) == (1, 2)
    assert set(found["devices"][0]["name"]) == {"\ufffd"}
    liar.close()


def test_silence_ends_after_its_time() -> None:
    liar = Liar()
    liar.remote.leave(0.05)
    assert liar.remote.ended == "its collector is not responding"
    liar.close()


def test_a_greeting_is_checked() -> None:
    read_greeting(answer(ABI, 0, result=struct.pack("=I", Collector.ABI)))
    with pytest.raises(RemoteEnded, match="sent no greeting"):
        read_greeting(answer(ABI, 1, result=struct.pack("=I", Collector.ABI)))
