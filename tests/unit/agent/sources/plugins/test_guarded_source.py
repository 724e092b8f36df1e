"""What a plug-in does wrong becomes a reason, whatever it is, and never reaches the agent or the program."""

import contextlib
import os
import struct
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, FrozenSet, Iterator, List, Tuple

import pytest
from kineto_agent.protocol.plugin_bundle import Plugin, Signs
from kineto_agent.protocol.records import DECLARED_FORMAT
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceRequest
from kineto_agent.sources.plugins import guarded_source, plugin_session, worker
from kineto_agent.sources.plugins.guarded_source import PluginSource, ProcessView
from kineto_agent.sources.plugins.plugin_session import PluginSession
from support.agent.agent_daemon import ArenaReader
from support.agent.plugins import GOOD, NOWHERE, bad, one_piece, plugin
from support.waiting import scaled, until

REQUEST = SourceRequest(frozenset(["toy_kernel"]), 1 << 20, {})
SHORT_S = 0.3
DEADLINES = {
    "activity_types": (guarded_source, "ASK_S"),
    "prepare": (plugin_session, "PREPARE_S"),
    "start": (plugin_session, "START_S"),
    "stop": (plugin_session, "STOP_S"),
    "close": (plugin_session, "CLOSE_S"),
}
NOTHING: FrozenSet[str] = frozenset()


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What a plug-in that hangs waits for, as sys.toy_leave. No thread is left behind."""
    event, before = threading.Event(), threads()
    monkeypatch.setattr(sys, "toy_leave", event, raising=False)
    yield event
    event.set()
    until(lambda: threads() <= before, "the threads have ended")


def seen(made: Plugin) -> PluginSource:
    source = PluginSource(made)
    source.look(ProcessView())
    return source


def failure(source: PluginSource) -> Tuple[str, str]:
    """Why it offers nothing."""
    assert source.activity_types() == []
    trouble = source.trouble(NOTHING)
    assert trouble is not None
    return trouble.reason_code, trouble.reason


def recorded(source: PluginSource) -> List[Any]:
    """Every outcome of one recording with all calls: the code and the text of a SourceError, else "fine"."""
    steps: List[Any] = []
    assert source.activity_types() == ["toy_kernel"]

    def step(call: Any) -> Any:
        try:
            result = call()
        except SourceError as exc:
            steps.append((exc.reason_code, exc.reason))
            return None
        steps.append("fine")
        return result

    session = step(lambda: source.prepare(REQUEST))
    if session is not None:
        step(session.start)
        if steps[-1] == "fine":  # as the recording does
            step(session.stop)
        step(session.close)
    return steps


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_good_one_records_what_its_schema_declares() -> None:
    source = seen(plugin(conflicts=frozenset(["torch"])))
    assert source.activity_types() == ["toy_kernel"]
    assert source.trouble(NOTHING) is None and source.would_yield(REQUEST)
    session = source.prepare(REQUEST)
    assert (session.format, session.metadata["way"], session.yields) == (DECLARED_FORMAT, "by hand", True)
    assert list(session.metadata["schema"]["types"]) == ["toy_kernel"]
    reader = ArenaReader(os.dup(session.arena_fd))
    session.start()
    outcome = session.stop()
    assert outcome.counts == SourceCounts(3, 96, 0)
    assert outcome.metadata == {"version": "7"}
    (records,) = reader.take()
    assert [fields[:2] + fields[4:] for fields in struct.iter_unpack("<IIqqII", records)] == [
        (1, 32, number, 0) for number in range(3)
    ]
    session.close()
    reader.close()


def test_nothing_of_it_is_executed_where_its_accelerator_is_not() -> None:
    source = seen(plugin("raise SystemExit", signs=NOWHERE))
    assert source.activity_types() == []
    assert source.trouble(NOTHING) is None
    assert source.why_missing() == "toy finds no sign of its accelerator in this process (modules no_such_module)"


def test_it_is_told_when_the_process_lacks_the_variable_that_it_needs_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = seen(plugin(needs_from_start="TOY_PROFILE=1"))
    assert source.activity_types() == []
    assert source.needs_start() == "toy records only processes that were started with the variable TOY_PROFILE=1"
    monkeypatch.setenv("TOY_PROFILE", "1")
    assert source.activity_types() == ["toy_kernel"]
    assert source.needs_start() == ""


@pytest.mark.parametrize(
    ("source", "code", "text"),
    [
        ("1 +", "PLUGIN_FAILED", "loading it: raised SyntaxError: "),
        ("raise SystemExit(3)", "PLUGIN_FAILED", "loading it: raised SystemExit: 3"),
        ("class Odd(BaseException): pass\nraise Odd('no')", "PLUGIN_FAILED", "loading it: raised Odd: no"),
        ("import _thread\n_thread.exit()", "PLUGIN_FAILED", "loading it: raised SystemExit: "),
        ("SURCE = 1", "PLUGIN_FAILED", "loading it: raised AttributeError: "),
        ("import numpy", "PLUGIN_FAILED", "loading it: raised ImportError: a plug-in can import only the"),
        ("import kineto_agent", "PLUGIN_FAILED", "loading it: raised ImportError: a plug-in can import only the"),
        ("from . import other", "PLUGIN_FAILED", "loading it: raised ImportError: the plug-in toy has no file"),
        (bad("activity_types", "return 1 / 0"), "PLUGIN_FAILED", "activity_types(): raised ZeroDivisionError: "),
        (bad("activity_types", "return ['kernel']"), "PLUGIN_INVALID", "activity_types(): returned the activity type "
         "kernel, which its schema does not declare"),
        (bad("activity_types", "return [7]"), "PLUGIN_INVALID", "activity_types(): returned activity types that"),
        (bad("activity_types", "return iter(lambda: 'toy_kernel', 0)"), "PLUGIN_INVALID", "activity_types(): returned "
         "more than 64 activity types"),
        (bad("activity_types", "raise SourceError('X', 'old driver')"), "PLUGIN_DECLINED", "activity_types(): old"),
    ],
)  # fmt: skip
def test_one_that_fails_before_a_recording_offers_nothing(source: str, code: str, text: str) -> None:
    found = failure(seen(plugin(source)))
    assert found[0] == code
    assert found[1].startswith(text)


@pytest.mark.parametrize(
    ("method", "body", "code", "text"),
    [
        ("prepare", "raise KeyboardInterrupt", "PLUGIN_FAILED", "prepare(): raised KeyboardInterrupt: "),
        ("prepare", "raise SourceError('X', 'no device')", "PLUGIN_DECLINED", "prepare(): no device"),
        ("prepare", "return None", "PLUGIN_FAILED", "prepare(): raised AttributeError: "),
        ("start", "raise MemoryError", "PLUGIN_FAILED", "start(): raised MemoryError: "),
        ("stop", "raise GeneratorExit", "PLUGIN_FAILED", "stop(): raised GeneratorExit: "),
        ("stop", "return None", "PLUGIN_FAILED", "stop(): raised AttributeError: "),
        ("stop", "return SourceOutcome((3, 96), {}, [], 0, 0)", "PLUGIN_INVALID", "stop(): returned 2 counts"),
        ("stop", "return SourceOutcome((3, -1, 0), {}, [], 0, 0)", "PLUGIN_INVALID", "stop(): returned -1 as a count"),
        ("stop", "return SourceOutcome((1 << 62, 96, 0), {}, [], 0, 0)", "PLUGIN_INVALID", "stop(): reported"),
        ("stop", "return SourceOutcome((0, 0, 0), {'a': self}, [], 0, 0)", "PLUGIN_INVALID", "stop(): returned meta"),
        ("stop", "return SourceOutcome((0, 0, 0), {'a': 'b' * 9000}, [], 0, 0)", "PLUGIN_INVALID", "stop(): ret"),
        ("stop", "return SourceOutcome((0, 0, 0), {}, ['w'] * 99, 0, 0)", "PLUGIN_INVALID", "stop(): returned more"),
        ("stop", "return SourceOutcome((0, 0, 0), {}, [], 0.5, 0)", "PLUGIN_INVALID", "stop(): returned 0.5 as"),
        ("close", "raise RuntimeError('busy')", "PLUGIN_FAILED", "close(): raised RuntimeError: busy"),
    ],
)  # fmt: skip
def test_one_that_fails_while_it_records_is_named(method: str, body: str, code: str, text: str) -> None:
    before = descriptors()
    failed = [step for step in recorded(seen(plugin(bad(method, body)))) if step != "fine"]
    assert [step[0] for step in failed] == [code]
    assert failed[0][1].startswith(text)
    assert descriptors() <= before  # what an earlier test has left may have gone


LIES = {
    "self.arena_fd = 1": "announced 1, which cannot be its arena's descriptor",
    "self.arena_fd = 'x'": "announced 'x', which cannot be its arena's descriptor",
    "import os; self.arena_fd = os.open('/dev/null', 0)": "which is not a memfd",
    "import os; self.arena_fd = os.memfd_create('x')": "announced memory whose size is not sealed",
    "import os; os.pwrite(self.arena.fd, b'x' * 64, 0)": "announced memory without an arena's header",
    "self.arena.close(); self.arena = ArenaWriter('x', 1 << 28, 9, 4 << 20); self.arena_fd = self.arena.fd": "bytes",
    "self.format = 'cupti/1'": "announced records of the format 'cupti/1', not declared/1",
    "self.metadata = [1]": "returned metadata that are not a JSON object",
}  # fmt: skip


@pytest.mark.parametrize("line", LIES)
def test_memory_that_is_no_arena_is_not_announced(line: str) -> None:
    if "memfd_create" in line and not hasattr(os, "memfd_create"):
        pytest.skip("this Python was built against an old C library")
    source = GOOD.replace('self.metadata = {"way": "by hand"}', 'self.metadata = {"way": "by hand"}; ' + line)
    ((code, text),) = recorded(seen(plugin(source)))
    assert code == "PLUGIN_INVALID"
    assert LIES[line] in text


# ------------------------------------------------------------ one that hangs

HANGS = "import sys; sys.toy_leave.wait(600)"
SPINS = "[None for _ in iter(int, 1)]"


@pytest.mark.usefixtures("leave")
@pytest.mark.parametrize("method", DEADLINES)
def test_one_that_hangs_is_given_up_and_never_asked_again(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*DEADLINES[method], SHORT_S)
    source = seen(plugin(bad(method, HANGS)))
    if method == "activity_types":
        found = failure(source)
    else:
        (found,) = (step for step in recorded(source) if step != "fine")
    text = "did not return within 0.3 s; this plug-in is not used again in this process"
    assert found == ("PLUGIN_TIMEOUT", "%s(): %s" % (method, text))
    code, reason = failure(source)
    assert code == "PLUGIN_TIMEOUT"
    assert reason.startswith("%s() did not return within" % method)


@pytest.mark.usefixtures("leave")
def test_one_that_computes_for_ever_is_interrupted_so_that_it_takes_no_time_from_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin_session, "START_S", SHORT_S)
    before = threads()
    source = seen(plugin(bad("start", SPINS)))
    assert recorded(source)[1][0] == "PLUGIN_TIMEOUT"
    until(lambda: threads() <= before, "its thread has ended")


def test_what_a_late_start_has_begun_is_undone(leave: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the vendor's library would record until the process ends."""
    monkeypatch.setattr(plugin_session, "START_S", SHORT_S)
    source = GOOD.replace(
        "    def start(self):", "    def start(self):\n        import sys; sys.toy_begun.set(); " + HANGS
    )
    source = source.replace("self.arena.close()", "self.arena.close(); import sys; sys.toy_closed.set()")
    begun, closed, before = threading.Event(), threading.Event(), descriptors()
    monkeypatch.setattr(sys, "toy_begun", begun, raising=False)
    monkeypatch.setattr(sys, "toy_closed", closed, raising=False)
    assert recorded(seen(plugin(source)))[1][0] == "PLUGIN_TIMEOUT"
    assert not (begun.is_set() and closed.is_set())  # on a busy machine it may not have come so far
    leave.set()
    assert closed.wait(scaled(30))
    until(lambda: descriptors() <= before, "the arena is closed")


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_thread_that_is_not_needed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "IDLE_S", 0.05)
    before = threads()
    source = seen(plugin())
    assert recorded(source) == ["fine"] * 4
    until(lambda: threads() <= before, "its thread has ended")
    assert recorded(source) == ["fine"] * 4


