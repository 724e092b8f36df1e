"""kinetod's systemd units, by what systemctl says."""

from pathlib import Path

import pytest
from kinetod.attach.attach_types import Status
from kinetod.host_checks import systemd_check
from kinetod.host_checks.check_protocol import CheckQuestion
from support.waiting import scaled

SOCKET_ACTIVE = "ActiveState=active\nResult=success\nUnit"  # the service has more between the last two
HELPER_IDLE = "ActiveState=inactive\nResult=success"
QUESTION = CheckQuestion(daemon_pid=77, store="/", needed_bytes=0, helper=True)
GOOD = """\
Id=kinetod.service
LoadState=loaded
ActiveState=active
Result=success
NRestarts=0
MainPID=77
UnitFileState=enabled

Id=kinetod-attach.socket
LoadState=loaded
ActiveState=active
Result=success
UnitFileState=enabled

Id=kinetod-attach.service
LoadState=loaded
ActiveState=inactive
Result=success
NRestarts=0
MainPID=0
UnitFileState=static
"""


def found(text: str) -> dict[str, tuple[Status, str]]:
    return {
        each.name: (each.status, each.detail) for each in systemd_check.findings(systemd_check.parse(text), QUESTION)
    }


def test_a_helper_that_sleeps_behind_its_socket_is_in_order() -> None:
    assert found(GOOD) == {
        "kinetod.service": (Status.OK, "active"),
        "kinetod-attach.socket": (Status.OK, "active"),
        "kinetod-attach.service": (Status.OK, "inactive"),
    }


def test_a_writer_that_nobody_has_enabled_is_in_order_and_one_that_failed_is_not() -> None:
    writer = "\nId=kinetod-writer.socket\nLoadState=loaded\nActiveState=inactive\nUnitFileState=disabled\n"
    assert found(GOOD + writer)["kinetod-writer.socket"] == (
        Status.OK, "not enabled; only dynolog.log_roots needs it",
    )  # fmt: skip
    status, detail = found(GOOD + writer.replace("inactive", "failed"))["kinetod-writer.socket"]
    assert status is Status.PROBLEM and "has failed" in detail


@pytest.mark.parametrize(
    ("old", "new", "unit", "status", "says"),
    [
        ("NRestarts=0\nMainPID=77", "NRestarts=3\nMainPID=77", "kinetod.service", Status.NOTE, "restarted 3 times"),
        ("MainPID=77", "MainPID=78", "kinetod.service", Status.NOTE, "not the daemon that answers (pid 77)"),
        ("UnitFileState=enabled", "UnitFileState=disabled", "kinetod.service", Status.NOTE, "does not start"),
        (
            SOCKET_ACTIVE,
            SOCKET_ACTIVE.replace("active", "inactive", 1),
            systemd_check.SOCKET,
            Status.PROBLEM,
            "inactive",
        ),
        (HELPER_IDLE, "ActiveState=failed\nResult=exit-code", systemd_check.HELPER, Status.PROBLEM, "exit-code"),
        (
            "attach.socket\nLoadState=loaded",
            "attach.socket\nLoadState=not-found",
            systemd_check.SOCKET,
            Status.PROBLEM,
            "not inst",
        ),
        ("LoadState=loaded", "LoadState=bad-setting", "kinetod.service", Status.PROBLEM, "bad-setting"),
    ],
)
def test_what_is_wrong_with_a_unit_is_told(old: str, new: str, unit: str, status: Status, says: str) -> None:
    assert old in GOOD
    one = found(GOOD.replace(old, new, 1))[unit]
    assert (one[0], says in one[1]) == (status, True)


def test_a_daemon_started_by_hand_needs_no_units() -> None:
    text = "Id=kinetod.service\nLoadState=not-found\nActiveState=inactive\n"
    assert found(text)["units"][0] is Status.OK


def test_systemctl_is_asked_and_without_an_answer_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(systemd_check, "DEADLINE_S", scaled(20))
    (tmp_path / "said").write_text(GOOD)
    assert [each.status for each in systemd_check.ask(QUESTION, ("cat", str(tmp_path / "said")))] == [Status.OK] * 3
    for command in (("false",), ("/none",)):
        (one,) = systemd_check.ask(QUESTION, command)
        assert (one.name, one.status) == ("units", Status.UNKNOWN)
