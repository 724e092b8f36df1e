"""The sampler reads an interpreter only by offsets that are right for it, and says so where they are not."""

import contextlib
import gc
import sys
import threading
import time
from pathlib import Path
from types import CodeType
from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest
from kineto_agent.protocol.records import SPACE_PYTHON_BYTECODE, WAIT_COLLECTOR
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.python import sampler_binding as module
from kineto_agent.sources.python.interpreter_layouts import GIL_UNKNOWN, StackLayout, known, layout
from support.agent.stack_recorder import Recorder, Waiter, no_collections, of_thread, plain

KINDS = ["frames", "gil", "line_table_kind", "least_shim_owner"]
# Their neighbours lead to the same in a process with one interpreter, or there is another way to the same.
UNNOTICED = ["runtime_interpreters", "interpreter_threads", "interpreter_next", "thread_next", "thread_native_id"]
NEEDED = [name for name in StackLayout._fields if name not in (*KINDS, *UNNOTICED, "frame_owner")]
OF_CALLEES = ["code_names", "code_variables", "tuple_items"]
NEEDED = [
    name for name in NEEDED if not name.startswith("gil_") and name not in ("interpreter_collecting", *OF_CALLEES)
]
UNUSED: Dict[int, List[str]] = {  # by minor version
    minor: (["code_bytecode"] if minor < 11 else ["instruction_scale"])
    + (["cframe_frame"] if minor not in (11, 12) else [])
    for minor in range(9, 16)
}


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[StackLayout], StackLayout]) -> None:
    right = layout

    def wrong(version: Any, table: bytes) -> StackLayout:
        found = right(version, table)
        assert found is not None
        return change(found)

    monkeypatch.setattr(module, "layout", wrong)


def test_this_interpreter_is_read_rightly() -> None:
    sampler = module.checked()
    frames, holds_gil = sampler.look()
    assert frames[0][0] == id(module.Sampler.look.__code__)
    assert frames[1][0] == id(sys._getframe().f_code)
    assert holds_gil


@pytest.mark.parametrize("field", [name for name in NEEDED if name not in UNUSED[sys.version_info[1]]])
def test_any_offset_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    changed(monkeypatch, lambda right: right._replace(**{field: getattr(right, field) + 8}))
    with pytest.raises(
        SourceError, match=r"the stacks of this Python \(.*\) cannot be read reliably, so none are sampled: "
    ) as caught:
        module.checked()
    assert caught.value.reason_code == "STACKS_UNREADABLE"


def test_looking_closes_no_descriptor_of_the_program() -> None:
    before = [Path("/proc/self/fd", str(number)).resolve() for number in range(3)]
    for _ in range(3):
        module.checked()
    assert [Path("/proc/self/fd", str(number)).resolve() for number in range(3)] == before


def test_without_the_gils_place_its_holder_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, lambda right: right._replace(gil=GIL_UNKNOWN))
    recorder = Recorder()
    recorder.wait(5)
    assert not any(sample.holds_gil for sample in recorder.stop())
    recorder.close()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="CPython itself tells where that is")
@pytest.mark.parametrize("collects", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_without_the_collectors_place_its_runs_are_left_out(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    if not collects:
        changed(monkeypatch, lambda right: right._replace(interpreter_collecting=right.interpreter_collecting + 8))
    kept = [[] for _ in range(200_000)]  # type: List[List[object]]
    with no_collections(), contextlib.closing(Recorder()) as recorder:
        enough = recorder.session.ticks() + 20
        while recorder.session.ticks() < enough:
            gc.collect()
        found = of_thread(recorder.stop(), threading.get_native_id())
    assert kept
    assert any(sample.wait == WAIT_COLLECTOR for sample in found) == collects


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no callees are told")
@pytest.mark.parametrize("field", [None, *OF_CALLEES])
def test_without_the_place_of_names_no_bytecode_is_recorded(
    monkeypatch: pytest.MonkeyPatch, field: Optional[str]
) -> None:
    if field is not None:
        changed(monkeypatch, lambda right: right._replace(**{field: getattr(right, field) + 8}))
    with Waiter(), contextlib.closing(Recorder()) as recorder:
        recorder.wait(5)
        recorder.stop()
        spaces = {space for space, _ in recorder.reader.strings()}
    assert (SPACE_PYTHON_BYTECODE in spaces) == (field is None)


def test_a_version_without_a_table_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not known((3, 8))
    assert layout((3, 99), b"xdebugpy" + bytes(1016)) is None
    monkeypatch.setattr(module, "layout", lambda _version, _table: None)
    with pytest.raises(SourceError, match="this agent does not know where this build keeps them"):
        module.checked()


@pytest.mark.parametrize("version", [(3, 13), (3, 14), (3, 15)])
def test_a_table_of_offsets_of_another_kind_is_not_believed(version: Any) -> None:
    assert layout(version, bytes(1024)) is None
    free_threaded = b"xdebugpy" + (version[0] << 24 | version[1] << 16).to_bytes(8, "little") + b"\x01" + bytes(1007)
    assert layout(version, free_threaded) is None


def test_who_is_inside_a_function_is_known() -> None:
    sampler = module.checked()

    def never() -> None:
        raise AssertionError

    assert not sampler.runs(never.__code__)
    with Waiter():
        assert sampler.runs(Waiter.inner.__code__)
    assert not sampler.runs(Waiter.inner.__code__)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder(stack_sample_hz=500)
    yield made
    made.close()


def test_looking_does_not_disturb_a_recording(recorder: Recorder) -> None:
    code: CodeType = Waiter.inner.__code__
    with Waiter() as waiter:
        waits_ns = time.time_ns()
        for _ in range(50):
            assert module.checked().runs(code)
        recorder.wait(5)
        samples = [sample for sample in of_thread(recorder.stop(), waiter.tid) if sample.time_ns >= waits_ns]
    assert len(samples) >= 5
    assert all("inner" in plain(sample.stack) for sample in samples)


@pytest.mark.parametrize("offset", [1 << 16, 0x7FFF_0000, 0xFFFF_FFFC])
@pytest.mark.parametrize("field", [*(name for name in NEEDED if name not in UNUSED[sys.version_info[1]]), *OF_CALLEES])
def test_an_offset_that_leads_out_of_the_object_is_noticed_without_going_there(
    monkeypatch: pytest.MonkeyPatch, field: str, offset: int
) -> None:
    changed(monkeypatch, lambda right: right._replace(**{field: offset}))
    with pytest.raises(SourceError, match="cannot be read"):
        module.checked()
