"""The disk of the captures."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kinetod.attach.attach_types import Finding, Status
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.host_checks.disk_check import findings


def found(store: Path, needed: int = 0) -> Finding:
    (one,) = findings(CheckQuestion(daemon_pid=1, store=str(store), needed_bytes=needed, helper=False))
    return one


def test_a_disk_with_room_is_in_order(tmp_path: Path) -> None:
    assert found(tmp_path).status is Status.OK


def test_too_little_room_is_a_problem_and_little_more_a_note(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert found(tmp_path, 2 * free).status is Status.PROBLEM
    assert found(tmp_path, free // 2).status is Status.NOTE


def test_a_disk_without_room_for_files_or_that_is_read_only_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"f_bavail": 10**9, "f_frsize": 4096, "f_blocks": 10**9, "f_files": 10**6, "f_favail": 10, "f_flag": 0}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**disk))
    assert (found(tmp_path).status, "10 more files" in found(tmp_path).detail) == (Status.PROBLEM, True)
    disk |= {"f_favail": 10**6, "f_flag": os.ST_RDONLY}
    assert (found(tmp_path).status, "cannot be written" in found(tmp_path).detail) == (Status.PROBLEM, True)


def test_a_folder_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    assert found(tmp_path / "none").detail == f"{tmp_path}/none: No such file or directory"