def test_start_and_stop_come_from_the_same_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "IDLE_S", 0.01)
    noted = "        import _thread; self.ident = _thread.get_ident()\n        for number in"
    text = GOOD.replace("        for number in", noted)
    text = text.replace('{"version": "7"}', '{"same": __import__("_thread").get_ident() == self.ident}')
    source = seen(plugin(text))
    source.activity_types()
    session: PluginSession = source.prepare(REQUEST)
    session.start()
    time.sleep(0.1)  # longer than an idle thread stays
    assert session.stop().metadata == {"same": True}
    session.close()


# ------------------------------------------------------------ giving way, and forks


def test_one_that_does_not_conflict_is_not_asked_to_give_way() -> None:
    source = seen(plugin(bad("give_way", "raise RuntimeError('not asked')")))
    source.activity_types()
    session = source.prepare(REQUEST)
    session.start()
    session.give_way()
    assert session.stop().counts.records == 3
    session.close()


def test_one_that_cannot_give_way_says_so_when_it_is_stopped() -> None:
    source = seen(plugin(bad("give_way", "raise RuntimeError('busy')"), conflicts=frozenset(["torch"])))
    source.activity_types()
    session = source.prepare(REQUEST)
    session.start()
    session.give_way()
    with pytest.raises(SourceError) as caught:
        session.stop()
    assert (caught.value.reason_code, caught.value.reason) == ("PLUGIN_FAILED", "give_way(): raised RuntimeError: busy")
    session.close()


