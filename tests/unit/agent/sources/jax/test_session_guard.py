"""The program's own jax.profiler goes first: what the guard sees, and that JAX's modules are as before afterwards."""

import os
import sys
import threading
from types import ModuleType
from typing import Any, Callable, ClassVar, Iterator, List

import pytest
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.jax import jax_runtime
from kineto_agent.sources.jax.session_guard import SERVER, TRACE, SessionGuard
from kineto_agent.sources.jax.xla_session import JaxSource


class Options:
    """As much of jaxlib's ProfileOptions as is used."""

    python_tracer_level = host_tracer_level = 1
    enable_hlo_proto = True


class Session:
    """As much of jaxlib's ProfilerSession."""

    made: ClassVar[List[Any]] = []

    def __init__(self, options: Any = None) -> None:
        self.made.append(self)

    def stop(self) -> bytes:
        return b"profile"


class State:
    def __init__(self) -> None:
        self.profile_session: Any = None
        self.lock = threading.Lock()


class Client:
    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.platform_version = ""


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """jax._src.profiler, as JAX has it, with a CPU backend. start_trace and start_server are JAX's own."""
    names = ("jax", "jax._src.profiler", "jax._src.xla_bridge", "jax._src.config", "jaxlib.version", "jaxlib._profiler")
    modules: Any = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    modules["jax"].__version__ = modules["jaxlib.version"].__version__ = "0.10.2"
    modules["jax._src.xla_bridge"]._backends = {"cpu": Client("cpu")}
    native, profiler = modules["jaxlib._profiler"], modules["jax._src.profiler"]
    native.ProfilerSession, native.ProfileOptions = Session, Options
    profiler._profiler, profiler._profile_state, profiler._profiler_server = native, State(), None
    native.start_server = lambda port: "a server at %d" % port

    def start_trace() -> Any:
        with profiler._profile_state.lock:
            profiler._profile_state.profile_session = native.ProfilerSession(Options())
        return profiler._profile_state.profile_session

    profiler.start_trace = start_trace
    profiler.modules = modules
    Session.made = []
    yield profiler
    assert (native.ProfilerSession, native.start_server.__name__) == (Session, "<lambda>")


def guard(seen: List[str]) -> SessionGuard:
    return SessionGuard(jax_runtime.find(), seen.append)


def refusal(action: Callable[[], Any]) -> "tuple[str, str]":
    with pytest.raises(SourceError) as caught:
        action()
    return caught.value.reason_code, caught.value.reason


def nothing() -> None:
    """Begin a session of ours."""


def test_the_programs_trace_and_server_are_told_before_they_begin(jax: Any) -> None:
    seen: List[str] = []
    made: List[int] = []

    def tell(what: str) -> None:
        seen.append(what)
        made.append(len(Session.made))

    found = SessionGuard(jax_runtime.find(), tell)
    found.enter(nothing)
    session = jax.start_trace()
    assert isinstance(session, Session) and session.stop() == b"profile"
    assert jax._profiler.start_server(port=7) == "a server at 7"
    assert (seen, made) == ([TRACE, SERVER], [0, 1])
    found.remove()
    jax._profile_state.profile_session = None
    jax.start_trace()
    assert seen == [TRACE, SERVER]


def test_sessions_of_ours_are_not_told(jax: Any) -> None:
    seen: List[str] = []
    found = guard(seen)
    found.enter(lambda: jax._profiler.ProfilerSession())
    found.remove()
    assert (seen, len(Session.made)) == ([], 1)


def test_an_error_of_ours_does_not_reach_the_program(jax: Any) -> None:
    def fail(_what: str) -> None:
        raise RuntimeError("ours")

    found = SessionGuard(jax_runtime.find(), fail)
    found.enter(nothing)
    assert isinstance(jax.start_trace(), Session)
    found.remove()


