"""The text of /proc/self/maps is read whole, with and without ctypes."""

import ctypes
import sys
from pathlib import Path

import pytest
from kineto_agent.system import mappings


@pytest.mark.parametrize("with_ctypes", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 300_000])
def test_a_file_of_any_size_is_read_whole(
    size: int, with_ctypes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_ctypes:
        monkeypatch.delitem(sys.modules, "ctypes")
    (tmp_path / "maps").write_bytes(bytes(range(256)) * 1200)
    whole = (tmp_path / "maps").read_bytes()[:size]
    (tmp_path / "maps").write_bytes(whole)
    assert mappings.read(str(tmp_path / "maps")) == whole


def test_the_mappings_of_this_process_name_its_c_library() -> None:
    assert ctypes.CDLL(None) is not None
    assert b"/libc.so.6" in mappings.read()


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mappings.read(str(tmp_path / "missing"))


LINE = "7f00000000-7f00001000 r-xp 00000000 fe:00 1234   "


def maps(tmp_path: Path, path: str) -> str:
    file = tmp_path / "maps"
    file.write_text("".join(f"{LINE}{each}\n" for each in ("/lib/libc.so.6", "[heap]", path)))
    return str(file)


def test_a_path_with_spaces_and_a_deleted_file_are_understood(tmp_path: Path) -> None:
    file = maps(tmp_path, "/my venv/libcupti.so.12 (deleted)")
    assert mappings.mapped_files("libcupti.so", file) == ["/my venv/libcupti.so.12"]


def test_a_file_in_a_folder_of_that_name_is_not_taken(tmp_path: Path) -> None:
    file = maps(tmp_path, "/opt/libcupti.so.13.d/other.so")
    assert mappings.mapped_files("libcupti.so", file) == []


def test_an_unreadable_maps_file_means_nothing_found(tmp_path: Path) -> None:
    assert mappings.mapped_files("libcupti.so", str(tmp_path / "missing")) == []
