"""Code of ours on threads of the program: all of it is known, and none of it loads, opens, starts or waits."""

from __future__ import annotations  # the agent's tests run under 3.9

import _ctypes
import ast
import builtins
import ctypes
import re
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Iterator

import kineto_agent
import pytest
from kineto_agent.bootstrap import lifecycle, live_attach
from kineto_agent.control.recording import Recording, _Part
from kineto_agent.control.runner import Agent
from kineto_agent.sources import arena_writer
from kineto_agent.sources.jax import xla_session
from kineto_agent.sources.jax.session_guard import SessionGuard
from kineto_agent.sources.memory.allocator_history import History
from kineto_agent.sources.plugins import beside_jax, installed, plugin_session
from kineto_agent.sources.python import call_tracing
from kineto_agent.sources.torch import libtorch_symbols, torch_profiler
from kineto_agent.sources.torch.graph_captures import CAPTURES, GraphCaptures
from kineto_agent.sources.torch.profiler_guard import ProfilerGuard
from kineto_agent.steps.counting import StepCounter
from kineto_agent.steps.torch_hooks import JaxStepHooks, StepHooks
from kineto_agent.system import debuglog, env, fork_warnings, threads
from support.targets.fake_torch import FakeTorch

PACKAGE = Path(kineto_agent.__file__).parent
NATIVE = PACKAGE.parent / "native"

# Calls by the last part of their names, with the positions of the functions that they register; keywords count, too.
_CALLS = {
    "MethodShadow": slice(2, None),
    "ModuleHook": slice(1, None),
    "ProfilerGuard": slice(0, None),
    "SessionGuard": slice(1, None),
    "register_at_fork": slice(0, None),
    "register": slice(0, 1),  # of atexit
    "insert": slice(1, 2),  # into sys.meta_path
    "ref": slice(1, None),  # of weakref
    "append": slice(0, 1),  # to what torch calls when it initialises CUDA
    "finalize": slice(1, 2),
    "installed": slice(1, None),  # OptimizerHook
    "addaudithook": slice(0, None),
    "setprofile": slice(0, None),
    "settrace": slice(0, None),
    "signal": slice(1, None),
    "CFUNCTYPE": slice(0, 0),
    "PYFUNCTYPE": slice(0, 0),
}
_ON = {
    "append": ("calls",),
    "register": ("atexit",),
    "insert": ("sys.meta_path",),
    "ref": ("weakref",),
    "signal": ("signal", "_signal"),
}
_VALUES = ("environ",)  # arguments that are no functions
_ATTRIBUTES_OF_OURS = ("last", "attribute", "key", "each")  # set on modules and classes that the agent has made
_HOOKS = ("excepthook", "displayhook", "unraisablehook", "breakpointhook", "exec_module", "__import__", "__del__")

# In C: what registers a function, wherever it is called, and names of such functions that are looked up.
_NATIVE = re.compile(
    r"(?<!\w)(pthread_atfork|atexit|__cxa_atexit|on_exit|sigaction|pthread_key_create|register_callbacks|subscribe|"
    r"set_callbacks|create_buffer|trace_by_callback|gate_place|call_site_redirect|(?<= )driver_slot|"
    r"(?<=torch[.>])add|(?<=torch->)add)\("
    r"(?!const struct)"
    r'|"(_Py\w*(?:AddPendingCall|SetProfile|SetTrace))"'
)
_DEFINITION = re.compile(r"^(?:extern |static )*(?:int|void|bool|const char \*|uint64_t) ?\w+\(", re.MULTILINE)
# Elsewhere: the gate through which Kineto's calls to CUPTI go, and what an attach makes a stopped thread run.
_OTHER_NATIVE = {
    "torch/kineto_gate.c: gate",
    "attach/methods/python_stub.c: attach",
    "attach/methods/collector_stub.c: attach",
}
_PUTS_BACK = {"theirs", "self._original", "self._originals[name]"}


def python_entries() -> set[str]:
    """`module: function` of each function in Python, as the source names it at its registration."""
    found: set[str] = {"__init__.py: %s" % name for name in kineto_agent.__all__ if name != "__version__"}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        registered = _registered(ast.parse(path.read_text()))
        found.update("%s: %s" % (name, function) for function in registered if function not in _PUTS_BACK)
    return found


