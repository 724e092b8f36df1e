"""The standard library as an attached agent gets it, loaded here beside the test's own."""

import builtins
import copyreg
import ctypes
import gc
import importlib.util
import os
import re
import select
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List

import kineto_agent
import pytest
from support.agent.python_child import run_python
from support.machine.native import FAKES, build

SOURCE = Path(kineto_agent.__file__).parent / "bootstrap" / "standard_library.py"
_FUTURE_ANNOTATIONS = 0x1000000


def native(path: bytes, _symbol: None, address: int, size: int, _number: int) -> None:
    """What the bootstrap gives for reading a file."""
    data = Path(os.fsdecode(path)).read_bytes()[:size]
    ctypes.memmove(address, len(data).to_bytes(8, sys.byteorder) + data, 8 + len(data))


def own(spec: Any) -> Any:
    """What it gives for making an extension module; what was in sys.modules stays."""
    before = sys.modules.get(spec.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop(spec.name, None)
    sys.modules.update({} if before is None else {spec.name: before})
    return module


def make_standard(**given: int) -> Any:
    text = SOURCE.read_text().replace("from __future__ import annotations", "")
    namespace: Dict[str, Any] = {"__name__": "kineto_loader", "modules": sys.modules, "native": native, "own": own}
    program = ctypes.CDLL(None)
    addresses = {name: ctypes.cast(getattr(program, name), ctypes.c_void_p).value for name in ("dlopen", "dlsym")}
    namespace.update(high=0, **{**addresses, **given})
    exec(compile(text, "<kineto-loader>", "exec", _FUTURE_ANNOTATIONS), namespace)
    return namespace["Standard"](lambda: None)


@pytest.fixture
def standard() -> Any:
    return make_standard()


@pytest.fixture
def shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A module of the program with that name, first in sys.path and not imported yet."""

    def make(name: str) -> None:
        (tmp_path / (name + ".py")).write_text("raise AssertionError('it is executed')")
        monkeypatch.delitem(sys.modules, name, raising=False)

    monkeypatch.syspath_prepend(tmp_path)
    return make


@pytest.mark.parametrize("name", ["select", "json", "mmap", "fcntl", "contextlib", "re", "tempfile", "struct"])
def test_a_module_that_the_program_shadows_is_loaded_from_the_interpreters_folder(
    standard: Any, shadow: Callable[[str], None], name: str
) -> None:
    shadow(name)
    found = standard.get(name)
    assert found.__spec__.origin == "built-in" or not str(found.__file__).startswith(str(sys.path[0]))
    assert name not in sys.modules


def test_what_c_code_imports_is_found_without_the_gil_in_hand_in_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As _ctypes does it for each structure from 3.14 on. Who has the loader's lock may need the GIL."""
    witness = ctypes.CDLL(str(build("gil_witness.so", [FAKES / "loader" / "gil_witness.c"], ["-fPIC", "-shared"])))
    standard = make_standard(dlsym=ctypes.cast(witness.dlsym, ctypes.c_void_p).value or 0)
    monkeypatch.setenv("GIL_WITNESS", str(tmp_path / "seen"))

    def imports() -> None:
        ctypes.CDLL(None).prctl(15, b"kineto-x")  # it looks at threads of this name only
        standard.import_("json", None, None, ["__doc__"], 0)

    thread = threading.Thread(target=imports)
    thread.start()
    thread.join()
    assert not (tmp_path / "seen").exists(), (tmp_path / "seen").read_text()


def test_a_module_of_the_programs_in_sys_modules_is_left_there(standard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type(sys)("json")
    theirs.__file__ = "/home/someone/json.py"
    monkeypatch.setitem(sys.modules, "json", theirs)
    assert standard.get("json").loads("[1]") == [1]
    assert sys.modules["json"] is theirs


def test_a_program_that_has_replaced_len_has_not_replaced_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "len", lambda things, own=len: own(things))
    assert make_standard().get("select").poll is select.poll


@pytest.fixture
def closed(standard: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the standard library is, which this process may not look at."""
    folder = tmp_path_factory.mktemp("library")
    standard._folders = [str(folder / "closed")]
    folder.chmod(0)
    own = os.geteuid()
    os.seteuid(own or 65534)
    yield str(folder / "closed")
    os.seteuid(own)
    folder.chmod(0o700)


def test_a_library_that_the_process_may_not_read_is_told(
    standard: Any, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "json")
    with pytest.raises(ImportError) as caught:
        standard.import_("json", {}, {}, (), 0)
    assert str(caught.value) == "standard library: no json; EACCES %d %s" % (os.geteuid(), closed)
    assert "json" not in sys.modules


def test_the_programs_own_modules_are_found_all_the_same(
    standard: Any, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert closed
    monkeypatch.setitem(sys.modules, "ours", type(sys)("ours"))
    assert standard.import_("ours", {}, {}, (), 0) is sys.modules["ours"]


def test_a_module_that_the_program_is_still_importing_is_waited_for(
    standard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: Any = importlib.util.find_spec("json")
    theirs = importlib.util.module_from_spec(spec)
    spec._initializing = True  # as the import statement does
    monkeypatch.setitem(sys.modules, "json", theirs)

    def complete(_seconds: float) -> None:
        spec.loader.exec_module(theirs)
        spec._initializing = False

    monkeypatch.setattr(standard.get("time"), "sleep", complete)
    assert standard.get("json") is theirs


def test_a_module_that_never_becomes_complete_is_taken_as_it_is(standard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = importlib.util.find_spec("json")
    theirs = importlib.util.module_from_spec(spec)
    spec._initializing = True
    monkeypatch.setitem(sys.modules, "json", theirs)
    pauses: List[float] = []
    monkeypatch.setattr(standard.get("time"), "sleep", pauses.append)
    assert standard.get("json") is theirs
    assert sum(pauses) == pytest.approx(1)


def test_a_private_copy_changes_nothing_of_how_the_program_pickles(
    standard: Any, shadow: Callable[[str], None]
) -> None:
    before = dict(copyreg.dispatch_table)
    shadow("re")
    private = standard.get("re")
    assert copyreg.dispatch_table == before
    assert private.compile("a+").match("aa") and private is not re


@pytest.mark.parametrize("name", ["ctypes", "json", "tempfile"])
def test_nothing_of_the_programs_imports_for_a_private_copy(
    standard: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked: List[str] = []
    theirs, thread = builtins.__import__, threading.get_ident()

    def note(wanted: str) -> None:
        if threading.get_ident() == thread:  # other tests may have left threads behind
            asked.append(wanted)

    class Finder:
        def find_spec(self, wanted: str, *_places: Any) -> None:
            note(wanted)

    def import_(wanted: str, *rest: Any, **more: Any) -> Any:
        note(wanted)
        return theirs(wanted, *rest, **more)

    for each in [each for each in sys.modules if each.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.setattr(builtins, "__import__", import_)
    gc.disable()  # so may objects whose end imports something
    try:
        found = standard.get(name)
    finally:
        gc.enable()
    monkeypatch.undo()
    assert (found.__name__, asked) == (name, [])


def test_a_real_module_is_shared(standard: Any) -> None:
    assert standard.get("weakref") is sys.modules["weakref"]


def test_what_is_no_part_of_the_standard_library_is_imported_as_ever(standard: Any) -> None:
    assert standard.import_("pytest", {}, {}, None, 0) is pytest


@pytest.mark.parametrize(("name", "function"), [("time", "sleep"), ("_thread", "start_new_thread"), ("select", "poll")])
def test_a_function_that_the_program_has_replaced_is_the_original(
    standard: Any, monkeypatch: pytest.MonkeyPatch, name: str, function: str
) -> None:
    module = __import__(name)

    def theirs(*_arguments: Any) -> None:
        raise AssertionError("it is called")

    monkeypatch.setattr(module, function, theirs)
    if sys.version_info < (3, 10):
        gc.unfreeze()  # as in a program that has not frozen anything
    assert type(getattr(standard.get(name), function)) is type(len)
    assert getattr(module, function) is theirs


@pytest.mark.skipif(sys.version_info >= (3, 10), reason="later ones make the module anew")
def test_a_replaced_function_whose_original_is_frozen_is_not_called_instead(
    standard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("select.poll", lambda: None)
    gc.freeze()
    with pytest.raises(ImportError, match=r"the program has replaced select\.poll"):
        standard.get("select")


def test_os_has_the_systems_functions_and_the_programs_environment(
    standard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "read", None)
    found = standard.get("os")
    assert found.read is sys.modules["posix"].read
    assert found.environ is os.environ


def test_type_hints_are_equal_when_they_are_written_alike(standard: Any) -> None:
    hints = standard.get("typing")
    assert hints.Dict[str, hints.Any] == hints.Dict[str, hints.Any]
    assert hints.Dict[str, int] != hints.Dict[str, str]
    assert {hints.List[str]: 1}[hints.List[str]] == 1


def test_named_tuples_have_fields_defaults_and_methods(standard: Any) -> None:
    namespace: Dict[str, Any] = {"NamedTuple": standard.get("typing").NamedTuple, "__name__": "agent"}
    exec("class Point(NamedTuple):\n x: int\n y: str = 'b'\n def both(self): return (self.x, self.y)", namespace)
    point = namespace["Point"](1)
    assert (point, point.both(), point._asdict()) == ((1, "b"), (1, "b"), {"x": 1, "y": "b"})
    assert dict(type(point).__annotations__) == {"x": int, "y": str}


def test_a_clock_that_the_program_holds_goes_on_for_the_agent(standard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert standard.get("time").time_ns() > 0


@pytest.mark.parametrize("function", ["time.sleep", "select.poll", "_thread.allocate_lock"])
def test_what_the_program_replaces_later_stays_original_for_the_agent(
    standard: Any, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    module, _dot, name = function.partition(".")
    ours = standard.get(module)
    original = getattr(ours, name)
    monkeypatch.setattr(function, lambda: None)
    assert getattr(ours, name) is original


@pytest.mark.skipif(sys.version_info >= (3, 10), reason="later ones make the module anew")
@pytest.mark.parametrize("kept", [True, False])
def test_among_many_objects_originals_are_found_where_gevent_keeps_them(
    standard: Any, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    gevent: Any = ModuleType("gevent.monkey")
    gevent.saved = {"select": {"poll": select.poll}} if kept else {}
    monkeypatch.setitem(sys.modules, "gevent.monkey", gevent)
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: 10_000_000)
    monkeypatch.setattr(gc, "get_referrers", None)
    monkeypatch.setattr("select.poll", lambda: None)
    if kept:
        assert standard.get("select").poll is gevent.saved["select"]["poll"]
    else:
        with pytest.raises(ImportError, match=r"the program has replaced select\.poll"):
            standard.get("select")


INTERRUPTED = """
import atexit, runpy, sys
sys.path.append(sys.argv[2])
standard = runpy.run_path(sys.argv[1])["make_standard"]()
def late():
    class Made(standard.get("typing").NamedTuple):
        first: int
        second: int = 2
    assert Made(first=1) == (1, 2)
    assert standard.get("collections").namedtuple("A", "b c", defaults=[3])(1).c == 3
atexit.register(late)
raise KeyboardInterrupt
"""


def test_a_class_that_is_made_while_an_interrupt_ends_the_program_leaves_its_exit_status() -> None:
    ran = run_python(["-c", INTERRUPTED, __file__, str(Path(__file__).parents[3])])
    assert (ran.returncode, ran.stderr.count("Error")) == (-signal.SIGINT, 0)


@pytest.mark.parametrize("before", [[], [None]], ids=["absent", "not to be imported"])
def test_a_module_that_enters_the_programs_modules_by_itself_leaves_what_was_there(before: List[None]) -> None:
    class Loader:
        create_module = staticmethod(lambda spec: None)
        exec_module = staticmethod(lambda module: sys.modules.update({module.__name__: module}))

    spec = importlib.util.spec_from_loader("enters_by_itself", Loader())  # type: ignore[arg-type]
    for each in before:
        sys.modules["enters_by_itself"] = each  # type: ignore[assignment]
    make_standard()._get.__globals__["_native"](spec)
    try:
        assert [each for name, each in sys.modules.items() if name == "enters_by_itself"] == before
    finally:
        sys.modules.pop("enters_by_itself", None)
