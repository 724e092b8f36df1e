"""A program goes on while our thread waits for another one's lock or for a file system, under every Python here."""

import fcntl
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from kineto_agent.protocol import wire
from kinetod.attach.attach_types import AttachCode, AttachError, Deadline
from kinetod.attach.channel import bootstrap, payload
from kinetod.attach.inspect import standstill
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods.native_thread import NativeThread
from kinetod.attach_helper.attempt import bring_in
from support.agent.agent_daemon import Connection, start_request
from support.machine import native
from support.targets.engine_target import needs_ptrace
from support.targets.live_target import LiveTarget, Start
from support.waiting import scaled, until

pytestmark = needs_ptrace
_F_SETLEASE, _F_GETLEASE = 1024, 1025
_SHARED = ["-O2", "-fPIC", "-shared"]
LOADS = """
import ctypes, threading
inside, tells = os.pipe()
waits, goes_on = os.pipe()
os.environ["KINETO_CONSTRUCTOR"] = "%d %d" % (tells, waits)
thread = threading.Thread(target=ctypes.CDLL(None).dlopen, args=(library, 2))  # ctypes releases the GIL meanwhile
thread.start()
os.read(inside, 1)
"""


class PassesWhen(Deadline):
    """A deadline that has passed once this is so."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__(scaled(30))
        self._condition = condition

    @property
    def left_s(self) -> float:
        return 0.0 if self._condition() else super().left_s


def attach(target: LiveTarget, deadline: Deadline | None = None) -> Connection:
    """As the daemon does it: the agent's thread has opening_stub.c. deadline: for loading. Raises AttachError."""
    boot = bootstrap.make(time.time_ns())
    payload.agent()  # packed once, which can take longer than the bootstrap waits
    taken = bring_in(TargetImage(target.pid), [NativeThread()], boot, Deadline(scaled(30)))
    taken.channel.settimeout(scaled(30))
    connection = Connection(taken.channel)
    try:
        payload.send(taken.channel, target.pid, deadline or Deadline(scaled(30)))
    except BaseException:
        connection.close()
        raise
    connection.expect(wire.Hello)
    connection.send(wire.Welcome("0.0.0"))
    return connection


def captures(connection: Connection, *more: str) -> bool:
    """Whether a capture succeeds, as far as the program has the sources. Then the agent leaves."""
    with closing(connection):
        connection.send(start_request(duration_ns=100_000_000, activity_types=["cpu_op", "python_function", *more]))
        result = connection.expect(wire.Result)
        return result.outcome in ("done", "partial") and (not more or "cupti" in result.sources)


def until_delayed(target: LiveTarget, by: str) -> None:
    until(lambda: by in (standstill.delay(target.pid) or ""), f"the agent's thread waits for {by}")


CALLS_CUDA = """
import os, threading, time
os.environ["KINETO_CUPTI_LIBRARY"] = path
cuda, ended = ctypes.CDLL(path), threading.Event()
def call():  # so that a detach finds a call
    while not ended.wait(0.001): cuda.fake_memset(ctypes.c_uint64(64), ctypes.c_uint64(10), 0)
thread = threading.Thread(target=call)
thread.start()
"""


