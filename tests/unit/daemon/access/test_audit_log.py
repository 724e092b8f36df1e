import json
import logging
import os
from pathlib import Path

import pytest
from kinetod.access.audit_log import AuditLog
from kinetod.base.errors import StartError
from support.service.callers import caller
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
