"""Which libcupti is loaded into a process that may have a capability."""

from pathlib import Path

import pytest
from kinetod.counters import cupti_backend
from kinetod.counters.cupti_backend import find_libraries


def library(root: Path, place: str) -> str:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return str(path)


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti_backend, "_of_wheel", lambda: iter(()))


@pytest.mark.usefixtures("no_wheel")
def test_the_toolkits_of_the_host_come_in_order_the_newest_file_of_a_folder_first(tmp_path: Path) -> None:
    old = library(tmp_path, "usr/local/cuda-12.9/extras/CUPTI/lib64/libcupti.so.12")
    new = library(tmp_path, "usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13")
    system = library(tmp_path, "usr/lib/x86_64-linux-gnu/libcupti.so.12")
    assert find_libraries(tmp_path) == [new, old, system]


def test_the_wheel_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = library(tmp_path / "site", "nvidia/cu13/lib/libcupti.so.13")
    (tmp_path / "site/nvidia/__init__.py").write_text("")
    host = library(tmp_path, "usr/lib64/libcupti.so.12")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(__import__("sys").modules, "nvidia", raising=False)
    assert find_libraries(tmp_path) == [wheel, host]


@pytest.mark.usefixtures("no_wheel")
def test_a_processs_library_is_taken_only_if_nobody_else_could_have_made_it(tmp_path: Path) -> None:
    mine = library(tmp_path, "mine/libcupti.so.13")
    open_to_all = library(tmp_path, "open/libcupti.so.13")
    (tmp_path / "open").chmod(0o777)
    for pid, path in ((5, mine), (6, open_to_all)):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        maps = f"7f0000000000-7f0000001000 r-xp 00000000 08:01 {Path(path).stat().st_ino}    {path}\n"
        (tmp_path / f"proc/{pid}/maps").write_text(maps)
    assert find_libraries(tmp_path / "root", (5, 6, 7), tmp_path / "proc") == [mine]
