"""The loader of a live attach, run here beside the test's own agent."""

import _thread
import builtins
import marshal
import posix
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any, Callable, Dict, List, Set

import kineto_agent
import pytest
from kineto_agent.system.gil_rests import Rests

SOURCE = Path(kineto_agent.__file__).parent / "bootstrap" / "loader.py"
_FUTURE_ANNOTATIONS = 0x1000000


class Standard:
    def __init__(self, give_way: Any) -> None:
        self._give_way = give_way  # called after each private copy, which even `time` may be
        self._found: Dict[str, Any] = {"time": time, "_thread": _thread}
        self.import_ = __import__

    def get(self, name: str) -> Any:
        self._give_way()
        return self._found.setdefault(name, "loaded")


def loader() -> Dict[str, Any]:
    """The globals of the loader; this thread is the agent's."""
    text = SOURCE.read_text().replace("from __future__ import annotations", "")
    names = {"builtins": builtins, "marshal": marshal, "posix": posix, "sys": sys, "Standard": Standard, "Rests": Rests}
    namespace: Dict[str, Any] = {"__name__": "kineto_loader", **names}
    exec(compile(text, "<kineto-loader>", "exec", _FUTURE_ANNOTATIONS), namespace)
    return namespace


def contents(**texts: str) -> Dict[str, Any]:
    """A made-up agent: its modules by their last names."""
    return {"kineto_agent": (True, []), **{"kineto_agent." + name: (False, [(1, texts[name])]) for name in texts}}


def modules(**texts: str) -> Any:
    """The modules of a made-up agent, by their last names; this thread is the agent's."""
    return loader()["_Modules"](contents(**texts)).__enter__()


class Gates(ModuleType):
    """What modules of the agent import in order to stay half made. Everything waits for a minute at most."""

    def __init__(self) -> None:
        super().__init__("gates")
        self.reached, self.opened = threading.Event(), threading.Event()
        self.times = 1  # so often

    def wait(self) -> None:
        self.times -= 1
        if self.times >= 0:
            self.reached.set()
            assert self.opened.wait(60)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Gates:
    made = Gates()
    monkeypatch.setitem(sys.modules, "gates", made)
    return made


def on_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def agent_loads(made: Any, name: str) -> threading.Thread:
    """A thread that is the agent's, and loads a module."""

    def load() -> None:
        with made:
            made.get(name)

    return on_thread(load)


def test_a_module_is_executed_when_it_is_imported_and_its_text_is_not_kept() -> None:
    made = modules(one="from kineto_agent import two\nvalue = two.value", two="value = 7", three="value = 8")
    assert made.get("kineto_agent.one").value == 7
    assert list(made.loaded) == ["kineto_agent", "kineto_agent.one", "kineto_agent.two"]
    left = {name: pieces for name, (_is_package, pieces) in made._contents.items() if pieces}
    assert left == {"kineto_agent.three": [(1, "value = 8")]}


def test_a_module_that_raised_can_be_imported_again() -> None:
    made = modules(one="import builtins\nbuiltins.no_such_name")
    for _ in range(2):
        with pytest.raises(AttributeError, match="no_such_name"):
            made.get("kineto_agent.one")


WAITS = "import gates\nearly = 1\ngates.wait()\nlate = 2\n"
OURS = {"system": "", "system.threads": "import gates\nis_ours = gates.is_ours\n"}


def test_a_thread_of_the_program_loads_nothing() -> None:
    made, found = modules(one="value = 7", two="value = 8"), []
    made.get("kineto_agent.one")

    def program() -> None:
        found.append(made.import_("kineto_agent", fromlist=("one",)).one.value)
        found.append(made._standard.get("time"))
        for load in (made.get, made._standard.get):
            with pytest.raises(ImportError, match="on threads of the program"):
                load("kineto_agent.two")

    on_thread(program).join()
    assert found == [7, time]
    assert list(made.loaded) == ["kineto_agent", "kineto_agent.one"]


def test_a_thread_of_the_program_neither_sees_a_half_made_module_nor_waits_for_it(gates: Gates) -> None:
    made = modules(one=WAITS)
    made.__exit__()
    agent = agent_loads(made, "kineto_agent.one")
    assert gates.reached.wait(60)
    with pytest.raises(ImportError, match="on threads of the program"):
        made.import_("kineto_agent.one", fromlist=("early",))
    gates.opened.set()
    agent.join()
    assert made.import_("kineto_agent.one", fromlist=("late",)).late == 2


