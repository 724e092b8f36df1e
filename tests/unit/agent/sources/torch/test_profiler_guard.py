"""The program's own torch.profiler is seen and heard of in advance, and its class is as before afterwards."""

import gc
import os
import sys
import threading
from types import ModuleType
from typing import Any, Iterator, List

import pytest
from kineto_agent.sources.torch import kineto_state, profiler_guard
from kineto_agent.sources.torch.profiler_guard import ProfilerGuard, UserProfiler
from support.waiting import scaled


class Profile:
    """As much of torch.autograd.profiler.profile as the guard touches."""

    def __init__(self, seen: List[str]) -> None:
        self.seen = seen

    def _prepare_trace(self, what: str = "gpu") -> str:
        self.seen.append("prepare " + what)
        if what == "fail":
            raise RuntimeError(what)
        return "prepared"

    def __exit__(self, *args: Any) -> None:
        self.seen.append("exit")


PREPARE, EXIT = Profile._prepare_trace, Profile.__exit__


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, as torch has it. Kineto is idle unless a test says otherwise."""
    module: Any = ModuleType("torch.autograd.profiler")
    module.profile, module._is_profiler_enabled = Profile, False
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)
    monkeypatch.setattr(kineto_state, "active", lambda: False)
    yield module
    assert (Profile._prepare_trace, Profile.__exit__) == (PREPARE, EXIT)


def installed(seen: List[str]) -> ProfilerGuard:
    guard = ProfilerGuard(lambda: seen.append("before"), lambda: seen.append("after"))
    guard.install()
    return guard


def test_it_calls_before_a_session_begins_and_after_it_has_ended(profiler: Any) -> None:
    seen: List[str] = []
    guard = installed(seen)
    profile = Profile(seen)
    assert profile._prepare_trace(what="cpu") == "prepared"
    profile.__exit__(None, None, None)
    guard.remove()
    assert seen == ["before", "prepare cpu", "exit", "after"]


def test_the_class_is_as_before_once_it_is_removed(profiler: Any) -> None:
    guard = installed([])
    wrapped: Any = Profile._prepare_trace
    assert (wrapped.__name__, wrapped.__wrapped__) == ("_prepare_trace", PREPARE)
    guard.remove()
    guard.remove()
    assert (Profile._prepare_trace, Profile.__exit__) == (PREPARE, EXIT)


def test_a_wrapper_of_somebody_else_stays_and_works(profiler: Any) -> None:
    seen: List[str] = []
    guard = installed(seen)
    ours: Any = Profile._prepare_trace

    def theirs(profile: Profile, what: str = "gpu") -> str:
        return "their " + str(ours(profile, what))

    Profile._prepare_trace = theirs  # type: ignore[assignment, method-assign]
    try:
        guard.remove()
        assert Profile._prepare_trace is theirs
        assert Profile(seen)._prepare_trace() == "their prepared"
        assert seen == ["prepare gpu"]
    finally:
        Profile._prepare_trace = PREPARE  # type: ignore[method-assign]


def test_errors_of_ours_do_not_reach_the_program(profiler: Any) -> None:
    seen: List[str] = []

    def fail() -> None:
        raise ValueError("ours")

    guard = ProfilerGuard(fail, fail)
    guard.install()
    profile = Profile(seen)
    profile._prepare_trace()
    profile.__exit__(None, None, None)
    guard.remove()
    assert seen == ["prepare gpu", "exit"]


def test_the_programs_own_errors_do_and_end_the_session(profiler: Any) -> None:
    guard = installed([])
    with pytest.raises(RuntimeError, match="fail"):
        Profile([])._prepare_trace("fail")
    assert guard.state() is UserProfiler.IDLE
    guard.remove()


def test_the_lock_is_free_while_torchs_own_methods_run(profiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free: List[bool] = []

    def try_lock(*args: Any) -> None:
        def elsewhere() -> None:
            free.append(guard.lock.acquire(blocking=False))
            if free[-1]:
                guard.lock.release()

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    with monkeypatch.context() as patch:
        patch.setattr(Profile, "_prepare_trace", try_lock)
        patch.setattr(Profile, "__exit__", try_lock)
        guard = ProfilerGuard(try_lock)
        guard.install()
        profile = Profile([])
        profile._prepare_trace()
        profile.__exit__()
        guard.remove()
    assert free == [False, True, True]


def test_a_session_is_active_from_its_first_moment_to_its_last(profiler: Any) -> None:
    states: List[UserProfiler] = []
    guard = ProfilerGuard(lambda: states.append(guard.state()), lambda: states.append(guard.state()))
    guard.install()
    profile = Profile([])
    profile._prepare_trace()
    states.append(guard.state())
    profiler._is_profiler_enabled = True
    states.append(guard.state())
    profiler._is_profiler_enabled = False
    profile.__exit__(None, None, None)
    guard.remove()
    idle, warming, recording = UserProfiler.IDLE, UserProfiler.WARMING_UP, UserProfiler.RECORDING
    assert states == [warming, warming, recording, idle]
    assert [state.active for state in (idle, warming, recording, UserProfiler.UNKNOWN)] == [False, True, True, False]


def test_a_session_that_was_beginning_when_it_was_installed_is_active(
    profiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, let_go = threading.Event(), threading.Event()

    def prepare(profile: Profile) -> None:
        inside.set()
        let_go.wait(scaled(20))

    with monkeypatch.context() as patch:
        patch.setattr(Profile, "_prepare_trace", prepare)
        thread = threading.Thread(target=lambda: Profile([])._prepare_trace())
        thread.start()
        inside.wait(scaled(20))
        guard = installed([])
        states = [guard.state()]
        let_go.set()
        thread.join()
        states.append(guard.state())
        guard.remove()
    assert states == [UserProfiler.WARMING_UP, UserProfiler.IDLE]


def test_a_session_that_was_dropped_without_an_end_is_not_active_for_ever(profiler: Any) -> None:
    guard = installed([])
    Profile([])._prepare_trace()
    gc.collect()
    assert guard.state() is UserProfiler.IDLE
    guard.remove()


@pytest.mark.parametrize(
    ("kineto", "enabled", "state"),
    [
        (True, False, UserProfiler.WARMING_UP),
        (True, True, UserProfiler.RECORDING),
        (False, True, UserProfiler.IDLE),
        (None, False, UserProfiler.UNKNOWN),
        (None, True, UserProfiler.RECORDING),
    ],
)
def test_sessions_from_before_are_known_from_kineto(
    profiler: Any, monkeypatch: pytest.MonkeyPatch, kineto: Any, enabled: bool, state: UserProfiler
) -> None:
    monkeypatch.setattr(kineto_state, "active", lambda: kineto)
    profiler._is_profiler_enabled = enabled
    assert ProfilerGuard().state() is state


def test_a_kineto_session_of_our_own_is_not_the_programs(profiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto_state, "active", lambda: True)
    assert ProfilerGuard().state(kineto_is_ours=True) is UserProfiler.IDLE


def test_torch_may_be_imported_later(profiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: List[str] = []
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch.autograd.profiler")
        guard = installed(seen)
        assert guard.waits_for_torch
        assert guard.state() is UserProfiler.IDLE
        patch.setitem(sys.modules, "torch.autograd.profiler", ModuleType("half imported"))
        guard.look()
        assert guard.waits_for_torch
    guard.look()
    assert not guard.waits_for_torch
    Profile(seen)._prepare_trace()
    guard.remove()
    assert seen == ["before", "prepare gpu"]


def test_a_forked_child_is_left_alone(profiler: Any) -> None:
    seen: List[str] = []
    guard = installed(seen)
    reader, writer = os.pipe()
    with guard.lock:  # as if another thread held it at the time of the fork
        child = os.fork()
        if child == 0:
            thread = threading.Thread(target=lambda: Profile(seen)._prepare_trace(), daemon=True)
            thread.start()
            thread.join(scaled(20))
            os.write(writer, repr(seen).encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"['prepare gpu']"
    guard.remove()
    assert seen == []


def test_a_session_does_not_wait_for_long_while_another_thread_has_the_lock(
    profiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_guard, "LIMIT_S", 0.001)
    seen: List[str] = []
    guard = installed(seen)
    profile = Profile(seen)
    with guard.lock:
        thread = threading.Thread(target=profile._prepare_trace)
        thread.start()
        thread.join(scaled(20))
        states = [thread.is_alive(), guard.state()]
    guard.remove()
    assert states == [False, UserProfiler.WARMING_UP]
    assert seen == ["prepare gpu"]