@pytest.mark.every_python
@pytest.mark.parametrize("options", [(), ("-S", "-E")], ids=["", "bare"])
def test_no_library_and_no_file_is_opened_with_the_gil_in_hand(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    seen = tmp_path / "seen"
    monkeypatch.setenv(
        "LD_PRELOAD", str(native.build("gil_witness.so", [native.FAKES / "loader" / "gil_witness.c"], _SHARED))
    )
    monkeypatch.setenv("GIL_WITNESS", str(seen))
    target = start(*options)
    monkeypatch.delenv("LD_PRELOAD")
    target.do(f"import ctypes, sys; path = {str(native.fake_cupti())!r}\n{CALLS_CUDA}")
    target.do("del sys.modules['ctypes'], sys.modules['_ctypes']")  # the agent needs its own
    assert captures(attach(target), "kernel", "gpu_memset")
    until(lambda: target.threads() == 2, "the agent has left")
    target.do("ended.set(); thread.join()")
    assert not seen.exists(), seen.read_text()
    target.do("import ctypes; ctypes.pythonapi.prctl(15, b'kineto-x'); ctypes.CDLL(None)")
    assert "kineto-x dlopen" in seen.read_text()  # else it would see nothing


def test_a_constructor_that_takes_the_gil_and_the_agent_wait_for_each_other_no_more(target: LiveTarget) -> None:
    library = native.build("waiting_library.so", [native.FAKES / "loader" / "waiting_library.c"], _SHARED)
    target.do(f"library = {os.fsencode(library)!r}")
    target.do(LOADS)
    with ThreadPoolExecutor(1) as pool:
        attached = pool.submit(attach, target)
        until_delayed(target, "the dynamic loader")
        assert target.ask("6 * 7") == 42
        target.do("os.write(goes_on, b'x'); thread.join()")
        assert captures(attached.result())


# A program that has neither ctypes nor sockets.
BARE = """
import json, sys
kept = {}
for line in sys.stdin:
    verb, _space, rest = line.rstrip("\\n").partition(" ")
    answer = (eval if verb == "eval" else exec)(json.loads(rest), kept)
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.every_python
def test_extension_modules_that_the_agent_brings_in_are_the_programs_when_it_imports_them(start: Start) -> None:
    target = start("-S", "-E", program=BARE)
    target.do("import sys")
    before = target.ask("sorted(sys.modules)")
    assert captures(attach(target))
    until(lambda: target.threads() == 1, "the agent has left")
    assert target.ask("sorted(sys.modules)") == before
    target.do("import ctypes, socket, select; pair = socket.socketpair()")
    target.do("assert ctypes.CDLL(None).abs(-3) == 3; pair[0].send(b'x'); assert pair[1].recv(1) == b'x'")
    target.do("class S(ctypes.Structure): _fields_ = [('a', ctypes.POINTER(ctypes.c_int))]")
    assert captures(attach(target))
    target.do("assert ctypes.POINTER(ctypes.c_int) is S._fields_[0][1]")
    assert target.end() == (0, "")


FORKS = """
import ctypes
state = ctypes.c_int.from_address(ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(None), "_r_debug")) + 24)
state.value = 1  # RT_ADD: what is there while a thread opens a library
child = os.fork()
if not child:
    ctypes.CDLL(None)
    os._exit(7)
state.value = 0
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def test_a_child_that_is_forked_while_a_library_is_opened_can_open_others(target: LiveTarget) -> None:
    assert captures(attach(target))
    target.do(FORKS)  # the loader ended it: "Inconsistency detected by ld.so"
    assert target.ask("ended") == 7


def test_a_process_in_which_a_library_is_half_open_is_refused(target: LiveTarget) -> None:
    assert captures(attach(target))
    target.do("sys._kineto_attach['opening'].append('library')")  # as a child finds it
    with pytest.raises(AttachError, match="partly loaded"):
        attach(target)


@contextmanager
def held(path: Path) -> Iterator[Callable[[], bool]]:
    """Whoever opens the file waits until the end of this, as on a file system that does not answer. Gives a function
    that says whether somebody waits.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, _F_SETLEASE, fcntl.F_WRLCK)
        yield lambda: fcntl.fcntl(descriptor, _F_GETLEASE) != fcntl.F_WRLCK
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, before)


@pytest.fixture
def file(target: LiveTarget, tmp_path: Path) -> Path:
    """A file of the standard library that the agent reads, since the program has not imported it."""
    copy = tmp_path / "contextlib.py"
    shutil.copy(Path(target.ask("os.__file__")).parent / copy.name, copy)
    target.do(f"sys._stdlib_dir = {str(tmp_path)!r}; sys.modules.pop('contextlib', None)")
    return copy


def test_a_file_system_that_answers_late_keeps_the_agent_waiting_alone(target: LiveTarget, file: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(file) as awaited:
            attached = pool.submit(attach, target)
            until(awaited, "the agent's thread opens the file")
            assert target.ask("6 * 7") == 42
        assert captures(attached.result())


def test_a_file_system_that_never_answers_is_told_and_the_program_goes_on(target: LiveTarget, file: Path) -> None:
    with held(file) as awaited:
        with pytest.raises(AttachError, match="file of Python's standard library, whose file system is not") as caught:
            attach(target, PassesWhen(awaited))
        assert caught.value.code is AttachCode.TIMEOUT
        assert target.ask("6 * 7") == 42
    until(lambda: target.threads() == 1, "the agent has left")
    assert target.end() == (0, "")


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ([None] * 20 + ["a file"], "the agent's thread is waiting for a file"),
        (["", None, "", "the loader"], "the agent's thread is waiting for the loader"),
        ([""] * 9, "its own threads do not release the GIL"),
        ([None] * 100, "the agent's thread is still starting: the host is overloaded"),
    ],
)
def test_a_thread_that_gets_no_processor_is_looked_at_until_it_waits(
    monkeypatch: pytest.MonkeyPatch, seen: list[str | None], told: str
) -> None:
    looks = iter(seen)
    monkeypatch.setattr(standstill, "delay", lambda _pid: next(looks))
    monkeypatch.setattr(payload, "_LOOK_S", 0)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(AttachError) as caught:
        payload.send(ours, os.getpid(), Deadline(0.0))
    assert f"did not load the agent in time: {told}" in caught.value.reason