def _registered(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr in _HOOKS:
                    yield ast.unparse(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name in _HOOKS:
            yield node.name


def _of_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    owner, _, name = called.rpartition(".")
    if (
        name == "setattr"
        and ast.unparse(node.args[0]) != "made"
        and ast.unparse(node.args[1]) not in _ATTRIBUTES_OF_OURS
    ):
        yield ast.unparse(node.args[2])
    if name not in _CALLS or owner not in _ON.get(name, (owner,)):
        return
    for argument in [*node.args[_CALLS[name]], *(keyword.value for keyword in node.keywords)]:
        if ast.unparse(argument) not in _VALUES:
            yield ast.unparse(argument)


def native_entries() -> set[str]:
    """`file: registration` of each place in C that registers a function."""
    found = set(_OTHER_NATIVE)
    for path in sorted(NATIVE.rglob("*.c")):
        text = _DEFINITION.sub("", re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL))
        found.update("%s: %s" % (path.relative_to(NATIVE), match[1] or match[2]) for match in _NATIVE.finditer(text))
    return found


TABLE = Path(__file__).parents[3] / "docs" / "harm.md"
SECTION = "## Code of ours on the program's threads"
USED_S = 30.0  # processor time of the program's thread
LONGEST_SLEEP_S = 0.02

Prepared = Callable[[], object]  # what the program's thread does
Case = Callable[[pytest.MonkeyPatch], Prepared]


class Watched:
    """What the program's thread does that it must not do, while `on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        self.seen: list[str] = []
        for owner, name in (
            (builtins, "compile"),
            (builtins, "exec"),
            (builtins, "open"),
            (_ctypes, "dlopen"),
            (_ctypes, "dlsym"),
            (ctypes.CDLL, "__init__"),
            (ctypes.CDLL, "__getitem__"),
            (threads, "_start_new_thread"),
        ):
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))
        used = time.thread_time, time.thread_time_ns
        monkeypatch.setattr(time, "thread_time", lambda: used[0]() + USED_S)
        monkeypatch.setattr(time, "thread_time_ns", lambda: used[1]() + int(USED_S * 1e9))
        self._sleep, self._import = time.sleep, builtins.__import__
        monkeypatch.setattr(time, "sleep", self._slept)
        monkeypatch.setattr(builtins, "__import__", self._imported)

    def _noting(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                self.seen.append("%s%s" % (name, args[:1]))
            return function(*args, **kwargs)

        return call

    def _slept(self, seconds: float) -> None:
        if self.on and seconds > LONGEST_SLEEP_S:
            self.seen.append("sleep(%g)" % seconds)
        else:
            self._sleep(seconds)

    def _imported(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.on and name not in sys.modules:
            self.seen.append("import " + name)
        return self._import(name, *args, **kwargs)

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_error: object) -> None:
        self.on = False


# ---------------------------------------------------------------- what the program's threads do


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> Any:
    made = ModuleType(name)
    made.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def captures_a_graph(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    class CUDAGraph:
        def capture_begin(self) -> None: ...
        def capture_end(self) -> None: ...

    stream = SimpleNamespace(cuda_stream=1, device=SimpleNamespace(index=0))
    module(monkeypatch, "torch", cuda=SimpleNamespace(current_stream=lambda: stream))
    module(monkeypatch, "torch.cuda.graphs", CUDAGraph=CUDAGraph)
    captures = GraphCaptures()
    module(monkeypatch, "torch.cuda", _queued_calls=[], _initialized=False)
    assert not captures._is_initialised()
    captures._watcher = SimpleNamespace(begin=lambda *_capture: 1, seal=lambda _watch: b"graph", drop=lambda: None)
    captures.install(wait_for_import=False)
    assert not captures.look()

    def program() -> None:
        sys.modules["torch.cuda"]._queued_calls[0][0]()
        graph = CUDAGraph()
        graph.capture_begin()
        graph.capture_end()
        assert captures.kept().graphs == [b"graph"]

    return program


class Loader:
    """Of a module of torch or JAX."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._content)


def imports_torch_and_jax(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    contents: dict[str, dict[str, Any]] = {
        "torch.cuda.graphs": {"CUDAGraph": type("CUDAGraph", (), {})},
        "torch.optim.optimizer": {"_global_optimizer_post_hooks": {}, "register_optimizer_step_post_hook": print},
        "torch.profiler.profiler": {"profile": type("profile", (), {"step": print})},
        "torch.autograd.profiler": {"KinetoStepTracker": type("Tracker", (), {"increment_step": print})},
        "jax._src.profiler": {"StepTraceAnnotation": type("Annotation", (), {})},
    }
    for name in contents:
        monkeypatch.delitem(sys.modules, name, raising=False)
    finder = SimpleNamespace(find_spec=lambda name, *_where: ModuleSpec(name, Loader(contents[name])))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "meta_path", [finder])
    agent = Agent(StepCounter(), candidates=list)
    captures = GraphCaptures()
    captures.install(wake=agent.wake)
    StepHooks(StepCounter()).install()
    JaxStepHooks(StepCounter()).install()

    def program() -> None:
        for name in contents:
            for finder in list(sys.meta_path):
                spec = finder.find_spec(name, None)
                if spec is not None:
                    break
            spec.loader.exec_module(ModuleType(name))  # type: ignore[union-attr]
        assert len(sys.meta_path) == 1 and captures._owner is not None
        agent.abandon()

    return program


def steps(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    class Stepper:
        def step(self) -> None: ...

    class Annotation:
        def __init__(self, name: str) -> None: ...

    class Tracker:
        @classmethod
        def increment_step(cls, requester: str) -> None: ...

    counter = StepCounter()
    module(monkeypatch, "torch.profiler.profiler", profile=Stepper)
    module(monkeypatch, "torch.autograd.profiler", KinetoStepTracker=Tracker)
    module(monkeypatch, "jax._src.profiler", StepTraceAnnotation=Annotation)
    for hooks in (StepHooks(counter), JaxStepHooks(counter)):
        hooks.install(wait_for_import=False)

    def program() -> None:
        Tracker.increment_step("ours")
        Annotation("train")
        for _ in range(3):
            Stepper().step()
            counter.on_optimizer_step(Stepper(), (), {})
        assert counter.count > 0

    return program


def profiles_with_torch(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    class Profile:
        def _prepare_trace(self) -> None: ...
        def __exit__(self, *_error: object) -> None: ...

    module(monkeypatch, "torch.autograd.profiler", profile=Profile, _is_profiler_enabled=False)
    ended: list[str] = []
    agent = Agent(StepCounter(), candidates=list)
    plan: Any = SimpleNamespace(problems=[], missing=[], choices=[])
    request: Any = SimpleNamespace()
    recording = agent._recording = Recording(plan, request, ProfilerGuard())
    session: Any = SimpleNamespace(give_way=lambda: ended.append("gave way"))
    recording._yielding = (_Part("source", session),)
    guard = ProfilerGuard(agent._profiler_begins, agent.wake)
    guard.install()

    def program() -> None:
        profile = Profile()
        profile._prepare_trace()
        profile.__exit__(None, None, None)
        assert ended == ["gave way"]
        guard.remove()
        agent.abandon()

    return program


def profiles_with_jax(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    class Theirs:
        def stop(self) -> bytes:
            return b"profile"

    native = ModuleType("native")
    native.__dict__.update(ProfilerSession=Theirs, start_server=print)
    free = SimpleNamespace(acquire=lambda *_how: True, release=lambda: None)
    profiler: Any = SimpleNamespace(
        native=native, state=SimpleNamespace(profile_session=None, lock=free), server_runs=False
    )
    monkeypatch.setattr("kineto_agent.sources.jax.session_guard.profiles_by_itself", lambda: False)
    session: Any = object.__new__(xla_session.XlaSession)
    session.__dict__.update(_taken=None, _over=False, _longest_end_ns=0, _pieces=[], _count=0)
    session._pieces_lock, session._session_class, session._options = SessionGuard(profiler, print).lock, Theirs, None
    session._session_class = lambda _options: Theirs()
    plugin: Any = object.__new__(beside_jax.SessionBesideJax)
    plugin.__dict__.update(_taken=None, _session=SimpleNamespace(give_way=None), _worker=SimpleNamespace(call=max))

    def begins(what: str) -> None:
        session._make_way(what)
        plugin._jax_begins(what)

    guard = SessionGuard(profiler, begins)
    guard.enter(session._begin)

    def program() -> None:
        native.ProfilerSession()
        assert session._pieces == [b"profile"] and plugin._taken is not None
        guard.remove()

    return program


def records_its_allocations(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    torch, history = FakeTorch(), History()
    torch.install(monkeypatch)
    history.begin(torch.module, with_stack=False)

    def program() -> None:
        torch.module._C._cuda_record_memory_history(None, None, "all", 1)
        assert history.told()

    return program


def forks(_monkeypatch: pytest.MonkeyPatch) -> Prepared:
    def program() -> None:
        fork_warnings.because_of_ours("This process (pid=1) is multi-threaded, use of fork() may lead to deadlocks")
        fork_warnings._take_away()
        for after in AFTER_FORK:
            after()

    return program


AFTER_FORK: tuple[Callable[[], None], ...] = (
    lifecycle._after_fork_in_child,
    live_attach._after_fork_in_child,
    arena_writer._close_all_in_child,
    xla_session._after_fork_in_child,
    installed.PLUGINS.forget,
    plugin_session._close_all_in_child,
    call_tracing._after_fork_in_child,
    CAPTURES.forget,
    libtorch_symbols.quiet_kineto.after_fork_in_child,
    torch_profiler._after_fork_in_child,
)


def exits(_monkeypatch: pytest.MonkeyPatch) -> Prepared:
    def program() -> None:
        live_attach._at_exit()
        lifecycle._at_exit()

    return program


def meets_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    written: list[str] = []
    monkeypatch.setenv(env.AGENT_LOG, "/nowhere/agent.log")
    monkeypatch.setattr(debuglog, "log", lambda text, *values: written.append(text % values))
    monkeypatch.delitem(sys.modules, "traceback")

    def program() -> None:
        try:
            raise KeyError("ours")
        except KeyError:
            debuglog.log_exception("a hook")
        assert written and re.fullmatch(r"a hook: KeyError: 'ours'\n  .*:\d+ in program", written[0])

    return program


CASES: dict[Case, tuple[str, ...]] = {
    captures_a_graph: (
        "sources/torch/graph_captures.py: (self._cuda_comes, [])",
        "sources/torch/graph_captures.py: self._began",
        "sources/torch/graph_captures.py: self._ends",
        "sources/torch/graph_captures.py: self._ended",
        "system/class_hooks.py: self._shadow",
    ),
    imports_torch_and_jax: (
        "system/class_hooks.py: self._finder",
        "system/class_hooks.py: exec_and_tell",
        "sources/torch/graph_captures.py: self._found",
        "steps/torch_hooks.py: self._hook_optimizers",
        "steps/torch_hooks.py: self._hook_profiler",
        "steps/torch_hooks.py: self._hook_tracker",
        "steps/torch_hooks.py: self._hook",
    ),
    steps: (
        "steps/torch_hooks.py: after",
        "steps/torch_hooks.py: self._counter.on_optimizer_step",
        "steps/torch_hooks.py: self._stepped",
        "steps/counting.py: lambda _dead: counts.pop(key, None)",
    ),
    profiles_with_torch: (
        "sources/torch/profiler_guard.py: ours",
        "control/runner.py: self._profiler_begins",
        "control/runner.py: self.wake",
        "control/recording.py: self.give_way",
    ),
    profiles_with_jax: (
        "sources/jax/session_guard.py: ours",
        "sources/jax/xla_session.py: self._make_way",
        "sources/plugins/beside_jax.py: self._jax_begins",
    ),
    records_its_allocations: ("sources/memory/allocator_history.py: self._wrappers[name]",),
    forks: (
        "bootstrap/lifecycle.py: _after_fork_in_child",
        "bootstrap/live_attach.py: _after_fork_in_child",
        "sources/arena_writer.py: _close_all_in_child",
        "sources/jax/xla_session.py: _after_fork_in_child",
        "sources/plugins/installed.py: PLUGINS.forget",
        "sources/plugins/plugin_session.py: _close_all_in_child",
        "sources/python/call_tracing.py: _after_fork_in_child",
        "sources/torch/graph_captures.py: CAPTURES.forget",
        "sources/torch/libtorch_symbols.py: _level.after_fork_in_child",
        "sources/torch/torch_profiler.py: _after_fork_in_child",
        "system/fork_warnings.py: _take_away",
        "system/fork_warnings.py: _with([_FILTER].__add__)",
    ),
    exits: ("bootstrap/live_attach.py: _at_exit", "bootstrap/lifecycle.py: _at_exit"),
    meets_an_error_of_ours: (),
}
NOT_CALLED_HERE = {
    "system/threads.py: _ours.clear": "a function of C",
    "system/threads.py: _unnamed.clear": "a function of C",
    "system/c_functions.py: _mend_loader": "writes to the loader's own data",
    "sources/jax/pjrt_plugins.py: self._end": "needs a vendor's library, and waits for its session to end",
    "sources/jax/xla_session.py: self._at_exit": "the same",
    "sources/torch/torch_profiler.py: self._at_exit": "the same",
    "__init__.py: start": "the program calls it",
    "__init__.py: step": "the program calls it",
    "__init__.py: stop": "the program calls it",
}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with monkeypatch.context() as patch:
        yield Watched(patch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_thread_of_the_program_loads_opens_starts_and_waits_for_nothing(
    case: Case, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = case(monkeypatch)
    with watched:
        program()
    assert watched.seen == []


def test_every_function_that_runs_on_a_thread_of_the_program_is_called_by_such_a_test() -> None:
    called = {entry for entries in CASES.values() for entry in entries}
    assert called | set(NOT_CALLED_HERE) == python_entries()
    assert not called & set(NOT_CALLED_HERE)


def test_the_table_has_all_code_of_ours_that_runs_on_threads_of_the_program() -> None:
    rows = TABLE.read_text().partition(SECTION)[2]
    assert set(re.findall(r"`([\w/]+\.(?:py|c): [^`]+)`", rows)) == python_entries() | native_entries()
