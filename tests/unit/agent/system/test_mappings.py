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
