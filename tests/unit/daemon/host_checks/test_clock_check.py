"""Whether this host's clock is right."""

import pytest
from kinetod.attach.attach_types import Status
from kinetod.host_checks import clock_check
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.host_checks.clock_check import Kernel, by_systemd, findings
from support.waiting import scaled


@pytest.mark.parametrize(
    ("synchronised", "possible_us", "status"),
    [(True, 16_000, Status.OK), (True, 16_000_000, Status.NOTE), (False, 0, Status.NOTE)],
)
def test_what_the_kernel_thinks_of_its_clock(synchronised: bool, possible_us: int, status: Status) -> None:
    kernel = Kernel(synchronised=synchronised, offset_us=-3.2, estimated_error_us=7, possible_error_us=possible_us)
    (one,) = findings(kernel)
    assert (one.name, one.status) == ("clock", status)
    if synchronised:
        assert one.detail.startswith(
            "synchronised; -3 µs still to be corrected, estimated error 7 µs, possible error "
            f"{possible_us / 1000:.1f} ms"
        )


def test_the_kernel_of_this_host_answers() -> None:
    kernel = clock_check.read()
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
    monkeypatch.setattr(clock_check, "DEADLINE_S", scaled(20))
    assert by_systemd("Operation not permitted", command).status is status


def test_a_service_that_may_not_ask_the_kernel_asks_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Kernel:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(clock_check, "read", refused)
    asked: list[str] = []
    monkeypatch.setattr(clock_check, "by_systemd", asked.append)
    assert len(list(clock_check.check(CheckQuestion(daemon_pid=1, store="/", needed_bytes=0, helper=False)))) == 1
    assert asked == ["Operation not permitted"]
