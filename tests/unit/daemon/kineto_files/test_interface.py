"""Where a process lets its libkineto write, and its own pid."""

import os
from pathlib import Path

import pytest
from kinetod.kineto_files.interface import own_pid, trace_folder


def proc_with(tmp_path: Path, environ: dict[str, str]) -> Path:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "environ").write_bytes("\0".join(f"{name}={value}" for name, value in environ.items()).encode())
    (folder / "status").write_text("Name:\tpython\nNSpid:\t7\t1\n")
    return tmp_path


def test_the_folder_is_the_temporary_one(tmp_path: Path) -> None:
    assert trace_folder(7, proc_with(tmp_path, {"HOME": "/root"})) == "/tmp"


def test_the_process_may_name_another_folder(tmp_path: Path) -> None:
    assert trace_folder(7, proc_with(tmp_path, {"KINETO_ONDEMAND_TRACE_DIR": "/scratch/traces/"})) == "/scratch/traces"


@pytest.mark.parametrize("folder", ["", "traces", "/a/../b", "/a=b", "/a#b", "/a\nb", "/a//b", "/ä", "/" + "x" * 600])
def test_a_folder_that_cannot_be_sent_is_not_used(tmp_path: Path, folder: str) -> None:
    assert trace_folder(7, proc_with(tmp_path, {"KINETO_ONDEMAND_TRACE_DIR": folder})) == "/tmp"


def test_the_file_has_the_pid_that_the_process_sees(tmp_path: Path) -> None:
    proc = proc_with(tmp_path, {})
    assert own_pid(7, proc) == 1
    assert own_pid(8, proc) == 8
    assert own_pid(os.getpid()) > 0
