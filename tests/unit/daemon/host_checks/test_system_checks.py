"""Whether this host's clock is right."""

from pathlib import Path

import pytest
from kineto_trace.base.quantities import format_duration
from kinetod.attach.attach_types import Status
from kinetod.host_checks import system_checks
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.host_checks.system_checks import Kernel, by_systemd, clock_findings
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
        each.name: (each.status, each.detail)
        for each in system_checks.unit_findings(system_checks.parse(text), QUESTION)
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
        (
            "NRestarts=0\nMainPID=77",
            "NRestarts=3\nMainPID=77",
            "kinetod.service",
            Status.NOTE,
            "; systemd has restarted it 3 times",
        ),
        ("MainPID=77", "MainPID=78", "kinetod.service", Status.NOTE, "but the daemon that is answering has pid 77"),
        ("UnitFileState=enabled", "UnitFileState=disabled", "kinetod.service", Status.NOTE, "is not started at boot"),
        (
            SOCKET_ACTIVE,
            SOCKET_ACTIVE.replace("active", "inactive", 1),
            system_checks.SOCKET,
            Status.PROBLEM,
            "inactive",
        ),
        (HELPER_IDLE, "ActiveState=failed\nResult=exit-code", system_checks.HELPER, Status.PROBLEM, "exit-code"),
        (
            "attach.socket\nLoadState=loaded",
            "attach.socket\nLoadState=not-found",
            system_checks.SOCKET,
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
    monkeypatch.setattr(system_checks, "DEADLINE_S", scaled(20))
    (tmp_path / "said").write_text(GOOD)
    assert [each.status for each in system_checks.ask(QUESTION, ("cat", str(tmp_path / "said")))] == [Status.OK] * 3
    for command in (("false",), ("/none",)):
        (one,) = system_checks.ask(QUESTION, command)
        assert (one.name, one.status) == ("units", Status.UNKNOWN)


@pytest.mark.parametrize(
    ("synchronised", "possible_us", "status"),
    [(True, 16_000, Status.OK), (True, 16_000_000, Status.NOTE), (False, 0, Status.NOTE)],
)
def test_what_the_kernel_thinks_of_its_clock(synchronised: bool, possible_us: int, status: Status) -> None:
    kernel = Kernel(synchronised=synchronised, offset_us=-3.2, estimated_error_us=7, possible_error_us=possible_us)
    (one,) = clock_findings(kernel)
    assert (one.name, one.status) == ("clock", status)
    if synchronised:
        assert one.detail.startswith(
            "synchronised; -3.2 µs still to be corrected, estimated error 7 µs, possible error "
            f"{format_duration(1000 * possible_us)}"
        )


def test_the_kernel_of_this_host_answers() -> None:
    kernel = system_checks.read()
    assert kernel.possible_error_us >= 0 and abs(kernel.offset_us) < 10**7


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("echo", "yes"), Status.OK),
        (("echo", "no"), Status.NOTE),
        (("true",), Status.UNKNOWN),
        (("/none",), Status.UNKNOWN),
    ],
)
def test_where_the_kernel_may_not_be_asked_systemd_is(
    command: tuple[str, ...], status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_checks, "DEADLINE_S", scaled(20))
    assert by_systemd("Operation not permitted", command).status is status


def test_a_service_that_may_not_ask_the_kernel_asks_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Kernel:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(system_checks, "read", refused)
    asked: list[str] = []
    monkeypatch.setattr(system_checks, "by_systemd", asked.append)
    assert (
        len(list(system_checks.check_clock(CheckQuestion(daemon_pid=1, store="/", needed_bytes=0, helper=False)))) == 1
    )
    assert asked == ["Operation not permitted"]
