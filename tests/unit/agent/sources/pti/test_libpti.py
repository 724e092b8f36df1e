"""Which libpti_view is used, and what a process's maps and state say about it."""

import os
import subprocess
import sys
from pathlib import Path

from kineto_agent.sources.pti import libpti

LINE = "7f00000000-7f00001000 r-xp 00000000 fe:00 1234   "
LOADER = "/usr/lib/libze_loader.so.1.20.6"


def maps(tmp_path: Path, *paths: str) -> str:
    file = tmp_path / "maps"
    file.write_text("".join(f"{LINE}{path}\n" for path in ("/lib/libc.so.6", "[heap]", *paths)))
    return str(file)


def test_without_level_zero_there_is_nothing_to_trace(tmp_path: Path) -> None:
    file = maps(tmp_path, "/venv/lib/libpti_view.so.0", "/venv/lib/libsycl.so.8")
    assert libpti.find({"KINETO_PTI_LIBRARY": "/mine.so"}, file) is None


def test_a_named_library_comes_first_then_the_loaded_one(tmp_path: Path) -> None:
    file = maps(tmp_path, LOADER, "/venv/lib/libpti_view.so.0")
    assert libpti.find({"KINETO_PTI_LIBRARY": "/mine.so"}, file) == "/mine.so"
    assert libpti.find({}, file) == "/venv/lib/libpti_view.so.0"


def test_where_none_is_loaded_the_newest_beside_libsycl_is_used_by_its_linked_name(tmp_path: Path) -> None:
    for name in ("libpti_view.so", "libpti_view.so.0", "libpti_view.so.1", "libpti_view.so.1.2.0", "libpti_view.so.x"):
        (tmp_path / name).touch()
    file = maps(tmp_path, LOADER, str(tmp_path / "libsycl.so.8"))
    assert libpti.find({}, file) == str(tmp_path / "libpti_view.so.1")
    assert libpti.find({}, maps(tmp_path, LOADER, "/elsewhere/libsycl.so.8")) is None


def test_calls_of_sycl_are_seen_where_torch_linked_with_both(tmp_path: Path) -> None:
    torch = ("/venv/torch/lib/libtorch_cpu.so", "/venv/lib/libpti_view.so.0", "/venv/lib/libsycl.so.8")
    assert libpti.sees_sycl(maps(tmp_path, LOADER, *torch))
    assert not libpti.sees_sycl(maps(tmp_path, LOADER, *torch[1:]))


def test_the_core_is_not_taken_for_the_front(tmp_path: Path) -> None:
    assert not libpti.has_core(maps(tmp_path, LOADER, "/venv/lib/libpti_view.so.1"))
    assert libpti.has_core(maps(tmp_path, LOADER, "/venv/lib/libpti_view.so.1", "/venv/lib/pti/libpti.so"))


def test_a_forked_process_is_told_from_one_that_was_started() -> None:
    program = "import sys; sys.path[:0] = %r; from kineto_agent.sources.pti import libpti; print(libpti.is_forked())"
    started = subprocess.run([sys.executable, "-c", program % sys.path], capture_output=True, text=True, check=True)
    assert started.stdout == "False\n"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"yes" if libpti.is_forked() else b"no")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 16) == b"yes"
    os.close(read)
    os.close(write)


def test_a_process_whose_state_cannot_be_read_is_taken_to_be_forked(tmp_path: Path) -> None:
    assert libpti.is_forked(str(tmp_path / "missing"))
    (tmp_path / "stat").write_text("17 (a name) R 1")
    assert libpti.is_forked(str(tmp_path / "stat"))
