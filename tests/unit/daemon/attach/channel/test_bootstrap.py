"""What a live attach does inside of a program that nobody prepared,."""

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from kineto_agent.protocol import wire
from kinetod.attach.attach_types import MAX_BOOTSTRAP_BYTES, AttachError, Deadline
from kinetod.attach.channel import bootstrap, payload, private_channel
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods.native_thread import NativeThread
from kinetod.attach_helper.attempt import bring_in
from support.agent.agent_daemon import Connection, Daemon, start_request
from support.losses import without_losses
from support.machine import native
from support.targets.live_target import LiveTarget, Start
from support.waiting import scaled, until

STATE = "(sorted(__import__('__main__').__dict__), sorted(m for m in sys.modules if 'kineto' in m))"
SPIN = "import threading, time\ndef spin():\n    while True: time.sleep(0.001)\n"

AUDIT = """
import _thread, sys
main, begun, seen, vetoed = _thread.get_ident(), False, set(), None
def hook(event, arguments):
    global begun
    if _thread.get_ident() != main:
        begun = True
        seen.add(event)
        if event == vetoed:
            raise RuntimeError("refused: " + event)
sys.addaudithook(hook)
"""


def record(connection: Connection, activity_types: Sequence[str] = ("python_function",)) -> wire.Result:
    connection.send(start_request(duration_ns=100_000_000, activity_types=list(activity_types)))
    return connection.expect(wire.Result)


@pytest.mark.every_python
def test_an_attached_agent_records_and_leaves_no_trace(target: LiveTarget) -> None:
    before, descriptors = target.ask(STATE), target.descriptors()
    has_threading = target.ask("'threading' in sys.modules")
    connection, hello = target.welcome()
    assert hello.pid == target.pid
    result = record(connection)
    assert (result.outcome, without_losses(result.warnings)) == ("done", [])
    stacks = {sample.stack[:2] for sample in connection.arenas[0].samples()}
    assert stacks == {("<module>", "serve")}
    assert target.ask("'threading' in sys.modules") == has_threading
    assert target.ask("__import__('threading').active_count()") == 1
    connection.close()
    target.until_alone()
    assert target.descriptors() == descriptors
    assert target.ask(STATE) == before


def test_threading_imported_afterwards_knows_the_main_thread(start: Start) -> None:
    target = start("-S")  # without site, which may import threading
    target.do("import os, sys")
    before = target.ask("'threading' in sys.modules")  # 3.14's ctypes imports it
    target.welcome()
    assert target.ask("'threading' in sys.modules") == before
    target.do("import threading")
    assert target.ask("threading.main_thread() is threading.current_thread()")
    assert target.ask("(threading.main_thread().name, threading.main_thread().native_id == os.getpid())") == [
        "MainThread",
        True,
    ]


def test_a_second_attach_finds_the_modules_of_the_first(target: LiveTarget) -> None:
    modules = "id(sys._kineto_attach['agent']['live'])"
    first, _hello = target.welcome()
    loaded = target.ask(modules)
    first.close()
    target.until_alone()
    second, _hello = target.welcome()
    assert record(second).outcome == "done"
    assert target.ask(modules) == loaded


def test_a_new_attach_ends_the_agent_of_the_last_one(target: LiveTarget) -> None:
    first, _hello = target.welcome()
    first.collect()
    second, _hello = target.welcome()
    result = first.expect(wire.Result)
    assert (result.outcome, result.reason_code) == ("partial", "AGENT_STOPPED")
    first.expect_end()
    assert record(second).outcome == "done"
    until(lambda: target.threads() == 2, "the first has left")


def test_a_bootstrap_that_comes_late_or_twice_does_nothing(target: LiveTarget) -> None:
    token = time.time_ns()
    connection, _hello = target.welcome()
    descriptors = target.descriptors()
    target.run(bootstrap.make(token))
    target.run(bootstrap.make(target.ask("max(sys._kineto_attach['tokens'])")))
    until(lambda: target.threads() == 2, "their threads have ended")
    assert target.descriptors() == descriptors
    assert private_channel.await_channel(target.pid, token, Deadline(0)) is None
    assert record(connection).outcome == "done"