@pytest.mark.parametrize(
    ("detach", "warning"),
    [
        ("full", []),
        ("idle", ["toy: the accelerator's library stays attached to the process, without recording"]),
        ("never", ["toy: the accelerator's library keeps recording in the process: its plug-in cannot stop it"]),
    ],
)
def test_what_stays_behind_is_told(detach: str, warning: List[str]) -> None:
    source = seen(plugin(detach=detach))
    source.activity_types()
    session = source.prepare(REQUEST)
    session.start()
    assert session.stop().warnings == warning
    session.close()
    assert source.on_request == (frozenset(["toy_kernel"]) if detach == "never" else frozenset())


def open_files() -> List[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return found


def test_a_forked_child_closes_the_arena() -> None:
    source = seen(plugin())
    source.activity_types()
    session = source.prepare(REQUEST)
    assert any("kineto-toy" in file for file in open_files())
    child = os.fork()
    if child == 0:
        os._exit(any("kineto-toy" in file for file in open_files()))
    assert os.waitpid(child, 0)[1] == 0
    session.close()


def test_its_files_import_each_other_and_the_standard_library_only() -> None:
    helper = (
        "import json\nfrom typing import NamedTuple\nclass Pair(NamedTuple):\n    a: int\n    b: 'int | None' = None\n"
    )
    source = (
        GOOD + "\nfrom . import helper\nfrom .helper import Pair\nassert helper.Pair is Pair and Pair(1).b is None\n"
    )
    made = seen(plugin(source, files={"helper.py": one_piece(helper, annotations=True)}))
    assert made.activity_types() == ["toy_kernel"], made.trouble(NOTHING)
    assert not [name for name in sys.modules if "kineto_plugin" in name or name == "helper"]


MAPS = """\
7f00-7f01 r-xp 00000000 08:01 123   /usr/lib/libnpu_runtime.so.7
7f01-7f02 r--p 00000000 08:01 124   /opt/with space/libother.so (deleted)
7f02-7f03 rw-p 00000000 00:00 0
7f03-7f04 r-xp 00000000 00:00 0     [vdso]
"""


@pytest.fixture
def view(tmp_path: Path) -> ProcessView:
    (tmp_path / "maps").write_text(MAPS)
    return ProcessView(str(tmp_path / "maps"))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("libnpu_runtime.so*", True), ("libnpu*", True), ("libother.so", True), ("libNPU*", False), ("runtime.so", False)],
)
def test_libraries_are_mapped_files_by_name(view: ProcessView, pattern: str, found: bool) -> None:
    assert view.matches(Signs(libraries=(pattern,))) == found


