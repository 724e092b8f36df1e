"""The native thread that sees to turns with the GIL: what it is told, and an agent's own one."""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any, Iterator

import pytest
from kineto_agent.sources import collector_library
from kineto_agent.system import gil_turns
from kineto_agent.system.gil_turns import Turns
from support.agent.python_child import run_python
from support.waiting import scaled, until

with_gil = pytest.mark.skipif("t" in sys.abiflags, reason="there is no GIL to get")
# A thread of ours that gets nowhere; `handed`: how often the GIL was given away for it.
WAITS = """
import ctypes, os, _thread
from kineto_agent.sources import collector_library
from kineto_agent.system.gil_turns import Turns
from kineto_agent.system.threads import start_thread
turns, lock = Turns(library=collector_library.path()), _thread.allocate_lock()
lock.acquire()
def waits():
    turns.runs()
    lock.acquire()
def handed():
    return ctypes.c_uint.from_address(turns._address + 12).value if turns._address else 0
turns.begin()
start_thread("kineto-agent", waits)
while handed() < 4: os.stat("/")  # releases the GIL for a moment
"""
FORKS = (
    WAITS
    + """
import warnings; warnings.simplefilter("ignore")  # of a fork with threads, from 3.12 on
child = os.fork()
if not child:
    before = handed()
    for _ in range(100000): os.stat("/")
    print(len(os.listdir("/proc/self/task")), handed() - before, flush=True)
    turns.end()
    turns = Turns(library=collector_library.path())
    turns.begin()
    start_thread("kineto-agent", waits)
    while handed() < 4: os.stat("/")  # releases the GIL for a moment
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
)
# The agent's thread has not got the GIL once.
NEVER_RUNS = WAITS.replace("turns.runs()", "pass")
# Its interpreter ends with threads that want the GIL. CPython 3.10 dies of them without any of ours (6 of 1,000): such
# a thread looks into the interpreter after that has been freed.
WANT_THE_GIL = 0 if sys.version_info[:2] == (3, 10) else 3
ENDS = (
    WAITS
    + f"""
import threading
def spin():
    while True: sum(range(1000))
for _ in range({WANT_THE_GIL}): threading.Thread(target=spin, daemon=True).start()
while handed() < 20: os.stat("/")
"""
)
IN_ANOTHER_INTERPRETER = """
import sys
try:
    import _interpreters as interpreters
    made = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    made = interpreters.create(isolated=False)
interpreters.run_string(made, "import sys; sys.path[:] = %r\\n" % sys.path + sys.argv[1])
"""
BEGINS = """
from kineto_agent.sources import collector_library
from kineto_agent.system.gil_turns import Turns
turns = Turns(library=collector_library.path())
turns.begin()
print(turns._words, flush=True)
"""


@pytest.fixture
def words() -> Any:
    """rest, over, queueing."""
    return (ctypes.c_int * 3)()


@pytest.fixture
def own() -> Iterator[Turns]:
    """Turns for this thread."""
    turns = Turns(library=collector_library.path())
    turns.begin()
    turns.runs()
    yield turns
    turns.end()
    until_none_is_there()


def native_threads() -> int:
    """How many threads see to turns here."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            found += (task / "comm").read_text() == "kineto-turns\n"
        except OSError:  # it has ended
            continue
    return found


def until_none_is_there() -> None:
    """One that has begun would stay; that of an earlier test may still be about to end."""
    until(lambda: native_threads() == 0, "no such thread is there")


def test_each_rest_is_another_one(words: Any) -> None:
    turns = Turns(ctypes.addressof(words))
    told = []
    for limit_ms in (100, 100, 0, 0):
        turns.rest(limit_ms)
        told.append(words[0])
        turns.work()
        assert words[0] == 0
    assert [word >> 1 for word in told] == [100, 100, 0, 0]
    assert told[0] != told[1]


def test_a_rest_without_end_and_one_of_days(words: Any) -> None:
    turns = Turns(ctypes.addressof(words))
    turns.rest(-1)
    assert words[0] == -1
    turns.rest(2**40)
    assert words[0] > 2**30


@pytest.mark.parametrize("rest", [-1, 0, 201])
def test_the_end_changes_what_the_thread_might_be_about_to_sleep_on(words: Any, rest: int) -> None:
    words[0] = rest
    Turns(ctypes.addressof(words)).end()
    assert (words[0] != rest, words[1]) == (True, 1)


def test_the_end_waits_for_what_is_being_queued(words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gil_turns, "_END_LIMIT_S", scaled(60))
    turns = Turns(ctypes.addressof(words))
    words[2] = 1
    ended = threading.Thread(target=turns.end)
    ended.start()
    while not words[1]:
        pass
    assert ended.is_alive()
    words[2] = 0
    ended.join(scaled(30))
    assert not ended.is_alive()


def test_without_such_a_thread_nothing_is_told() -> None:
    turns = Turns()
    turns.begin()
    turns.runs()
    turns.rest(5)
    turns.work()
    turns.end()
    assert turns._bit == 0


def test_the_thread_that_a_live_attach_has_brought_is_kept(words: Any) -> None:
    turns = Turns(ctypes.addressof(words), collector_library.path())
    turns.begin()
    assert turns._address == ctypes.addressof(words)
    until_none_is_there()


def test_polling_finds_what_is_ready_without_such_a_thread_too() -> None:
    reader, writer = os.pipe()
    wanted = [(reader, select.POLLIN), (writer, select.POLLOUT)]
    assert Turns().poll(wanted[:1], 0) == []
    assert Turns().poll(wanted, None) == [(writer, select.POLLOUT)]
    os.write(writer, b"x")
    assert Turns().poll(wanted, 1000) == [(reader, select.POLLIN), (writer, select.POLLOUT)]
    os.close(reader)
    os.close(writer)


@with_gil
def test_polling_finds_what_is_ready_and_ends_the_rest(own: Turns) -> None:
    reader, writer = os.pipe()
    wanted = [(reader, select.POLLIN), (writer, select.POLLOUT)]
    assert own.poll(wanted[:1], 0) == []
    os.write(writer, b"x")
    assert own.poll(wanted, None) == [(reader, select.POLLIN), (writer, select.POLLOUT)]
    assert own._words[0].value == 0
    os.close(reader)
    assert own.poll(wanted[:1], None) == [(reader, select.POLLNVAL)]
    os.close(writer)


@with_gil
def test_a_rest_is_over_before_the_agent_has_the_gil(own: Turns) -> None:
    reader, writer = os.pipe()
    usual = sys.getswitchinterval()

    def look() -> None:
        while own._words[0].value != -1:
            pass
        sys.setswitchinterval(1000)  # nobody asks this thread for the GIL
        os.write(writer, b"x")
        while own._words[0].value:
            pass
        sys.setswitchinterval(usual)

    thread = threading.Thread(target=look)
    thread.start()
    assert own.poll([(reader, select.POLLIN)], None) == [(reader, select.POLLIN)]
    thread.join(scaled(30))
    assert not thread.is_alive()
    os.close(reader)
    os.close(writer)


@with_gil
def test_the_thread_has_its_name_and_begins_once(own: Turns) -> None:
    until(lambda: native_threads() == 1, "it has its name")
    own.begin()
    another = Turns(library=collector_library.path())
    another.begin()  # of an agent beside the first one
    assert (another._words, native_threads()) == (None, 1)


@with_gil
def test_many_agents_one_after_the_other_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gil_turns, "_END_LIMIT_S", scaled(20))  # each begins once the thread before it has ended
    addresses = set()
    for _ in range(20):
        turns = Turns(library=collector_library.path())
        turns.begin()
        turns.runs()
        addresses.add(turns._address)
        turns.rest(-1)
        turns.end()
    assert (len(addresses), 0 in addresses) == (1, False)
    until_none_is_there()


