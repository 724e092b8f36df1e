"""One user takes all that the daemon gives; the others do not notice. At a real daemon of root."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign.parts.hostile import Hostile
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.probe import DEADLINE_S, Unwell, ask_daemon
from support.service.calls_as import OK, CallsAs
from support.service.daemon import Daemon, running_daemon
from support.waiting import scaled

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.getuid() != 0, reason="users are played by root")]

ADA, BOB = 61001, 61002


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def daemon(audit: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    settings = getattr(request, "param", {})
    with running_daemon(environ={"KINETOD_ACCESS_AUDIT_FILE": str(audit), **settings}) as started:
        started.root.chmod(0o755)
        yield started


@pytest.fixture
def ada(daemon: Daemon) -> Iterator[Hostile]:
    with Hostile(ADA, daemon.address) as user:
        yield user


@pytest.fixture
def bob(daemon: Daemon) -> Iterator[CallsAs]:
    with CallsAs(BOB) as user:
        assert user.call(daemon.address, "GetClock", pb.GetClockRequest()).code == OK  # he is connected
        yield user


def is_well(daemon: Daemon) -> bool:
    """As a container is probed."""
    try:
        ask_daemon(daemon.address, scaled(DEADLINE_S))
    except Unwell:
        return False
    return True


def test_who_holds_all_calls_there_are_keeps_nobody_out(daemon: Daemon, ada: Hostile, bob: CallsAs) -> None:
    found = ada.do("hold_health", connections=12, streams=100)
    assert found.get("RESOURCE_EXHAUSTED"), found
    assert bob.call(daemon.address, "GetHost", pb.GetHostRequest()).code == OK
    assert is_well(daemon)


def test_calls_whose_request_never_comes_keep_nobody_out(daemon: Daemon, ada: Hostile, bob: CallsAs) -> None:
    ada.do("hold_silent", connections=10, streams=110)
    assert bob.call(daemon.address, "GetHost", pb.GetHostRequest()).code == OK
    assert is_well(daemon)


def test_who_watches_as_often_as_it_gets_leaves_watches_to_others(daemon: Daemon, ada: Hostile, bob: CallsAs) -> None:
    found = ada.do("hold_watches", count=40)
    assert found.get("held"), found
    assert bob.call(daemon.address, "WatchHost", pb.WatchHostRequest(), most=1).code == OK


@pytest.mark.parametrize("daemon", [{"KINETOD_ACCESS_REQUESTS_PER_SECOND": "5"}], indirect=True)  # whatever the machine
def test_health_checks_are_limited_per_user_and_audited_in_few_lines(daemon: Daemon, ada: Hostile, audit: Path) -> None:
    found = ada.do("check", count=100)
    assert found["OK"] >= 10 and found.get("RESOURCE_EXHAUSTED"), found
    assert is_well(daemon)
    lines = [line for line in audit.read_text().splitlines() if f'"uid":{ADA}' in line]
    assert 1 <= len(lines) <= 10


def test_calls_that_wait_cost_others_none_of_theirs(daemon: Daemon, ada: Hostile, bob: CallsAs) -> None:
    ada.tell("burst", connections=40, streams=60)
    codes = {bob.call(daemon.address, "GetClock", pb.GetClockRequest()).code for _ in range(100)}
    assert ada.told()
    assert codes == {OK}
