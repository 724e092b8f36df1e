"""Calls that the kernel lets fail with EINTR after any stop, in a program of one thread."""

import contextlib
import os
import platform
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, Bootstrap, Deadline
from kinetod.attach.inject import thread_policy
from kinetod.attach.inject.ptrace import StoppedThread, in_own_thread
from kinetod.attach.inspect.target_image import Mapping, TargetImage
from kinetod.attach.methods.native_thread import NativeThread
from support.targets import attach_steps
from support.waiting import scaled, until

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the others keep the EINTR")
STOPS = 5
PROGRAM = """
import ctypes, errno, os, select, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
signals, room, limit = ctypes.byref(ctypes.c_ulong(1 << signal.SIGUSR2 - 1)), ctypes.create_string_buffer(64), None
if sys.argv[2:]: limit = ctypes.byref((ctypes.c_long * 2)(3600, 0))
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
ours, theirs = socket.socketpair()
ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(limit._obj) if limit else bytes(16))
epoll, ms, context = select.epoll(), 3600000 if limit else -1, ctypes.c_ulong()
libc.syscall(206, 4, ctypes.byref(context))
semaphore = libc.semget(0, 1, 0o600)
calls = {
    "rt_sigtimedwait": (128, signals, None, limit, 8),
    "epoll_wait": (232, epoll.fileno(), room, 1, ms),
    "semtimedop": (220, semaphore, (ctypes.c_short * 3)(0, -1, 0), 1, limit),
    "io_getevents": (208, context, ctypes.c_long(1), ctypes.c_long(1), room, limit),
    "recvfrom": (45, ours.fileno(), room, ctypes.c_long(1), 0, None, None),
    "read": (0, ours.fileno(), room, ctypes.c_long(1)),
}
print("up", flush=True)
result = libc.syscall(*calls[sys.argv[1]])
failed = errno.errorcode.get(ctypes.get_errno()) if result < 0 else result
libc.semctl(semaphore, 0, 0)
print(failed, flush=True)
"""
NUMBERS = {"rt_sigtimedwait": 128, "epoll_wait": 232, "semtimedop": 220, "io_getevents": 208, "recvfrom": 45, "read": 0}


@contextmanager
def standing_in(name: str, *limited: str, program: str = PROGRAM) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", program, name, *limited]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            until(lambda: stands(process, name), f"it stands in {name}")
            yield process
        finally:
            process.kill()


def stands(process: "subprocess.Popen[str]", name: str) -> bool:
    with contextlib.suppress(OSError):  # it ends
        return Path(f"/proc/{process.pid}/syscall").read_text().startswith(f"{NUMBERS[name]} ")
    return False


def stop(pid: int, number: int = 0) -> None:
    def work() -> None:
        with StoppedThread(pid, pid):
            os.kill(pid, number)

    in_own_thread(work)


@pytest.mark.parametrize("limited", [(), ("limited",)], ids=["for good", "with a time limit"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_stop_does_not_interrupt_it(name: str, limited: tuple[str, ...]) -> None:
    with standing_in(name, *limited) as process:
        for _ in range(STOPS):
            stop(process.pid)
            until(lambda: stands(process, name) or process.poll() is not None, "it goes on")
            assert process.poll() is None, process.communicate()


def test_a_signal_that_comes_during_the_stop_interrupts_it() -> None:
    with standing_in("rt_sigtimedwait") as process:
        stop(process.pid, signal.SIGUSR1)
        assert process.stdout is not None
        assert process.stdout.readline() == "EINTR\n"


def test_a_signal_that_it_waits_for_and_that_comes_during_the_stop_is_received() -> None:
    with standing_in("rt_sigtimedwait") as process:
        stop(process.pid, signal.SIGUSR2)
        assert process.stdout is not None
        assert process.stdout.readline() == f"{signal.SIGUSR2:d}\n"


def enter(process: "subprocess.Popen[str]") -> None:
    reader, writer = os.pipe()
    try:
        path = f"/proc/{os.getpid()}/fd/{writer}"
        source = f"p = modules['posix']\nd = p.open({path!r}, p.O_WRONLY)\np.write(d, b'x')\np.close(d)\n"
        # Its main thread does not return from the call, so the new thread needs no turn of its.
        NativeThread().hand_over(TargetImage(process.pid), Bootstrap(1, source.encode()), Deadline(scaled(30)))
        assert select.select([reader], [], [], scaled(30))[0]
    finally:
        os.close(reader)
        os.close(writer)


def test_a_program_that_only_waits_for_signals_can_be_entered() -> None:
    with standing_in("rt_sigtimedwait") as process:
        enter(process)
        until(lambda: stands(process, "rt_sigtimedwait"), "it goes on")
        assert process.poll() is None


def test_an_event_loop_that_waits_for_a_timer_can_be_entered_and_waits_for_the_time_that_is_left() -> None:
    with standing_in(
        "epoll_wait", program="import select; print('up', flush=True); select.epoll().poll(3600)"
    ) as process:
        enter(process)
        until(lambda: stands(process, "epoll_wait"), "it goes on")
        left_ms = int(Path(f"/proc/{process.pid}/syscall").read_text().split()[4], 16)
        assert 0 < left_ms < 3_600_000


def test_a_caller_that_would_take_eintr_for_an_error_is_not_interrupted() -> None:
    with standing_in("epoll_wait", "limited") as process, pytest.raises(AttachError) as caught:
        NativeThread().hand_over(TargetImage(process.pid), Bootstrap(1, b""), Deadline(0.5))
    assert (
        "waiting in epoll_wait with a time limit; stopping it would end that call early (EINTR)" in caught.value.reason
    )


LIBRARY, PYTHON, OTHER, MADE = 0x1000, 0x2000, 0x3000, 0x4000
CODE = {LIBRARY: "/lib/libc.so.6", PYTHON: "/usr/bin/python3", OTHER: "/srv/libserver.so", MADE: ""}


@pytest.mark.parametrize(
    ("stack", "own"),
    [
        ((0, LIBRARY, PYTHON, 7, PYTHON), True),
        ((PYTHON, LIBRARY, OTHER, PYTHON), False),  # the first is what an earlier call has left
        ((0, LIBRARY, MADE, PYTHON), True),
        ((0, LIBRARY), False),
    ],
)
def test_a_caller_is_pythons_only_if_no_other_code_shows_on_the_stack(
    stack: tuple[int, ...], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = {start: Mapping(start, start + 0x1000, "r-xp", 0, path) for start, path in CODE.items()}
    memory = struct.pack(f"<{len(stack)}Q", *stack)
    image: Any = SimpleNamespace(
        python=SimpleNamespace(path=CODE[PYTHON]),
        mapping_at=maps.get,
        memory=SimpleNamespace(read=lambda address, size: memory),
    )
    in_the_call = (NUMBERS["epoll_wait"], 5, 0, 1, 300, 0, 0, 0x7000, LIBRARY)
    monkeypatch.setattr(thread_policy, "_standing", lambda image, tid: in_the_call)
    assert thread_policy.takes_eintr(image, 1) is own


def test_the_refusal_of_an_attach_names_the_call_and_not_the_gil() -> None:
    with standing_in("epoll_wait", "limited") as process, pytest.raises(AttachError) as caught:
        attach_steps.attached(process.pid, limit_s=0.5)
    assert caught.value.code is AttachCode.TIMEOUT
    assert "is waiting in epoll_wait with a time limit" in caught.value.reason
    assert "GIL" not in caught.value.reason
