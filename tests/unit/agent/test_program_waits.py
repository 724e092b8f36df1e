"""What threads of the program wait for when the other side is stuck, by the time that they ask for."""

from __future__ import annotations  # the agent's tests run under 3.9

import ctypes
import os
from types import SimpleNamespace
from typing import Any, Callable

import pytest
from kineto_agent.bootstrap import lifecycle, live_attach
from kineto_agent.control import runner
from kineto_agent.control.runner import Agent
from kineto_agent.sources.cupti import gpu_activities
from kineto_agent.sources.jax import pjrt_plugins, session_guard, xla_session
from kineto_agent.sources.kit import kit_session
from kineto_agent.sources.plugins import plugin_session
from kineto_agent.sources.plugins.worker import Call
from kineto_agent.sources.torch import torch_profiler
from kineto_agent.sources.torch.profiler_guard import ProfilerGuard
from kineto_agent.steps.counting import StepCounter
from kineto_agent.system import gil_turns
from kineto_agent.system.gil_turns import Turns
from kineto_agent.system.threads import Thread

LONGEST_S = 0.02
ROUNDING_S = 0.0015  # a limit in whole milliseconds, and a last pause


class Clock:
    """Time passes for those alone who ask to wait."""

    def __init__(self) -> None:
        self.asked_s = 0.0

    def wait(self, seconds: float) -> bool:
        self.asked_s += seconds
        return False

    sleep = wait

    def monotonic(self) -> float:
        return self.asked_s


