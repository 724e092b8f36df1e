"""What a helper process does in a process's folder, with a /proc of the test's own."""

import os
from pathlib import Path
from typing import Any

import pytest
from kinetod.attach_helper import folder_queries
from kinetod.attach_helper.folder_queries import LOOK, MAKE, NOTHING, OPEN, REMOVE, REOPEN, TRY
from kinetod.kineto_files.trace_folder import mount_id
from kinetod.processes.identity import started_ns

PID, TICKS = 7, 1234
FILE = "kinetod-c1-00_7.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "tmp").mkdir(parents=True)
    return made


@pytest.fixture
def proc(tmp_path: Path, root: Path) -> Path:
    process = tmp_path / "proc" / str(PID)
    process.mkdir(parents=True)
    (process / "root").symlink_to(root)
    (process / "environ").write_bytes(b"HOME=/\0")
    (process / "mountinfo").write_text("")
    fields = ["0"] * 49
    fields[19] = str(TICKS)
    (process / "stat").write_text(f"{PID} (python) {' '.join(fields)}")
    return process.parent


def ask(proc: Path, step: str, descriptor: int | None = None, **fields: Any) -> tuple[dict[str, Any], int | None]:
    question = {
        "do": folder_queries.FOLDER,
        "step": step,
        "pid": PID,
        "start_time_ns": started_ns(TICKS, boot_time_ns=0),
        "boot_time_ns": 0,
        "uid": os.geteuid(),
        "until_s": 2_000_000_000,
        "file": FILE,
        **fields,
    }
    return folder_queries.answer(question, descriptor, proc)


def test_a_folder_is_made_used_opened_again_and_removed(proc: Path, root: Path) -> None:
    said, folder = ask(proc, MAKE)
    name = Path(said["path"]).name
    assert said["path"] == f"/tmp/{name}"
    assert folder is not None
    inside = root / "tmp" / name
    assert ask(proc, LOOK, folder) == ({"writing_bytes": None, "whole": False}, None)
    assert ask(proc, OPEN, folder)[0]["refused"] == f"{FILE} cannot be opened: No such file or directory"
    (inside / FILE).write_text("{}")
    said, file = ask(proc, OPEN, folder)
    assert (said["refused"], file is not None and os.read(file, 9)) == ("", b"{}")
    again = ask(proc, REOPEN, name=name)[1]
    assert again is not None
    assert ask(proc, REMOVE, again, name=name) == ({}, None)
    assert not inside.exists()
    for each in (folder, file, again):
        assert each is not None
        os.close(each)


def test_a_try_leaves_nothing(proc: Path, root: Path) -> None:
    said, folder = ask(proc, TRY)
    assert ("problem" in said, folder) == (False, None)
    assert not list((root / "tmp").iterdir())


def test_another_process_with_that_pid_gets_none(proc: Path, root: Path) -> None:
    assert ask(proc, MAKE, start_time_ns=1) == ({"problem": f"process {PID} has ended"}, None)
    assert not list((root / "tmp").iterdir())


def test_a_file_system_that_a_program_serves_is_not_entered(proc: Path, root: Path) -> None:
    descriptor = os.open(root, os.O_PATH)
    line = f"{mount_id(descriptor)} 1 0:1 / / rw - fuse.sshfs host:/ rw\n"
    os.close(descriptor)
    (proc / str(PID) / "mountinfo").write_text(line)
    said, _ = ask(proc, MAKE)
    assert "is on a FUSE file system (fuse.sshfs)" in said["problem"]
    assert "--recorder agent" in said["problem"]
    assert not list((root / "tmp").iterdir())


def test_a_folder_that_is_gone_is_named(proc: Path) -> None:
    name = "kinetod-00000001-0123456789abcdef"
    said, _ = ask(proc, REOPEN, name=name)
    assert said["problem"] == f"/tmp/{name} of process {PID}: No such file or directory"


def test_what_is_no_question_is_none(proc: Path) -> None:
    assert ask(proc, NOTHING) == ({}, None)
    with pytest.raises(ValueError, match="descriptor is missing"):
        ask(proc, LOOK)
