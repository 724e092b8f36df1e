import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.access.audit_log import AuditLog
from kinetod.base.errors import StartError
from kinetod.base.logs import NOTICE
from support.machine.descriptors import open_files
from support.service.callers import caller
from support.small_disk import fill, small_disk
from support.waiting import until


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_did_what_to_what(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", clock=lambda: 5)
    audit.write("GetCapture", "allowed", caller(pid=7, name="CN:ada", address="10.0.0.1"), capture="c1", empty="")
    audit.write("GetHost", "denied", None, reason="NOT_IDENTIFIED")
    audit.close()
    first, second = lines(tmp_path / "audit.jsonl")
    assert first == {
        "time_ns": 5, "call": "GetCapture", "decision": "allowed", "via": "unix", "uid": 1000, "user": "user1000",
        "pid": 7, "certificate": "CN:ada", "address": "10.0.0.1", "roles": ["jobs", "own"], "capture": "c1",
    }  # fmt: skip
    assert second == {"time_ns": 5, "call": "GetHost", "decision": "denied", "reason": "NOT_IDENTIFIED"}


def test_the_file_is_for_its_owner_only_and_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        audit = AuditLog(path)
        audit.write("GetHost", "allowed", caller())
        audit.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(lines(path)) == 2


def test_what_a_caller_sends_cannot_make_lines(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "a")
    audit.write("GetCapture", "refused", None, capture='x\n{"call":"fake"}', selector={"user": "\x1b[2J\n"})
    audit.close()
    (line,) = (tmp_path / "a").read_bytes().splitlines()
    assert b"\x1b" not in line
    assert json.loads(line)["capture"] == 'x {"call":"fake"}'


def test_a_moved_file_is_made_anew_on_a_reload(tmp_path: Path) -> None:
    path, moved = tmp_path / "audit", tmp_path / "audit.1"
    audit = AuditLog(path)
    audit.write("GetHost", "allowed", caller())
    until(path.read_text, "the line")
    path.rename(moved)
    audit.reopen()
    audit.write("ListCaptures", "allowed", caller())
    audit.close()
    assert [line["call"] for line in lines(moved)] == ["GetHost"]
    assert [line["call"] for line in lines(path)] == ["ListCaptures"]


def test_a_hundred_reloads_leave_one_descriptor_and_the_end_none(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    before = open_files(os.getpid())
    audit = AuditLog(path)
    for _ in range(100):
        audit.reopen()
    audit.write("GetHost", "allowed", caller())
    until(path.read_text, "the line")
    assert len(open_files(os.getpid())) == len(before) + 1
    audit.close()
    audit.close()  # a second end is none
    assert open_files(os.getpid()) == before


def test_where_no_new_file_can_be_had_lines_go_on_into_the_old_one(tmp_path: Path) -> None:
    path, moved = tmp_path / "audit", tmp_path / "audit.1"
    audit = AuditLog(path)
    path.rename(moved)
    path.symlink_to(tmp_path / "elsewhere")
    audit.reopen()
    audit.write("GetHost", "allowed", caller())
    audit.close()
    assert [line["call"] for line in lines(moved)] == ["GetHost"]
    assert not (tmp_path / "elsewhere").exists()


def test_a_line_names_the_front_end_that_called_for_somebody(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit")
    audit.write("GetHost", "allowed", caller(proxy=caller(990, pid=7, name="CN:web")))
    audit.close()
    (line,) = lines(tmp_path / "audit")
    assert line["proxy"] == {"uid": 990, "user": "user990", "pid": 7, "certificate": "CN:web"}


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_a_file_that_cannot_be_had_stops_the_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "audit"
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(StartError, match=r"the audit log .* cannot be written"):
        AuditLog(path)


def test_without_a_file_lines_are_logged_as_notices(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("kinetod.audit").propagate = True
    audit = AuditLog(None)
    audit.write("GetHost", "allowed", caller())
    audit.close()
    ((name, level, text),) = caplog.record_tuples
    assert (name, level, json.loads(text)["call"]) == ("kinetod.audit", 25, "GetHost")


def test_a_full_disk_sends_the_lines_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    audit = AuditLog(Path("/dev/full"))
    audit.write("GetHost", "allowed", caller())
    audit.close()
    assert next(record.levelname for record in caplog.records) == "ERROR"
    assert '"call":"GetHost"' in caplog.text


def test_in_the_folder_that_systemd_gives_there_is_a_file_of_its_own(tmp_path: Path) -> None:
    log = AuditLog(None, state_dir=tmp_path)
    log.write("GetHost", "allowed", None)
    log.close()
    assert [line["call"] for line in lines(tmp_path / "audit.jsonl")] == ["GetHost"]


def test_that_file_is_moved_away_when_it_is_long_and_the_oldest_is_removed(tmp_path: Path) -> None:
    log = AuditLog(None, state_dir=tmp_path, max_bytes=1)
    for number in range(6):
        log.write(f"Call{number}", "allowed", None)
    log.close()
    kept = {path.name: [line["call"] for line in lines(path)] for path in tmp_path.iterdir()}
    assert kept == {
        "audit.jsonl": [], "audit.jsonl.1": ["Call5"], "audit.jsonl.2": ["Call4"], "audit.jsonl.3": ["Call3"],
    }  # fmt: skip


def test_a_file_that_is_configured_is_moved_away_by_nobody(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "own", state_dir=tmp_path, max_bytes=1)
    log.write("GetHost", "allowed", None)
    log.write("GetHost", "allowed", None)
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.fixture
def disk() -> Iterator[Path]:
    """A small file system: 64 KiB, and eight inodes, one of which is its folder's."""
    with small_disk("size=64k,nr_inodes=8") as folder:
        yield folder


def test_on_a_full_disk_lines_go_to_the_log_and_none_is_half_in_the_file(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit, taken = AuditLog(disk / "audit"), disk / "taken"
    taken.write_bytes(bytes(60 << 10))
    for number in range(100):  # 4 KiB are left, for some 15 of these
        audit.write("GetCapture", "allowed", None, capture=f"{number:04d}" * 50)
    until(lambda: "0099" * 50 in caplog.text, "the last line, in the log")
    taken.unlink()
    audit.write("GetHost", "allowed", None)
    audit.close()
    *before, last = lines(disk / "audit")
    logged = [json.loads(each.message) for each in caplog.records if each.levelno == NOTICE]
    assert [str(each["capture"])[:4] for each in (*before, *logged)] == [f"{number:04d}" for number in range(100)]
    assert before and last["call"] == "GetHost"
    assert [each.getMessage() for each in caplog.records if each.levelno > NOTICE] == [
        f"the audit log {disk}/audit cannot be written: No space left on device; its lines go to this log until it can "
        "be written again"
    ]


def test_where_no_new_file_can_be_had_the_old_ones_are_not_moved_out(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (disk / "audit.jsonl.3").write_text("old\n")
    audit = AuditLog(None, state_dir=disk, max_bytes=1000)
    fill(disk, inodes=True)
    for number in range(50):
        audit.write("GetCapture", "allowed", None, capture=f"{number:04d}")
    audit.close()
    assert (disk / "audit.jsonl.3").read_text() == "old\n"
    assert len(lines(disk / "audit.jsonl")) == 50