class Stuck:
    """A lock whose holder does not come back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._clock.wait(0 if not blocking else float("inf") if timeout < 0 else timeout)

    def locked(self) -> bool:
        return True

    def release(self) -> None: ...

    def __enter__(self) -> Any:
        self.acquire()

    def __exit__(self, *_error: object) -> None: ...


def made(kind: Any, **attributes: Any) -> Any:
    thing = object.__new__(kind)
    thing.__dict__.update(attributes, _pid=os.getpid())
    return thing


def stuck_thread(clock: Clock) -> Thread:
    thread = Thread("kineto-stuck")
    thread._ended = Stuck(clock)  # type: ignore[assignment]
    return thread


def stuck_turns(clock: Clock, patch: pytest.MonkeyPatch) -> Turns:
    patch.setattr(gil_turns, "time", clock)
    words = (ctypes.c_int * 8)(0, 0, 1)  # the third one: it is queueing
    turns = Turns(ctypes.addressof(words))
    turns.__dict__["kept"] = words
    return turns


def stuck_agent(clock: Clock, patch: pytest.MonkeyPatch) -> Agent:
    agent = Agent(StepCounter(), candidates=list, turns=stuck_turns(clock, patch))
    agent._close_pipe()
    patch.setattr(runner, "time", clock)
    agent._thread = stuck_thread(clock)
    agent._recording = SimpleNamespace(hurry=lambda: None, await_end=clock.wait)  # type: ignore[assignment]
    return agent


Case = Callable[[Clock, pytest.MonkeyPatch], Callable[[], object]]


def cupti_is_in_use(clock: Clock, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    patch.setattr(gpu_activities, "time", clock)
    collector = SimpleNamespace(hurry=lambda: None)
    session = made(gpu_activities.CuptiSession, _lock=Stuck(clock), _collector=collector)
    return lambda: session.give_way()


def cupti_does_not_flush(clock: Clock, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    patch.setattr(gpu_activities, "time", clock)
    stop = lambda limit_ms: clock.wait(limit_ms / 1000)  # noqa: E731
    collector = SimpleNamespace(hurry=lambda: None, stop=stop, yield_subscriber=lambda: None)
    free = SimpleNamespace(acquire=lambda **_how: True, release=lambda: None)
    session = made(gpu_activities.CuptiSession, _lock=free, _collector=collector, _stopped=None, _warnings=[])
    session.__dict__.update(_gave_way=False, _closed=False, _begun=True, _taken=object())
    patch.setattr(gpu_activities.CuptiSession, "_holder", "the program")
    return lambda: session.give_way()


def another_vendor_is_in_use(clock: Clock, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    patch.setattr(kit_session, "time", clock)
    session = made(kit_session.KitSession, _lock=Stuck(clock), yields=True)
    return lambda: session.give_way()


def a_plug_in_hangs(clock: Clock, _patch: pytest.MonkeyPatch) -> Callable[[], object]:
    def begin(function: Callable[[], object]) -> Call:
        call = Call(function)
        call.done = Stuck(clock)  # type: ignore[assignment]
        return call

    session = made(plugin_session.PluginSession, yields=True, _session=SimpleNamespace(give_way=None))
    session._worker = SimpleNamespace(begin=begin)
    return lambda: session.give_way()


def another_thread_begins_a_profiler(clock: Clock, _patch: pytest.MonkeyPatch) -> Callable[[], object]:
    guard = ProfilerGuard()
    guard.lock = Stuck(clock)  # type: ignore[assignment]
    return lambda: guard._enter(guard)


def the_agent_is_stuck_at_the_exit(clock: Clock, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    patch.setattr(lifecycle, "_agent", stuck_agent(clock, patch))
    return lifecycle._at_exit


def the_agent_of_an_attach_is_stuck_at_the_exit(clock: Clock, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    patch.setattr(live_attach, "_agent", stuck_agent(clock, patch))
    return live_attach._at_exit


def the_agent_is_stuck_when_it_is_stopped(clock: Clock, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    patch.setattr(lifecycle, "_agent", stuck_agent(clock, patch))
    return lifecycle.stop


def xla_is_stuck_at_the_exit(clock: Clock, _patch: pytest.MonkeyPatch) -> Callable[[], object]:
    guard = SimpleNamespace(lock=Stuck(clock))
    session = made(xla_session.XlaSession, _stopping=Stuck(clock), _written=Stuck(clock), _guard=guard, _worker=guard)
    session._pieces_lock = Stuck(clock)
    session._exit_guard = xla_session.ExitGuard.of_process()
    return lambda: session._at_exit()


def a_pjrt_plug_in_is_stuck_at_the_exit(clock: Clock, _patch: pytest.MonkeyPatch) -> Callable[[], object]:
    session = made(pjrt_plugins.PjrtSession, _lock=Stuck(clock), _on=False)
    session._profiler = SimpleNamespace(destroy=lambda: None)
    return lambda: session._end()


CASES: list[Case] = [
    a_plug_in_hangs,
    another_thread_begins_a_profiler,
    the_agent_is_stuck_when_it_is_stopped,
    xla_is_stuck_at_the_exit,
    a_pjrt_plug_in_is_stuck_at_the_exit,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_thread_of_the_program_waits_for_20_ms_at_most(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with monkeypatch.context() as patch:
        case(clock, patch)()
    assert 0 < clock.asked_s <= LONGEST_S + ROUNDING_S


@pytest.mark.parametrize("case", [cupti_is_in_use, cupti_does_not_flush, another_vendor_is_in_use])
def test_what_would_meet_us_inside_a_vendors_library_waits_for_200_ms_at_most(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with monkeypatch.context() as patch:
        case(clock, patch)()
    assert 0 < clock.asked_s <= 0.2 + ROUNDING_S


@pytest.mark.parametrize("case", [the_agent_is_stuck_at_the_exit, the_agent_of_an_attach_is_stuck_at_the_exit])
def test_an_exit_waits_half_a_second_for_sources_that_record(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with monkeypatch.context() as patch:
        case(clock, patch)()
    assert 0 < clock.asked_s <= 0.53 + ROUNDING_S


def torch_does_not_end_our_session(clock: Clock) -> Callable[[], object]:
    session = made(torch_profiler.TorchProfilerSession, _lock=Stuck(clock), _over_ns=1)
    return lambda: session.give_way()


def xla_does_not_end_our_session(clock: Clock) -> Callable[[], object]:
    guard = made(session_guard.SessionGuard, lock=Stuck(clock), _on=True, _ours=0)
    return lambda: guard._called(session_guard.TRACE)


def torch_does_not_return_at_the_exit(clock: Clock) -> Callable[[], object]:
    session = made(torch_profiler.TorchProfilerSession, _lock=Stuck(clock), _write_lock=Stuck(clock), _over_ns=1)
    return lambda: session._at_exit()


@pytest.mark.parametrize(
    "case", [torch_does_not_end_our_session, xla_does_not_end_our_session, torch_does_not_return_at_the_exit]
)
def test_what_would_fail_beside_a_session_of_ours_waits_for_its_end_but_not_for_good(case: Any) -> None:
    clock = Clock()
    case(clock)()
    assert 0 < clock.asked_s <= 20