def test_a_channel_that_nobody_takes_is_closed(target: LiveTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "CHANNEL_WAIT_S", 0.1)
    descriptors = target.descriptors()
    target.run(bootstrap.make(time.time_ns()))
    until(lambda: target.ask("getattr(sys, '_kineto_attach', None) is not None"), "it has begun")
    target.until_alone()
    assert target.descriptors() == descriptors


def test_a_channel_that_is_given_up_ends_who_waits_at_it(target: LiveTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the target holds the daemon's end, too, until it has the agent."""
    monkeypatch.setattr(bootstrap, "CHANNEL_WAIT_S", 3600)
    descriptors = target.descriptors()
    boot = bootstrap.make(time.time_ns())
    target.run(boot)
    private_channel.let_go(target.channel(boot).socket)
    target.until_alone()
    assert target.descriptors() == descriptors


def test_what_cannot_be_run_is_told_and_forgotten(target: LiveTarget) -> None:
    descriptors = target.descriptors()
    boot = bootstrap.make(time.time_ns())
    target.run(boot)
    found = target.channel(boot).socket
    found.send(b"raise LookupError('here')")
    assert found.recv(1000) == b"ELookupError('here')"
    assert found.recv(1000) == b""
    target.until_alone()
    assert target.descriptors() == descriptors


def leftovers(target: LiveTarget) -> tuple[dict[int, str], list[str]]:
    """Descriptors, and mappings of ours other than of the collector that has been loaded for good."""
    mapped = Path(f"/proc/{target.pid}/maps").read_text().splitlines()
    return target.descriptors(), [line for line in mapped if "/memfd:kineto-" in line and "library" not in line]


def attach_in_vain(target: LiveTarget) -> None:
    """Attach, whatever comes of it; returns when no thread of ours is left."""
    boot = bootstrap.make(time.time_ns())
    target.run(boot)
    until(lambda: target.ask("begun"), "it has begun")
    found = None
    with contextlib.suppress(AttachError):  # it may be closed while we take it
        while found is None and target.threads() > 1:
            found = private_channel.await_channel(target.pid, boot.token, Deadline(0.05))
        if found is not None:
            payload.send(found, target.pid, Deadline(scaled(30)))
    if found is not None:
        found.close()
    target.until_alone()


@pytest.mark.every_python
def test_an_attach_that_an_audit_hook_refuses_leaves_nothing(start: Start) -> None:
    """Each event that an attach raises on our thread, in a program of its own."""
    watched = start()
    watched.do(AUDIT)
    connection, _hello = watched.welcome()
    events = watched.ask("sorted(seen)")
    connection.close()
    assert {"exec", "compile", "socket.__new__"} <= set(events)
    left = {}
    for event in events:
        target = start()
        target.do(AUDIT)
        before = leftovers(target)
        target.do(f"vetoed = {event!r}")
        attach_in_vain(target)
        if leftovers(target) != before:
            left[event] = leftovers(target)
        target.kill()
    assert left == {}


def test_the_veto_of_a_socket_is_told(start: Start) -> None:
    target = start()
    target.do(AUDIT + "vetoed = 'socket.__new__'")
    attach_in_vain(target)
    assert "RuntimeError: refused: socket.__new__" in target.end()[1]


@pytest.mark.every_python
def test_modules_that_the_program_lets_nobody_import_stay_so(start: Start) -> None:
    target = start()
    target.do("import socket, select, sys\nfor name in ('_socket', 'select', 'socket'): sys.modules[name] = None")
    connection, _hello = target.welcome()
    assert record(connection).outcome == "done"
    assert target.ask("[sys.modules.get(name, 1) for name in ('_socket', 'select', 'socket')]") == [None] * 3


@pytest.mark.every_python
def test_a_program_that_has_put_another_dictionary_in_place_of_sys_modules_is_recorded(start: Start) -> None:
    target = start()
    target.do("import sys\nsys.modules.pop('ctypes._layout', None)\nsys.modules = sys.modules.copy()")
    connection, _hello = target.welcome()
    result = record(connection)
    assert (result.outcome, result.reason) == ("done", "")


# Fails the call number `at` of those that the bootstrap makes; not close and fstat, which fail for a filter alone, and
# with such a filter a process is refused.
FAILS = """
import ctypes
count, at, spared, real = 0, -1, (3, 57, 5, 80), ctypes.pythonapi.syscall
real.argtypes, real.restype = [ctypes.c_long] * 5, ctypes.c_long
def syscall(number, *arguments):
    global count
    if number not in spared:
        count += 1
        if count == at:
            return -1
    return real(number, *arguments)
wrapper = ctypes.PYFUNCTYPE(*[ctypes.c_long] * 6)(syscall)
__import__("__main__").calls["syscall"] = ctypes.cast(wrapper, ctypes.c_void_p).value
import signal
blocked = lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
begun = True
"""


def test_an_attach_of_which_any_system_call_fails_leaves_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call after the other, in a program of its own, until an attach makes no more of them."""
    monkeypatch.setattr(bootstrap, "CHANNEL_WAIT_S", 3600)  # nothing waits for what cannot come
    left: dict[int, object] = {}
    fails = made = 0
    while made >= fails:
        fails += 1
        target = start()
        target.do(FAILS)
        before = leftovers(target), target.ask("blocked()")
        target.do(f"at = {fails}")
        attach_in_vain(target)
        made = target.ask("count")
        if (leftovers(target), target.ask("blocked()")) != before:
            left[fails] = leftovers(target)
        target.kill()
    assert left == {}
    assert made > 5


def waiting_for_the_agent(target: LiveTarget) -> Connection:
    boot = bootstrap.make(time.time_ns())
    target.run(boot)
    return target.channel(boot)


def test_a_channel_that_ends_while_the_agent_loads_leaves_no_descriptor(target: LiveTarget) -> None:
    descriptors = target.descriptors()
    found = waiting_for_the_agent(target).socket
    ours = payload.agent()
    socket.send_fds(found, [ours.packet], list(ours.descriptors))
    found.close()
    target.until_alone()
    assert target.descriptors() == descriptors


def test_the_lowest_numbers_stay_the_programs(target: LiveTarget) -> None:
    next_one = "(number := os.dup(0), os.close(number))[0]"
    before = target.ask(next_one)
    connection, _hello = target.welcome()
    ours = [number for number, name in target.descriptors().items() if "socket" in name or "pipe" in name]
    assert (target.ask(next_one), [number for number in ours if 2 < number < bootstrap.FIRST_NUMBER]) == (before, [])
    assert record(connection).outcome == "done"


def test_a_bootstrap_that_was_given_up_does_not_disturb_the_next_one(target: LiveTarget) -> None:
    before = target.descriptors()
    first, second = waiting_for_the_agent(target), waiting_for_the_agent(target)
    payload.send(first.socket, target.pid, Deadline(scaled(30)))
    first.expect(wire.Hello)
    payload.send(second.socket, target.pid, Deadline(scaled(30)))
    second.socket.settimeout(scaled(30))
    second.expect(wire.Hello)
    first.expect_end()
    second.close()
    target.until_alone()
    assert target.descriptors() == before


def test_a_program_that_exits_sends_what_it_has(target: LiveTarget) -> None:
    connection, _hello = target.welcome()
    connection.collect()
    assert target.end() == (0, "")
    result = connection.expect(wire.Result)
    assert (result.outcome, result.reason_code) == ("partial", "TARGET_EXITING")
    connection.expect_end()


FAKE_TORCH = (  # as much of it as makes the agent record its allocations
    "import types\n"
    "new = types.SimpleNamespace\n"
    "memory = new(_record_memory_history_impl=None)\n"
    "core = new(_cuda_isHistoryEnabled=None, _cuda_getAllocatorBackend=lambda: 'native')\n"
    "torch = new(version=new(cuda='13.0'), _C=core, cuda=new(memory=memory, is_initialized=lambda: True))\n"
    "sys.modules.update({'torch': torch, 'torch.cuda.memory': memory})\n"
)


def test_an_audit_hook_that_forbids_shared_memory_leaves_none_behind(target: LiveTarget) -> None:
    """Of the sources, those that have an arena made in C never meet the hook, those that make it in Python do."""
    target.do(FAKE_TORCH)
    connection, _hello = target.welcome()
    descriptors = target.descriptors()
    target.do(
        "def hook(event, arguments):\n"
        "    if event == 'mmap.__new__': raise RuntimeError('no shared memory')\n"
        "sys.addaudithook(hook)\n"
    )
    result = record(connection, ["cpu_instant_event"])
    assert (result.outcome, result.reason_code) == ("failed", "NO_SHARED_MEMORY")
    assert "no shared memory" in result.reason
    assert target.descriptors() == descriptors


def test_an_audit_hook_that_forbids_mmap_does_not_keep_stacks_from_being_sampled(target: LiveTarget) -> None:
    connection, _hello = target.welcome()
    target.do(
        "def hook(event, arguments):\n"
        "    if event == 'mmap.__new__': raise RuntimeError('no shared memory')\n"
        "sys.addaudithook(hook)\n"
    )
    assert record(connection).outcome == "done"
    connection.close()
    target.until_alone()
    assert not [name for name in target.descriptors().values() if "kineto" in name]


CLOCK = """
import _thread, time
real, mine, seen = time.perf_counter, _thread.get_ident(), []
def perf_counter():
    if _thread.get_ident() != mine: seen.append(1)
    return real()
time.perf_counter = perf_counter
"""


def test_a_clock_that_the_program_has_replaced_is_not_asked(target: LiveTarget) -> None:
    target.do(CLOCK)
    connection, _hello = target.welcome()
    assert record(connection).outcome == "done"
    connection.close()
    target.until_alone()
    assert target.ask("(seen, time.perf_counter is perf_counter)") == [[], True]


MONITOR = """
import _thread
main, seen, m = _thread.get_ident(), [], sys.monitoring
m.use_tool_id(m.PROFILER_ID, "ours")
def event(code, *more):
    if _thread.get_ident() != main: seen.append(code.co_qualname)
for name in ("PY_START", "PY_RETURN", "CALL", "RAISE"):
    m.register_callback(m.PROFILER_ID, getattr(m.events, name), event)
m.set_events(m.PROFILER_ID, m.events.PY_START | m.events.PY_RETURN | m.events.CALL | m.events.RAISE)
"""


@pytest.mark.every_python
def test_a_profiler_of_all_threads_sees_nothing_of_a_capture(target: LiveTarget) -> None:
    if not target.ask("hasattr(sys, 'monitoring')"):
        pytest.skip("sys.monitoring is there from 3.12 on")
    target.do(MONITOR)
    connection = native_agent(target)
    assert record(connection).outcome == "done"
    connection.close()
    until(lambda: target.threads() == 1, "the agent has left")
    assert target.ask("seen") == []


def native_agent(target: LiveTarget) -> Connection:
    """Brought in as the daemon does it, with a stop."""
    boot = bootstrap.make(time.time_ns())
    payload.agent()  # packed once, which can take longer than the bootstrap waits
    taken = bring_in(TargetImage(target.pid), [NativeThread()], boot, Deadline(scaled(30)))
    try:
        payload.send(taken.channel, target.pid, Deadline(scaled(30)))
    except AttachError:
        taken.channel.close()
        raise
    connection = Connection(taken.channel)
    taken.channel.settimeout(scaled(30))
    connection.expect(wire.Hello)
    connection.send(wire.Welcome("0.0.0"))
    return connection


@pytest.mark.every_python
def test_attaches_that_are_refused_while_the_agent_loads_do_not_add_up(start: Start) -> None:
    target = start()
    target.do(AUDIT + "import atexit\nvetoed = 'ctypes.cdata'")
    exit_hooks = []
    for _ in range(3):
        with pytest.raises(AttachError, match=r"refused: ctypes\.cdata"):
            native_agent(target)
        target.until_alone()
        exit_hooks.append(target.ask("atexit._ncallbacks()"))
    assert exit_hooks == exit_hooks[:1] * 3
    target.do("vetoed = None")
    connection = native_agent(target)
    result = record(connection)
    assert (result.outcome, result.reason) == ("done", "")
    connection.close()


@pytest.mark.every_python
def test_no_module_of_the_standard_library_enters_the_program(target: LiveTarget) -> None:
    before = target.ask("sorted(sys.modules)")
    connection, _hello = target.welcome()
    assert record(connection).outcome == "done"
    # Where the program's ctypes makes a structure from 3.14 on, it imports this part of itself.
    assert set(target.ask("sorted(sys.modules)")) - set(before) <= {"ctypes._layout"}


@pytest.mark.slow
def test_a_channel_that_the_program_has_closed_is_not_touched_again(
    target: LiveTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "CHANNEL_WAIT_S", round(scaled(1), 1))  # long enough to close it meanwhile
    boot = bootstrap.make(time.time_ns())
    target.run(boot)
    kept = target.channel(boot)
    numbers = [number for number, name in target.descriptors().items() if name.startswith("socket:")]
    target.do(f"pairs = [os.pipe() for _ in range(2)]\nfor number in {numbers}: os.dup2(pairs[0][0], number)")
    kept.close()
    target.do("os.write(pairs[0][1], b'theirs')")
    until(lambda: target.threads() == 1, "the bootstrap has given up", 30)
    assert (
        target.ask(f"[os.fstat(number).st_ino == os.fstat(pairs[0][0]).st_ino for number in {numbers}]") == [True] * 2
    )
    assert target.ask("os.read(pairs[0][0], 100).decode()") == "theirs"


def test_exit_hooks_of_the_program_run_as_ever(target: LiveTarget) -> None:
    target.do("import atexit; atexit.register(lambda: sys.stderr.write('first '))")
    connection, _hello = target.welcome()
    target.do("atexit.register(lambda: sys.stderr.write('last '))")
    hooks = target.ask("atexit._ncallbacks()")
    connection.close()
    target.until_alone()
    target.welcome()
    assert target.ask("atexit._ncallbacks()") == hooks
    assert target.end() == (0, "last first ")


@pytest.mark.every_python
def test_nothing_is_written_even_when_every_warning_is_an_error(start: Start) -> None:
    target = start("-X", "dev", "-X", "warn_default_encoding", "-bb", "-W", "error")
    target.do("import os, sys")
    descriptors = target.descriptors()
    connection, _hello = target.welcome()
    assert record(connection).outcome == "done"
    connection.close()
    target.until_alone()
    assert target.descriptors() == descriptors
    assert target.ask("'__warningregistry__' in __import__('__main__').__dict__") is False
    assert target.end() == (0, "")


def test_the_agent_that_the_program_has_itself_is_another_one(target: LiveTarget, tmp_path: Path) -> None:
    root = str(Path(wire.__file__).parents[2])
    target.do(f"os.environ['KINETO_AGENT_SOCKET'] = {str(tmp_path / 'none.sock')!r}; sys.path.insert(0, {root!r})")
    target.do("import kineto_agent; kineto_agent.start()")
    connection, _hello = target.welcome()
    result = record(connection)
    assert sorted(name for name in result.threads.values() if "kineto" in name)[:2] == ["kineto-agent"] * 2
    assert {sample.thread_id for sample in connection.arenas[0].samples()} == {target.pid}
    connection.close()
    until(lambda: target.threads() == 3, "the attached agent has left")  # and the other one keeps its two
    assert target.ask("sys.modules['kineto_agent.bootstrap.lifecycle']._agent.alive")


def test_a_bootstrap_fits_into_its_page_and_is_ascii() -> None:
    source = bootstrap.make((1 << 63) - 1, (1 << 31) - 1).source
    assert len(source) <= MAX_BOOTSTRAP_BYTES
    assert source.isascii()
    assert b"\0" not in source


# ---------------------------------------------------------------- the collector, with the fake libcupti

CALLS = """
import ctypes, os, threading, time
os.environ["KINETO_CUPTI_LIBRARY"] = path
cuda, ended = ctypes.CDLL(path), threading.Event()
def call():  # so that a detach finds a call
    while not ended.wait(0.001): cuda.fake_memset(ctypes.c_uint64(64), ctypes.c_uint64(10), 0)
threading.Thread(target=call, daemon=True).start()
"""
LAUNCH = "cuda.fake_launch_many(b'gemm', 250, ctypes.c_uint64(10), 0)"  # a full buffer starts a thread of libcupti's


@pytest.fixture
def cuda_target(target: LiveTarget) -> LiveTarget:
    target.do(f"path = {str(native.fake_cupti())!r}\n{CALLS}")
    return target


def record_kernels(target: LiveTarget, connection: Connection) -> wire.Result:
    connection.send(start_request(duration_ns=3600 * 10**9, activity_types=["kernel"]))
    connection.expect_state("WARMUP")
    connection.expect_state("COLLECT")
    target.do(LAUNCH)
    connection.send(wire.Cancel("c1", True))
    result = connection.expect(wire.Result)
    connection.send(wire.Release("c1"))
    return result


def collectors(target: LiveTarget) -> int:
    """How many copies of the collector are mapped."""
    maps = Path(f"/proc/{target.pid}/maps").read_text()
    return len({line.split()[4] for line in maps.splitlines() if "memfd:kineto-library" in line})


@pytest.mark.every_python
def test_the_collector_is_loaded_from_what_the_daemon_brings(cuda_target: LiveTarget) -> None:
    for _ in range(2):
        connection, hello = cuda_target.welcome()
        assert "kernel" in hello.sources["cupti"]
        assert record_kernels(cuda_target, connection).sources["cupti"]["records"] == 250
        connection.close()
        until(lambda: cuda_target.threads() == 2, "the agent has left")
        assert not [name for name in cuda_target.descriptors().values() if "kineto" in name or "socket" in name]
    assert collectors(cuda_target) == 1


def test_another_version_of_the_agent_brings_its_own_collector(
    cuda_target: LiveTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _hello = cuda_target.welcome()
    record_kernels(cuda_target, connection)
    modules = cuda_target.ask("id(sys._kineto_attach['agent']['live'])")
    ours = payload.agent()
    name, library = ours.packet.split(b"\n")[-2].partition(b"'digest': ")[::2]
    packet = ours.packet.replace(library, b"'another" + library[1:])
    assert name
    copy = payload.sealed_memfd("kineto-library", os.pread(ours.descriptors[2], 1 << 24, 0))
    other = payload.Payload(packet, (*ours.descriptors[:2], copy))
    monkeypatch.setattr(payload, "agent", lambda: other)
    again, _hello = cuda_target.welcome()
    os.close(copy)
    connection.expect_end()
    assert cuda_target.ask("id(sys._kineto_attach['agent']['live'])") != modules
    assert record_kernels(cuda_target, again).sources["cupti"]["records"] == 250
    assert collectors(cuda_target) == 2


def test_two_agents_do_not_record_cupti_at_once(cuda_target: LiveTarget, tmp_path: Path) -> None:
    with Daemon(str(tmp_path / "own.sock")) as daemon:
        root = str(Path(wire.__file__).parents[2])
        cuda_target.do(f"os.environ['KINETO_AGENT_SOCKET'] = {daemon.path!r}; sys.path.insert(0, {root!r})")
        cuda_target.do("import kineto_agent; kineto_agent.start()")
        own, _hello = daemon.welcome()
        own.send(start_request(duration_ns=3600 * 10**9, activity_types=["kernel"]))
        own.expect_state("WARMUP")
        own.expect_state("COLLECT")
        connection, _hello = cuda_target.welcome()
        connection.send(start_request("c2", activity_types=["kernel"]))
        result = connection.expect(wire.Result)
        assert (result.outcome, result.reason_code) == ("failed", "CUPTI_BUSY")
        assert "another kineto agent in this process is recording with CUPTI" in result.reason
        own.send(wire.Cancel("c1", True))
        own.expect(wire.Result)
        own.send(wire.Release("c1"))
        until(lambda: cuda_target.ask("not hasattr(sys, '_kineto_cupti')"), "the first has given CUPTI back")
        assert record_kernels(cuda_target, connection).sources["cupti"]["records"] == 250
