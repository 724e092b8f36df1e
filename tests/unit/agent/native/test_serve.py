"""The collector served by packets from a C program: all that collector_binding.Collector does, and how it ends."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.agent.arenas import ArenaReader
from support.machine import native
from support.targets.fake_program import FakeProgram, sockets
from support.waiting import scaled, until

pytest.importorskip("kinetod", reason="the daemon's half is not for this Python")

from kineto_agent.sources.cupti import collector_binding, cuda_devices
from kineto_agent.sources.cupti.collector_binding import CollectorConfig
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.native_interface import EnableResult
from kinetod.attach.channel.remote_collector import RemoteCollector

KERNEL, MEMSET = 10, 2
LIMIT_MS = 20_000  # the threads of the program get to run within it, however busy the machine is
CONFIG = CollectorConfig(
    buffer_limit_bytes=16 << 20,
    buffer_bytes=1 << 20,
    strings_bytes=1 << 20,
    prefault_bytes=1 << 20,
    flush_period_ms=20,
    kernel_name_offset=104,
    may_decline=1,
)


class Program(FakeProgram):
    """The fake server with a collector's thread, and the collector at our end of its socket."""

    def __init__(self) -> None:
        super().__init__(served=True)
        self.ends = 0
        self.remote = RemoteCollector(self.channel, self._on_end)

    def _on_end(self) -> None:
        self.ends += 1

    def begin(self) -> int:
        """Record kernels; gives the arena."""
        self.remote.open(str(native.fake_cupti()))
        arena = self.remote.prepare(CONFIG)
        assert self.remote.subscribe() == 0
        assert self.remote.start([KERNEL]).code == 0
        return arena


@pytest.fixture
def program() -> Iterator[Program]:
    with Program() as started:
        yield started


def test_kernels_of_a_program_without_python_arrive(program: Program) -> None:
    with ArenaReader(program.begin()) as reader:
        until(lambda: program.remote.counts().records > 100, "there are records")
        stopped = program.remote.stop(LIMIT_MS)
        records, names = reader.records(), reader.strings()
    assert (stopped.timed_out, stopped.counts.dropped) == (0, 0)
    assert len(records[KERNEL]) == stopped.counts.records > 100
    assert "void infer<float>(float const*)" in names.values()


def test_calls_are_recorded_through_the_subscriber(program: Program) -> None:
    remote = program.remote
    remote.open(str(native.fake_cupti()))
    with ArenaReader(remote.prepare(CONFIG)) as reader:
        remote.keep_calls(2, ["cudaLaunch*"])
        assert remote.subscribe() == 0
        remote.start([KERNEL])
        assert remote.record_calls() == ""
        until(lambda: remote.counts().records > 20, "there are records")
        remote.stop(LIMIT_MS)
        assert {5, KERNEL} <= set(reader.records())


def test_cupti_is_detached_at_the_next_call(program: Program) -> None:
    program.begin()
    program.remote.stop(LIMIT_MS)
    assert program.remote.detach(LIMIT_MS).outcome == 0
    program.remote.close()
    assert "finalized 1 misused 0" in program.ask("counts")


def test_a_second_recording_follows_the_first(program: Program) -> None:
    for _ in range(2):
        program.begin()
        until(lambda: program.remote.counts().records > 10, "there are records")
        program.remote.stop(LIMIT_MS)
        program.remote.detach(LIMIT_MS)
        program.remote.close()
    assert "finalized 2 misused 0" in program.ask("counts")


def test_devices_are_described(program: Program) -> None:
    found = cuda_devices.describe(program.remote.device)
    assert found["cuda_driver_version"] == 13000
    (device,) = found["devices"]
    assert (device["name"], device["numSms"], device["totalGlobalMem"]) == ("Fake H200", 132, 141 << 30)


def test_a_driver_that_cannot_be_asked_about_its_work_is_no_hindrance(program: Program) -> None:
    assert program.remote.drain(300).outcome == collector_binding.UNKNOWN


def test_a_first_call_that_stands_is_told_as_one(program: Program) -> None:
    program.remote.open(str(native.fake_cupti()))
    program.remote.prepare(CONFIG)
    assert program.ask("set enter_delay_ms 1000000") == "set enter_delay_ms 1000000"
    with pytest.raises(SourceError, match="CUPTI's first call has not returned"):
        program.remote.subscribe()
    program.ask("set enter_delay_ms 0")


def test_leaving_ends_a_recording_and_the_thread(program: Program) -> None:
    program.begin()
    assert program.serves()
    program.remote.leave()
    until(lambda: not program.serves(), "the thread has ended")
    assert "finalized 1 misused 0" in program.ask("counts")
    assert not sockets(program.process.pid)


def test_the_end_of_the_socket_ends_a_recording_and_the_thread(program: Program) -> None:
    program.begin()
    program.channel.close()
    until(lambda: not program.serves(), "the thread has ended")
    assert "finalized 1 misused 0" in program.ask("counts")


