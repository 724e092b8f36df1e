"""One user fills the store; what others have in it stays. At a real daemon of root."""

import os
from collections.abc import Iterator

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.calls_as import OK
from support.service.daemon import Daemon, running_daemon
from support.two_users import User, two_users
from support.waiting import scaled, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.getuid() != 0, reason="users are played by root")]

STORE_BYTES = 168 << 10  # a capture of these takes 8 KiB, a share is five of them and a little


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(environ={"KINETOD_STORE_MAX_BYTES": str(STORE_BYTES)}) as started:
        started.root.chmod(0o755)
        yield started


@pytest.fixture
def users(daemon: Daemon) -> Iterator[tuple[User, User]]:
    with two_users(daemon) as both:
        yield both


def test_who_fills_the_store_pays_for_it_alone(daemon: Daemon, users: tuple[User, User]) -> None:
    ada, bob = users
    kept = bob.capture()  # the oldest of all
    first = ada.capture()
    made = 1
    while any(each.id == first for each in ada.captures()):
        ada.capture()
        made += 1
        assert made < 60
    assert [each.id for each in bob.captures()] == [kept]

    def stored() -> int:
        listed = daemon.stub().ListCaptures(pb.ListCapturesRequest(page_size=1000), timeout=scaled(10)).captures
        return sum(each.local_bytes for each in listed)

    until(lambda: stored() <= STORE_BYTES, "the store is within its limit")


def test_the_index_is_a_part_of_what_a_user_takes(users: tuple[User, User]) -> None:
    ada, bob = users
    kept = bob.capture()
    for _ in range(12):  # with 8 KiB of files, and 30 KB of a request
        ada.capture(formats=["chrome"] * 3000)
    until(lambda: len(ada.captures()) <= 4, "who takes most has lost the oldest")
    assert [each.id for each in bob.captures()] == [kept]


def test_nobody_pins_more_than_a_share_and_is_then_refused_captures(users: tuple[User, User]) -> None:
    ada, bob = users
    pins: list[str] = []
    while not pins or pins[-1] == OK:
        pins.append(ada.pins(ada.capture()))
        assert len(pins) < 40
    assert pins[-1] == "QUOTA_EXCEEDED"
    pinned = [each for each in ada.captures() if each.pinned]
    assert len(pinned) >= 1 and sum(each.local_bytes for each in pinned) <= STORE_BYTES // 4
    assert bob.pins(bob.capture()) == OK
