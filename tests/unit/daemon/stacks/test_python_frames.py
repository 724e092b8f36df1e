"""Frames of Python as py-spy finds them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kinetod.stacks import python_frames
from kinetod.stacks.python_frames import NoFrames, Sources, open_spy, read_frames
from kinetod.stacks.thread_stacks import MAX_FRAMES, StackFrame


def found(*functions: str, gil: bool = False, file: str = "/app/train.py", tid: int | None = 7) -> dict[str, Any]:
    """A thread as py-spy describes it. functions: outermost first."""
    frames = [{"name": each, "filename": file, "line": 3, "module": None} for each in reversed(functions)]
    return {
        "thread_id": 0x7F0000000000, "os_thread_id": tid, "thread_name": "MainThread", "owns_gil": gil, "frames": frames
    }  # fmt: skip


def reading(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[str]:
    """Lets py-spy answer so, one reading after the other; returns which were made."""
    made: list[str] = []
    left = iter(answers)

    def dump(_pid: int, _spy: int) -> bytes:
        made.append("read")
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()

    monkeypatch.setattr(python_frames, "_dump", dump)
    return made


def test_frames_are_innermost_first_and_tell_what_is_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    reading(monkeypatch, [found("<module>", "main", "make.<locals>.step", gil=True)])
    (thread,) = read_frames(7, 0, 7)
    assert [frame.function for frame in thread.frames] == ["step", "main", "<module>"]
    assert (thread.holds_gil, thread.thread, thread.left_out, thread.name) == (True, 7, 0, "MainThread")
    assert thread.frames[0] == StackFrame(function="step", file="/app/train.py", line=3, own=True)


@pytest.mark.parametrize(
    "file",
    [
        "/usr/lib/python3.12/queue.py",
        "/v/lib/python3.13t/site-packages/torch/x.py",
        "<frozen importlib>",
        "<attrs generated init>",
        "/tmp/torchinductor_ada/ab/cab.py",
    ],
)
def test_files_of_python_of_packages_and_made_by_them_are_not_the_programs_own(
    monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    reading(monkeypatch, [found("<module>", file=file)])
    assert not read_frames(7, 0, 7)[0].frames[0].own


@pytest.mark.parametrize("file", ["/opt/python3.11/app/train.py", "/home/ada/python3/train.py", "<string>", "<stdin>"])
def test_other_files_are_the_programs_own(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    reading(monkeypatch, [found("<module>", file=file)])
    assert read_frames(7, 0, 7)[0].frames[0].own


def test_a_torn_reading_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reading(monkeypatch, ValueError("torn"), [found("<genexpr>")], [found("<module>", "main")])
    (thread,) = read_frames(7, 0, 7)
    assert [frame.function for frame in thread.frames] == ["main", "<module>"]
    assert len(made) == 3


def test_a_stack_that_begins_elsewhere_is_believed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reading(monkeypatch, *[[found("embedded")]] * 3)
    assert read_frames(7, 0, 7)[0].frames[0].function == "embedded"
    assert len(made) == python_frames.TRIES


@pytest.mark.parametrize("answer", [ValueError("no memory"), {"not": "a list"}, [{"frames": 1}]])
def test_why_there_are_no_frames_is_told(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    reading(monkeypatch, *[answer] * 3)
    with pytest.raises(NoFrames, match=r"^py-spy cannot read it: "):
        read_frames(7, 0, 7)


def test_what_the_kernel_denies_is_told_with_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    reading(monkeypatch, *[ValueError("Permission Denied: Try running again with elevated permissions")] * 3)
    with pytest.raises(
        NoFrames, match=r"^the kernel does not let this daemon read it: that needs root or CAP_SYS_PTRACE$"
    ):
        read_frames(7, 0, 7)


def test_of_a_deep_stack_the_middle_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["<module>", *(f"f{number}" for number in range(400))]
    reading(monkeypatch, [found(*names)])
    (thread,) = read_frames(7, 0, 7)
    assert len(thread.frames) == MAX_FRAMES
    assert thread.left_out == len(names) - MAX_FRAMES
    assert (thread.frames[0].function, thread.frames[-1].function) == ("f399", "<module>")


WAITS = """
import sys, threading
def größe():
    sys.stdin.read()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print('up', flush=True)