def test_a_module_is_seen_once_all_that_was_loaded_for_it_is_whole(gates: Gates) -> None:
    """In a circle a module may be done that refers to one that is not."""
    made = modules(one="from kineto_agent import two\n" + WAITS, two="import kineto_agent.one")
    made.__exit__()
    agent = agent_loads(made, "kineto_agent.one")
    assert gates.reached.wait(60)
    assert "kineto_agent.two" not in made.loaded
    with pytest.raises(ImportError):
        made.get("kineto_agent.two")
    gates.opened.set()
    agent.join()
    assert made.get("kineto_agent.two").kineto_agent.one is made.get("kineto_agent.one")


class SaysThatItWaits:
    """A lock."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.waits, self.release = lock, threading.Event(), lock.release

    def acquire(self, timeout: float) -> bool:
        self.waits.set()
        return bool(self._lock.acquire(timeout=60 if timeout else 0))


def test_another_thread_of_the_agent_waits_until_a_module_is_whole(gates: Gates) -> None:
    ours: Set[int] = set()
    gates.is_ours = ours.__contains__  # type: ignore[attr-defined]
    made, found = modules(one=WAITS, **OURS), []
    made.get("kineto_agent.system.threads")
    agent = agent_loads(made, "kineto_agent.one")
    assert gates.reached.wait(60)
    lock = made._turn._lock = SaysThatItWaits(made._turn._lock)

    def other() -> None:
        ours.add(_thread.get_ident())
        found.append(made.get("kineto_agent.one").late)

    thread = on_thread(other)
    assert lock.waits.wait(60)
    assert not found
    gates.opened.set()
    agent.join()
    thread.join()
    assert found == [2]


def test_a_thread_of_the_agent_does_not_wait_for_ever(gates: Gates) -> None:
    made = modules(one=WAITS)
    agent = agent_loads(made, "kineto_agent.one")
    assert gates.reached.wait(60)
    made.get.__globals__["_WAIT_S"] = 0
    with pytest.raises(ImportError, match="another thread of the agent is loading"):
        made.get("kineto_agent.one")
    gates.opened.set()
    agent.join()


def test_an_abandoned_attach_that_ends_leaves_the_next_one_its_right_to_load(gates: Gates) -> None:
    made = modules(one=WAITS, two="value = 8")
    abandoned = agent_loads(made, "kineto_agent.one")
    assert gates.reached.wait(60)
    with made:
        gates.opened.set()
        abandoned.join()
        assert made.get("kineto_agent.two").value == 8


def test_a_forked_child_can_load_what_its_parent_was_loading(gates: Gates) -> None:
    made = modules(one=WAITS)
    agent = agent_loads(made, "kineto_agent.one")
    assert gates.reached.wait(60)
    made._pid = 0  # as in a child, which does not have that thread
    with made:
        assert made.get("kineto_agent.one").late == 2
    gates.opened.set()
    agent.join()


class Held:
    """What a child that is forked meanwhile must close, as the bootstrap notes it."""

    def __init__(self, noted: List[Any], x: Any) -> None:
        self.x, self._noted, self.closed = x, noted, False
        noted.append(self)

    def close(self) -> None:
        self.closed = True
        self._noted.remove(self)


def test_the_files_of_modules_are_closed_and_the_agent_owns_its_channel_and_its_library() -> None:
    live = {"bootstrap": "", "bootstrap.live_attach": "end = run = lambda *_: None"}
    forks = {"system": "", "system.fork_warnings": "keep_away = let_through = lambda: None"}
    header = {"descriptors": ["sources", "code", "library"], "digest": "", "cache_tag": "another", "magic": b""}
    noted: List[Any] = []
    given = loader()
    given.update(HEADER=header, native=lambda *_: None, turns=0, dlopen=0, dlsym=0)
    with TemporaryFile(buffering=0) as sources:
        sources.write(marshal.dumps(contents(**live, **forks)))
        descriptors = [sources.fileno(), -2, -3]
        held = [Held(noted, x) for x in (None, "channel", *descriptors)]  # None: of another attach
        given["load"]({"open": noted}, "channel", descriptors)
    assert [each.closed for each in held] == [False, False, True, True, False]
    assert noted == held[:1]