def test_without_a_cuda_call_it_goes_nevertheless(program: Program) -> None:
    program.begin()
    assert program.ask("pause") == "pause"
    program.channel.close()
    until(lambda: not program.serves(), "the thread has ended")
    assert "finalized 0" in program.ask("counts")


def test_a_forked_child_does_not_hold_the_socket(program: Program) -> None:
    program.begin()
    child = int(program.ask("fork"))
    try:
        until(lambda: not sockets(child), "the child has closed the socket")
        program.process.kill()
        program.process.wait()
        assert program.remote.counts().records == 0
        assert program.remote.ended == "its collector's thread has ended"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_program_that_exits_during_a_recording_exits_normally(program: Program) -> None:
    with ArenaReader(program.begin()) as reader:
        until(lambda: program.remote.counts().records > 10, "there are records")
        assert program.ask("exit") == ""
        assert program.process.wait(scaled(10)) == 0
        assert len(reader.records()[KERNEL]) > 10


def test_a_killed_program_is_an_end_and_no_error(program: Program) -> None:
    program.begin()
    program.process.kill()
    program.process.wait()
    assert program.remote.stop(100).timed_out == 1
    assert program.remote.start([KERNEL]) == EnableResult(-2, {KERNEL: 0}, "its collector's thread has ended")
    program.remote.close()
    with pytest.raises(SourceError, match="can no longer be recorded: its collector's thread has ended"):
        program.remote.open("/nowhere")
    assert program.ends == 1


def test_refusals_have_their_words(program: Program) -> None:
    with pytest.raises(SourceError, match=r"cannot open /nowhere/libcupti\.so") as caught:
        program.remote.open("/nowhere/libcupti.so")
    assert caught.value.reason_code == "CUPTI_LIBRARY"
    with pytest.raises(SourceError, match="not open, or a recording is still open") as caught:
        program.remote.prepare(CONFIG)
    assert caught.value.reason_code == "CUPTI_BUSY"
    program.remote.open(str(native.fake_cupti()))
    assert program.remote.result_text(39) == "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)"


def test_sizes_that_cannot_be_are_refused(program: Program) -> None:
    program.remote.open(str(native.fake_cupti()))
    for sizes in ((0, 0), (1 << 40, 0), (5000, 0), (4096, 1 << 40)):
        with pytest.raises(SourceError, match="sizes of buffers out of range"):
            program.remote.prepare(CollectorConfig(buffer_bytes=sizes[0], strings_bytes=sizes[1]))


@pytest.mark.parametrize(
    ("command", "argument"),
    [
        (0, b""),
        (99, b""),
        (2, b""),
        (2, b"lib\0cupti"),
        (2, b"x" * 5000),
        (3, b"short"),
        (4, b""),
        (4, b"\2\0\0\0"),
        (4, b"\2\0\0\0cuda*"),
        (4, b"\2\0\0\0cuda*\0"),
        (8, b"odd"),
        (8, b"\1\0\0\0" * 17),
        (10, b""),
        (11, b"12345678"),
        (13, b""),
        (14, b""),
        (14, b"\0" * 7),
        (14, b"\0" * 400),
        (17, b""),
        (17, b"\0" * 16),
    ],
)
def test_a_request_with_a_wrong_argument_is_refused_and_the_next_is_served(
    program: Program, command: int, argument: bytes
) -> None:
    program.channel.setblocking(True)
    program.channel.recv(8192)  # the greeting
    program.channel.send(struct.pack("=4sII", b"KSRQ", command, 7) + argument)
    code = struct.unpack_from("=4sIIi", program.channel.recv(8192))[3]
    assert code == -4
    assert cuda_devices.describe(program.remote.device)["devices"]


@pytest.mark.parametrize("packet", [b"x", b"KSRQ", b"XXXX" + bytes(8), b"KSRQ" + bytes(9000)])
def test_nonsense_ends_the_connection_and_nothing_else(program: Program, packet: bytes) -> None:
    program.begin()
    program.channel.setblocking(True)
    program.channel.send(packet)
    until(lambda: not program.serves(), "the thread has ended")
    assert "finalized 1 misused 0" in program.ask("counts")


def test_a_second_server_in_one_process_is_refused() -> None:
    code = (
        "import ctypes, socket, sys, threading\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "c, d = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "thread = threading.Thread(target=library.kc_serve, args=(b.detach(),))\n"
        "thread.start()\n"
        "assert a.recv(100)[:4] == b'KSAN'\n"
        "assert library.kc_serve(d.detach()) == -4\n"
        "assert c.recv(100) == b''\n"
        "a.close()\n"
        "thread.join()\n"
        "assert library.kc_serve(0) == -2\n"
        "print('ok')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(native.collector())],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=scaled(30),
    )
    assert (done.stdout, done.stderr) == ("ok\n", "")