@pytest.mark.parametrize("library", ["", "/not/there.so", "/proc/self/exe"])
def test_without_the_library_there_is_no_thread(library: str) -> None:
    turns = Turns(library=library)
    turns.begin()
    assert turns._words is None
    until_none_is_there()


def test_with_another_version_of_the_library_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gil_turns, "ABI", gil_turns.ABI + 1)
    turns = Turns(library=collector_library.path())
    turns.begin()
    assert turns._words is None
    until_none_is_there()


def test_an_audit_hook_that_forbids_the_library_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str) -> None:
        raise LookupError("forbidden")

    monkeypatch.setattr(gil_turns, "open_library", forbidden)
    turns = Turns(library=collector_library.path())
    turns.begin()
    assert turns._words is None


def test_a_free_threaded_build_has_no_use_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "abiflags", "t")
    turns = Turns(library=collector_library.path())
    turns.begin()
    assert turns._words is None
    until_none_is_there()


@with_gil
def test_a_thread_that_gets_nowhere_is_given_the_gil() -> None:
    done = run_python(["-c", WAITS + "print('given')"])
    assert (done.stdout, done.stderr, done.returncode) == ("given\n", "", 0)


@with_gil
def test_a_thread_that_has_not_run_yet_is_given_the_gil() -> None:
    done = run_python(["-c", NEVER_RUNS + "print('given')"])
    assert (done.stdout, done.stderr, done.returncode) == ("given\n", "", 0)


@with_gil
def test_an_interpreter_ends_before_the_agent_has_run() -> None:
    done = run_python(["-c", NEVER_RUNS])
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@with_gil
def test_a_forked_child_has_no_such_thread_and_begins_one_of_its_own() -> None:
    done = run_python(["-c", FORKS])
    assert (done.stdout, done.stderr, done.returncode) == ("1 0\n0\n", "", 0)


@with_gil
@pytest.mark.parametrize("_again", [0, *(pytest.param(again, marks=pytest.mark.slow) for again in range(1, 4))])
def test_an_interpreter_with_threads_ends_in_the_middle_of_it(_again: int) -> None:
    done = run_python(["-c", ENDS])
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@with_gil
def test_another_interpreter_does_without() -> None:
    done = run_python(["-c", IN_ANOTHER_INTERPRETER, BEGINS])
    assert (done.stdout, done.returncode) == ("None\n", 0), done.stderr