größe()
"""


@contextmanager
def running(folder: Path, program: str, *prefix: str) -> Iterator[int]:
    """The pid of a program in a file that is older than it."""
    file = folder / "trainiere_é.py"
    file.write_text(program)
    with subprocess.Popen(
        [*prefix, sys.executable, "-S", file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process.pid
        process.kill()


def test_threads_and_names_outside_of_ascii_are_found(tmp_path: Path) -> None:
    with running(tmp_path, WAITS) as pid:
        threads = read_frames(pid, open_spy(), pid)
        tids = {int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()}
    assert {thread.thread for thread in threads} == tids
    (main,) = (thread for thread in threads if thread.thread == pid)
    assert main.frames[0].function == "größe"
    assert main.frames[0].file == str(tmp_path / "trainiere_é.py")


def test_a_process_without_python_has_no_frames() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        with pytest.raises(NoFrames, match=r"^it is not running Python$"):
            read_frames(process.pid, open_spy(), process.pid)
        process.kill()


def frame_in(file: str, line: int = 1) -> StackFrame:
    return StackFrame(function="f", file=file, line=line, own=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root directory and the working directory of a process that starts in ten seconds."""
    process = tmp_path / "7"
    (tmp_path / "root/app").mkdir(parents=True)
    process.mkdir()
    (process / "root").symlink_to(tmp_path / "root")
    (process / "cwd").symlink_to(tmp_path / "root/app")
    monkeypatch.setattr(python_frames, "start_time_ns", lambda _pid, _proc: (time.time() + 10) * 1e9)
    return tmp_path


def code(folder: Path, *frames: StackFrame) -> list[str]:
    Sources(7, folder).add_code([[each] for each in frames])
    return [each.code for each in frames]


def test_the_line_stands_as_it_is_in_the_file(folder: Path) -> None:
    (folder / "root/train.py").write_text("# é\ndef f():\n    x = lock.acquire()\n")
    assert code(folder, frame_in("/train.py", 3), frame_in("/train.py", 9)) == ["x = lock.acquire()", ""]


def test_only_the_innermost_frame_and_the_programs_own_have_code(folder: Path) -> None:
    (folder / "root/a.py").write_text("first\n")
    stack = [StackFrame(function="f", file="/a.py", line=1, own=own) for own in (False, False, True)]
    Sources(7, folder).add_code([stack])
    assert [frame.code for frame in stack] == ["first", "", "first"]


def test_a_relative_name_is_one_below_the_working_directory(folder: Path) -> None:
    (folder / "root/app/b.py").write_text("here\n")
    (folder / "root/c.py").write_text("above\n")
    assert code(folder, frame_in("b.py"), frame_in("../c.py")) == ["here", ""]


def test_links_lead_nowhere_outside_of_the_processs_root(folder: Path) -> None:
    (folder / "secret").write_text("of the host\n")
    (folder / "root/real.py").write_text("of the process\n")
    (folder / "root/x.py").symlink_to(folder / "secret")
    (folder / "root/y.py").symlink_to("../secret")
    (folder / "root/z.py").symlink_to("/real.py")
    (folder / "root/self.py").symlink_to("/proc/self/root/etc/passwd")
    names = ("/x.py", "/y.py", "/../secret", "/self.py", "/z.py")
    assert code(folder, *map(frame_in, names)) == ["", "", "", "", "of the process"]


def test_a_file_that_was_changed_since_the_process_started_is_not_quoted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "root/a.py").write_text("edited since\n")
    os.utime(folder / "root/a.py", (0, 0))  # as an archive does
    monkeypatch.setattr(python_frames, "start_time_ns", lambda _pid, _proc: (time.time() - 10) * 1e9)
    assert code(folder, frame_in("/a.py")) == [""]


def test_what_is_no_regular_file_is_not_opened(folder: Path) -> None:
    os.mkfifo(folder / "root/a.py")
    assert code(folder, frame_in("/a.py")) == [""]
