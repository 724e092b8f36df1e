import _thread
import ctypes
import os
import signal
import sys
import threading
from types import ModuleType
from typing import Callable, Dict, List, Tuple

import pytest
from kineto_agent.threads import NativeIds, command_name, start_thread, thread_names
from support.python_child import run_python


def test_our_threads_take_no_signal_from_the_program() -> None:
    masks: List[set] = []  # type: ignore[type-arg]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    start_thread("kineto-test", lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))).join()
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGPROF} <= masks[0]
    assert not {signal.SIGSEGV, signal.SIGABRT} & masks[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_our_threads_have_their_name_in_the_kernel_too() -> None:
    names: List[str] = []
    start_thread("kineto-test", lambda: names.append(command_name(threading.get_native_id()))).join()
    assert names == ["kineto-test"]


def test_an_ended_thread_has_no_name() -> None:
    assert command_name((1 << 22) + 1) == ""


def test_every_thread_is_named_up_to_the_limit() -> None:
    names = thread_names(100)
    assert names[str(threading.get_native_id())] == threading.current_thread().name
    assert len(thread_names(1)) == 1


def test_pythons_threads_are_known_by_their_system_id() -> None:
    ids = NativeIds()
    assert ids.tid(threading.get_ident()) == threading.get_native_id()
    assert len(ids) == 1
    ids.forget_all_but([])
    assert len(ids) == 0


def test_our_own_threads_have_no_id_for_samplers() -> None:
    found: List[int] = []
    start_thread("kineto-test", lambda: found.append(NativeIds().tid(threading.get_ident()))).join()
    assert found == [0]


def foreign_thread_ids(ids: NativeIds) -> Dict[str, int]:
    """What `ids` says of a thread that a C library made, and what the kernel says."""
    found: Dict[str, int] = {}
    ready, done = threading.Event(), threading.Event()
    library = ctypes.CDLL(None)
    library.pthread_self.restype = ctypes.c_ulong
    library.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]

    def body(_argument: object) -> None:
        found.update(ident=library.pthread_self(), kernel=threading.get_native_id())
        ready.set()
        assert done.wait(20)

    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(body)
    thread = ctypes.c_ulong()
    assert library.pthread_create(ctypes.byref(thread), None, callback, None) == 0
    assert ready.wait(20)
    assert found["ident"] not in threading._active  # type: ignore[attr-defined]
    found["ours"] = ids.tid(found["ident"])
    done.set()
    assert library.pthread_join(thread, None) == 0
    return found


def test_a_thread_made_by_a_c_library_is_known_by_its_system_id() -> None:
    found = foreign_thread_ids(NativeIds())
    assert found["ours"] == found["kernel"]


def test_without_proc_mem_a_foreign_thread_keeps_pythons_identifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineto_agent.threads._read_memory", lambda _address, _size: b"")
    found = foreign_thread_ids(NativeIds())
    assert found["ours"] != found["kernel"]
    assert 0 < found["ours"] < 1 << 32


def test_an_identifier_that_points_nowhere_is_survived() -> None:
    assert NativeIds().tid(0x1000) == 0x1000
    assert NativeIds().tid(sys.maxsize * 2) == (sys.maxsize * 2) & 0xFFFFFFFF
    assert os.getpid() > 0


def test_our_threads_are_not_pythons() -> None:
    started, done = threading.Event(), threading.Event()

    def waiting() -> None:
        started.set()
        done.wait(20)

    before = threading.enumerate()
    thread = start_thread("kineto-test", waiting)
    assert started.wait(20)
    assert threading.enumerate() == before
    assert thread_names(100)[str(thread.native_id)] == "kineto-test"
    assert (thread.is_alive(), thread.join(0.01)) == (True, False)
    done.set()
    assert thread.join(20)
    assert not thread.is_alive()


def test_an_exception_in_our_thread_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise SystemExit("never seen")

    assert start_thread("kineto-test", fail).join(20)
    assert capfd.readouterr() == ("", "")


def test_threads_of_another_agent_have_no_id_for_samplers_either(monkeypatch: pytest.MonkeyPatch) -> None:
    found: List[int] = []
    started, done = threading.Event(), threading.Event()

    def waiting() -> None:
        started.set()
        done.wait(20)

    thread = start_thread("kineto-test", waiting)
    assert started.wait(20)
    ids = NativeIds()
    ids.tid(threading.get_ident())
    monkeypatch.setattr("kineto_agent.threads._ours", {})  # as if another copy of this module had made it
    found.append(ids.tid(thread.ident))
    done.set()
    assert thread.join(20)
    assert found == [0]


def test_the_agent_does_not_import_threading() -> None:
    code = (
        "import sys; before = 'threading' in sys.modules\n"
        "import kineto_agent.boot.live, kineto_agent.process, kineto_agent.sources.python_stacks\n"
        "import kineto_agent.sources.cupti, kineto_agent.sources.torch_guard, traceback\n"
        "print(before == ('threading' in sys.modules))"
    )
    done = run_python(["-S", "-c", code])
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_where_gevent_has_taken_thread_starting_the_interpreters_own_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkey = ModuleType("gevent.monkey")
    monkey.__dict__["saved"] = {"_thread": {"start_new_thread": _thread.start_new_thread}}

    def greenlet(*_arguments: object) -> None:
        raise AssertionError("not a thread")

    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    monkeypatch.setattr(_thread, "start_new_thread", greenlet)
    assert start_thread("kineto-test", lambda: None).join(20)


def test_a_function_of_the_programs_that_starts_threads_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def greenlet(*_arguments: object) -> None:
        raise AssertionError("no thread")

    monkeypatch.setattr(_thread, "start_new_thread", greenlet)
    ran: List[int] = []
    start_thread("kineto-test", lambda: ran.append(_thread.get_native_id())).join()
    assert ran and ran[0] != _thread.get_native_id()


def test_a_starting_thread_has_its_signals_open_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raises while they are blocked would leave them so."""
    masks: List[set] = []  # type: ignore[type-arg]

    def start(function: Callable[..., None], arguments: Tuple[object, ...]) -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        _thread.start_new_thread(function, arguments)

    monkeypatch.setattr("kineto_agent.threads._start_new_thread", lambda: start)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    start_thread("kineto-test", lambda: None).join()
    assert masks == [before]
