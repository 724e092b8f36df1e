import _thread
import builtins
import signal
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Callable, List, Tuple

import pytest
from kineto_agent.system import descriptors, threads
from kineto_agent.system.threads import Thread, command_name, others, start_thread, thread_names
from support.agent.python_child import run_python
from support.waiting import scaled


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


def test_a_thread_of_eventlets_without_a_number_does_not_fail_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "enumerate", lambda: [SimpleNamespace(name="MainThread")])
    assert str(threading.get_native_id()) in thread_names(100)


def test_a_thread_that_names_itself_while_they_are_counted_is_none_of_the_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most, thread, done, ended = 1000, Thread("kineto-test"), threading.Event(), threading.Event()
    before = others(most)

    def listed(path: str) -> List[str]:
        found = descriptors.list_folder(path)
        threads._unnamed.discard(thread)
        return found

    def waiting() -> None:
        done.wait(scaled(20))
        ended.set()

    threads._unnamed.add(thread)
    monkeypatch.setattr(threads, "list_folder", listed)
    _thread.start_new_thread(waiting, ())  # has the program's name
    assert others(most) == before
    done.set()
    assert ended.wait(scaled(20))


def test_our_threads_are_not_pythons() -> None:
    started, done = threading.Event(), threading.Event()

    def waiting() -> None:
        started.set()
        done.wait(scaled(20))

    before = threading.enumerate()
    thread = start_thread("kineto-test", waiting)
    assert started.wait(scaled(20))
    assert threading.enumerate() == before
    assert thread_names(100)[str(thread.native_id)] == "kineto-test"
    assert (thread.is_alive(), thread.join(0.01)) == (True, False)
    done.set()
    assert thread.join(scaled(20))
    assert not thread.is_alive()


def test_an_exception_in_our_thread_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise SystemExit("never seen")

    assert start_thread("kineto-test", fail).join(scaled(20))
    assert capfd.readouterr() == ("", "")


def test_the_agent_does_not_import_threading() -> None:
    code = (
        "import sys; before = 'threading' in sys.modules\n"
        "import kineto_agent.bootstrap.live_attach, kineto_agent.bootstrap.lifecycle\n"
        "import kineto_agent.sources.python.stack_sampling\n"
        "import kineto_agent.sources.cupti.gpu_activities, kineto_agent.sources.torch.profiler_guard, traceback\n"
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
    assert start_thread("kineto-test", lambda: None).join(scaled(20))


def test_a_function_of_the_programs_that_starts_threads_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def greenlet(*_arguments: object) -> None:
        raise AssertionError("no thread")

    monkeypatch.setattr(_thread, "start_new_thread", greenlet)
    ran: List[int] = []
    start_thread("kineto-test", lambda: ran.append(_thread.get_native_id())).join()
    assert ran and ran[0] != _thread.get_native_id()


def test_a_program_that_has_replaced_len_has_not_replaced_what_starts_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "len", lambda things, own=len: own(things))
    assert start_thread("kineto-test", lambda: None).join(scaled(20))


def test_a_starting_thread_has_its_signals_open_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raises while they are blocked would leave them so."""
    masks: List[set] = []  # type: ignore[type-arg]

    def start(function: Callable[..., None], arguments: Tuple[object, ...]) -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        _thread.start_new_thread(function, arguments)

    monkeypatch.setattr("kineto_agent.system.threads._start_new_thread", lambda: start)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    start_thread("kineto-test", lambda: None).join()
    assert masks == [before]