def test_maps_that_cannot_be_read_show_nothing() -> None:
    assert not ProcessView("/no/such/file").matches(Signs(libraries=("*",)))


def test_device_files_exist(view: ProcessView, tmp_path: Path) -> None:
    (tmp_path / "npu0").touch()
    assert view.matches(Signs(device_files=("%s/npu0" % tmp_path,)))
    assert view.matches(Signs(device_files=("/dev/no_such", "%s/npu[0-9]" % tmp_path)))
    assert not view.matches(Signs(device_files=("%s/npu?x" % tmp_path, "/no/such/folder/*")))


def test_variables_are_set_or_have_a_value(view: ProcessView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_MODE", "training")
    assert view.matches(Signs(environment=("NPU_MODE",)))
    assert view.matches(Signs(environment=("NPU_MODE=train*",)))
    assert not view.matches(Signs(environment=("NPU_MODE=eval", "NPU")))
    assert "NPU" not in os.environ


def test_modules_are_those_that_the_program_has_imported(view: ProcessView, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not view.matches(Signs(modules=("torch_npu",)))
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    assert view.matches(Signs(modules=("torch_npu",)))


def test_each_kind_of_sign_must_match(view: ProcessView) -> None:
    assert not view.matches(Signs(libraries=("libnpu*",), modules=("torch_npu",)))
    assert view.matches(Signs(libraries=("libnpu*",), modules=("sys",)))