def test_a_forked_child_is_not_told(jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: List[str] = []
    found = guard(seen)
    found.enter(nothing)
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    jax.start_trace()
    found.remove()
    assert seen == []


def test_who_shadows_the_class_after_us_stays(jax: Any) -> None:
    seen: List[str] = []
    found = guard(seen)
    found.enter(nothing)
    ours = jax._profiler.ProfilerSession

    class Theirs(ours):  # type: ignore[misc, valid-type]
        pass

    jax._profiler.ProfilerSession = Theirs
    found.remove()
    assert jax._profiler.ProfilerSession is Theirs
    assert isinstance(jax.start_trace(), Theirs)
    assert seen == []
    jax._profiler.ProfilerSession = Session


def test_no_session_begins_while_the_program_records(jax: Any) -> None:
    jax.start_trace()
    code, reason = refusal(lambda: guard([]).enter(nothing))
    assert (code, "is recording" in reason) == ("USER_PROFILER_ACTIVE", True)


def test_no_session_begins_while_the_program_starts_or_stops_its_own(jax: Any) -> None:
    with jax._profile_state.lock:
        code, reason = refusal(lambda: guard([]).enter(nothing))
    assert (code, "being started or stopped" in reason) == ("USER_PROFILER_ACTIVE", True)


def test_a_session_that_does_not_begin_leaves_no_shadow(jax: Any) -> None:
    def fail() -> None:
        raise SourceError("JAX_PROFILER_FAILED", "no")

    refusal(lambda: guard([]).enter(fail))
    assert not jax._profile_state.lock.locked()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("server", "has a profiler server (jax.profiler.start_server)"),
        ("pgle", "automatic profile-guided optimisation is on (jax_enable_pgle)"),
        ("logs", "would write to the program's standard error (TF_CPP_MIN_LOG_LEVEL is 0)"),
        ("cuda", "JAX uses cuda here"),
        ("no backend", "has not used a device yet"),
        ("old", "the profiler of jaxlib 0.6 imports TensorFlow into the program"),
        ("no options", "it has no ProfileOptions"),
        ("no level", "does not accept the options of the recording"),
    ],
)
def test_what_speaks_against_a_session_is_said_and_nothing_is_offered(
    jax: Any, monkeypatch: pytest.MonkeyPatch, what: str, text: str
) -> None:
    assert JaxSource().activity_types() == ["cpu_op", "user_annotation"]
    bridge, config = jax.modules["jax._src.xla_bridge"], jax.modules["jax._src.config"]
    if what == "server":
        jax._profiler_server = object()
    elif what == "pgle":
        config.enable_pgle = type("Setting", (), {"value": True})
    elif what == "logs":
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    elif what == "cuda":
        bridge._backends = {"cpu": Client("cpu"), "cuda": Client("gpu")}
    elif what == "no backend":
        bridge._backends = {}
    elif what == "old":
        jax.modules["jaxlib.version"].__version__ = "0.6.2"
    elif what == "no options":
        del jax._profiler.ProfileOptions
    else:
        monkeypatch.delattr(Options, "host_tracer_level")
    assert JaxSource().activity_types() == []
    assert text in JaxSource().why_not(["cpu_op"])
    assert JaxSource().why_not(["memory_snapshot"]) == ""


def test_other_devices_are_recorded_only_on_request(jax: Any) -> None:
    source = JaxSource()
    assert source.on_request == frozenset()
    jax.modules["jax._src.xla_bridge"]._backends = {"cpu": Client("cpu"), "tpu": Client("tpu")}
    assert source.activity_types() == ["cpu_op", "user_annotation", "kernel"]
    assert source.on_request == {"cpu_op", "user_annotation", "kernel"}


def test_a_program_without_jax_is_not_told_about_jax() -> None:
    assert (JaxSource().activity_types(), JaxSource().why_not(["kernel"])) == ([], "")


def test_a_program_on_a_cpu_alone_is_told_that_it_has_no_kernels(jax: Any) -> None:
    assert JaxSource().why_not(["kernel"]) == "JAX uses only the CPU here, which has no kernels"
    assert JaxSource().why_not(["memory_snapshot"]) == ""
    jax.modules["jax._src.xla_bridge"]._backends = {"cpu": Client("cpu"), "tpu": Client("tpu")}
    assert JaxSource().why_not(["kernel"]) == ""
