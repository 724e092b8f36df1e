"""A plug-in that conflicts with jax.profiler: the program's goes first, before, during and after."""

import sys
import threading
from types import ModuleType
from typing import Any, Iterator, List

import pytest
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.plugins.guarded_source import PluginSource, ProcessView
from support.agent.plugins import GOOD, plugin

REQUEST = SourceRequest(frozenset(["toy_kernel"]), 1 << 20, {})
# Notes what happens to it, in order.
NOTING = GOOD.replace(
    "    def give_way(self):\n", "    def give_way(self):\n        import sys; sys.toy_log.append('gave way')\n"
)


class Session:
    """As much of jaxlib's ProfilerSession."""

    def __init__(self, options: Any = None) -> None:
        log: List[str] = getattr(sys, "toy_log")  # noqa: B009 - it has no such attribute otherwise
        log.append("jax began")

    def stop(self) -> bytes:
        return b""


class State:
    def __init__(self) -> None:
        self.profile_session: Any = None
        self.lock = threading.Lock()


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """jaxlib's module with the profiler of a program that has JAX."""
    names = ("jax", "jax._src.profiler", "jax._src.xla_bridge", "jax._src.config", "jaxlib.version", "jaxlib._profiler")
    modules: Any = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules["jax"].__version__ = modules["jaxlib.version"].__version__ = "0.10.2"
    found, profiler = modules["jaxlib._profiler"], modules["jax._src.profiler"]
    found.ProfilerSession, found.ProfileOptions, found.start_server = Session, object, lambda port: None
    profiler._profiler, profiler._profile_state, profiler._profiler_server = found, State(), None
    monkeypatch.setattr(sys, "toy_log", [], raising=False)
    yield found
    assert found.ProfilerSession is Session


def source() -> PluginSource:
    made = PluginSource(plugin(NOTING, conflicts=frozenset(["jax"])))
    made.look(ProcessView())
    assert made.activity_types() == ["toy_kernel"]
    assert not made.would_yield(REQUEST)  # to torch's
    return made


def log() -> List[str]:
    found: List[str] = sys.toy_log  # type: ignore[attr-defined]
    return found


def test_the_programs_profiler_begins_once_the_plug_in_has_given_way(native: Any) -> None:
    session: Any = source().prepare(REQUEST)
    session.start()
    assert session.taken() is None
    native.ProfilerSession()
    assert log() == ["gave way", "jax began"]
    assert session.taken().profiler == "the program's own jax.profiler"
    assert session.stop().counts.records == 3
    session.close()


def test_the_programs_profiler_is_left_alone_while_it_runs(native: Any) -> None:
    sys.modules["jax._src.profiler"]._profile_state.profile_session = object()
    with pytest.raises(SourceError) as caught:
        source().prepare(REQUEST)
    assert caught.value.reason_code == "USER_PROFILER_ACTIVE"


def test_a_profiler_that_begins_before_the_plug_in_has_started_stays_alone(native: Any) -> None:
    session: Any = source().prepare(REQUEST)
    session._guard.enter(lambda: None)
    native.ProfilerSession()
    session._guard.remove()
    with pytest.raises(SourceError, match="has just started"):
        session.start()
    assert log() == ["gave way", "jax began"]
    session.close()


def test_after_the_recording_nothing_is_in_the_programs_way(native: Any) -> None:
    session: Any = source().prepare(REQUEST)
    session.start()
    session.stop()
    assert native.ProfilerSession is Session
    session.close()


def test_a_program_without_jax_is_recorded_like_any_other() -> None:
    session: Any = source().prepare(REQUEST)
    session.start()
    assert session.stop().counts.records == 3
    session.close()
