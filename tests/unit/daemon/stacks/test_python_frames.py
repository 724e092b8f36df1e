"""Frames of Python as pystack finds them."""

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pystack.engine
import pystack.errors
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.stacks import python_frames
from kinetod.stacks.python_frames import NoFrames, Sources, read_frames
from kinetod.stacks.thread_stacks import MAX_FRAMES, MAX_FRAMES_IN_ALL, StackFrame


def found(*functions: str, gil: bool = False, file: str = "/app/train.py") -> Any:
    """A thread as pystack describes it. functions: outermost first."""
    place = SimpleNamespace(lineno=3, end_lineno=3, column=4, end_column=9)
    calls = [SimpleNamespace(code=SimpleNamespace(filename=file, scope=each, location=place)) for each in functions]
    return SimpleNamespace(tid=7, holds_the_gil=int(gil), frames=calls)


def reading(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[str]:
    """Lets pystack answer so, one reading after the other; returns which were made."""
    made: list[str] = []
    left = iter(answers)

    def read(_pid: int, stop_process: bool) -> Any:
        assert not stop_process
        made.append("read")
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pystack.engine, "get_process_threads", read)
    return made


def test_frames_are_innermost_first_and_tell_what_is_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    reading(monkeypatch, [found("<module>", "main", "step", gil=True)])
    (thread,) = read_frames(7)
    assert [frame.function for frame in thread.frames] == ["step", "main", "<module>"]
    assert (thread.holds_gil, thread.thread, thread.left_out) == (True, 7, 0)
    assert thread.frames[0] == StackFrame(function="step", file="/app/train.py", line=3, own=True, start=4, end=9)


@pytest.mark.parametrize(
    "file", ["/usr/lib/python3.12/queue.py", "/v/lib/python3.13t/site-packages/torch/x.py", "<frozen importlib>"]
)
def test_files_of_python_and_of_packages_are_not_the_programs_own(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    reading(monkeypatch, [found("<module>", file=file)])
    assert not read_frames(7)[0].frames[0].own


def test_a_torn_reading_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    torn = pystack.errors.EngineError("a frame changed")
    made = reading(monkeypatch, torn, [found("<genexpr>")], [found("<module>", "main")])
    (thread,) = read_frames(7)
    assert [frame.function for frame in thread.frames] == ["main", "<module>"]
    assert len(made) == 3


def test_a_stack_that_begins_elsewhere_is_believed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reading(monkeypatch, *[[found("embedded")]] * 3)
    assert read_frames(7)[0].frames[0].function == "embedded"
    assert len(made) == python_frames.TRIES


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (pystack.errors.InvalidPythonProcess("x"), "it does not run Python"),
        (pystack.errors.NotEnoughInformation("x"), "its Python frames cannot be read (NotEnoughInformation: x"),
        (PermissionError(1, "no"), "its Python frames cannot be read (PermissionError"),
    ],
)
def test_why_there_are_no_frames_is_told(monkeypatch: pytest.MonkeyPatch, error: Exception, why: str) -> None:
    reading(monkeypatch, *[error] * 3)
    with pytest.raises(NoFrames) as caught:
        read_frames(7)
    assert str(caught.value).startswith(why)


def test_of_a_deep_stack_the_middle_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["<module>", *(f"f{number}" for number in range(400))]
    reading(monkeypatch, [found(*names)])
    (thread,) = read_frames(7)
    assert len(thread.frames) == MAX_FRAMES
    assert thread.left_out == len(names) - MAX_FRAMES
    assert (thread.frames[0].function, thread.frames[-1].function) == ("f399", "<module>")


def test_of_many_deep_threads_each_keeps_fewer_frames_so_that_all_fit_into_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = found("<module>", *["f" * 500] * 200, file="/" + "é" * 500)
    reading(monkeypatch, [deep] * 500)
    threads = read_frames(7)
    assert len(threads) == 500
    assert sum(len(thread.frames) for thread in threads) <= MAX_FRAMES_IN_ALL
    sized = [pb.Frame(function=each.function, file=each.file) for thread in threads for each in thread.frames]
    assert sum(each.ByteSize() for each in sized) < 4 << 20


def test_frames_that_form_a_ring_are_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_frames, "_MAX_DEPTH", 10)
    reading(monkeypatch, *[[found(*["f"] * 11)]] * 3)
    with pytest.raises(NoFrames, match="form a ring"):
        read_frames(7)


def sources(tmp_path: Path, started_s: float) -> Sources:
    made = Sources(os.getpid())
    made._root = tmp_path
    made._started_s = started_s
    return made


def test_the_expression_is_cut_out_of_the_line_and_the_whole_line_stands_without_positions(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("# é\ndef f():\n    x = lock.acquire()\n")
    cut = StackFrame(function="f", file="/train.py", line=3, own=True, start=8, end=22)
    whole = StackFrame(function="f", file="/train.py", line=3, own=True)
    beyond = StackFrame(function="f", file="/train.py", line=9, own=True)
    sources(tmp_path, time.time() + 10).add_code([[cut], [whole], [beyond]])
    assert (cut.code, whole.code, beyond.code) == ("lock.acquire()", "x = lock.acquire()", "")


def test_only_the_innermost_frame_and_the_programs_own_have_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("first\n")
    stack = [
        StackFrame(function=name, file="/a.py", line=1, own=own)
        for name, own in (("in", False), ("lib", False), ("me", True))
    ]
    sources(tmp_path, time.time() + 10).add_code([stack])
    assert [frame.code for frame in stack] == ["first", "", "first"]


def test_a_file_that_is_younger_than_the_process_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("edited since\n")
    frame = StackFrame(function="f", file="/a.py", line=1, own=True)
    sources(tmp_path, time.time() - 10).add_code([[frame]])
    assert frame.code == ""


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.py")
    frame = StackFrame(function="f", file="/a.py", line=1, own=True)
    sources(tmp_path, time.time() + 10).add_code([[frame]])
    assert frame.code == ""


def test_a_process_without_python_has_no_frames() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        with pytest.raises(NoFrames, match="does not run Python"):
            read_frames(process.pid)
        process.kill()
