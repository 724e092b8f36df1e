"""How many connections peers have, how fast they make them, and who is not read from."""

import asyncio
import functools
import heapq
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
from kinetod.access.connections import connection_limits as crowd_module
from kinetod.access.connections.connection_limits import (
    AT_ONCE,
    BURST_BYTES,
    BURST_CALLS,
    BURST_CALLS_S,
    CALLS_A_REQUEST,
    CONNECTIONS_PER_SECOND,
    MAX_HOLD_S,
    NEXT_CALLS_S,
    RELEASE_S,
    PeerLimits,
)
from kinetod.access.peers import Peer
from kinetod.base import metrics
from kinetod.permissions.role_policy import Via

ADA, ROOT = Peer(via=Via.UNIX, uid=1000), Peer(via=Via.UNIX, uid=0)
FAR = Peer(via=Via.TLS, address="192.0.2.7")
BURST = 4 * CONNECTIONS_PER_SECOND
REQUESTS_PER_SECOND = 50


class Clock:
    """The time, and the loop's timers."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, int, Any]] = []
        self._serial = itertools.count()

    def __call__(self) -> float:
        return self.now

    def call_later(self, seconds: float, function: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._serial), functools.partial(function, *arguments)))

    def run(self, seconds: float) -> None:
        """What is due within this time."""
        end = self.now + seconds + 1e-6
        while self._timers and self._timers[0][0] <= end:
            self.now, _, due = heapq.heappop(self._timers)
            due()
        self.now = end


class Connection:
    def __init__(self, peer: Peer, name: str = "") -> None:
        self.peer, self.name, self.held = peer, name, False
        self.user, self.ended = "", False

    def end(self) -> None:
        self.ended = True

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False


class Flooding(Connection):
    """Is held for a second when it is read from."""

    peer_limits: PeerLimits
    released = 0

    def release(self) -> None:
        super().release()
        self.released += 1
        self.peer_limits.hold(self, 1.0)


def peer_limits(clock: Callable[[], float] | None = None, max_per_peer: int = 2) -> PeerLimits:
    return PeerLimits(
        max_per_peer=lambda: max_per_peer,
        requests_per_second=lambda: REQUESTS_PER_SECOND,
        is_admin=lambda peer: peer.uid == 0,
        clock=clock or Clock(),
    )


def in_loop(function: Callable[[], None], clock: Clock | None = None) -> None:
    async def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "call_later", (clock or Clock()).call_later)
            function()

    asyncio.run(run())


def test_a_peer_that_connects_too_fast_is_refused_and_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, counted = Clock(), list[str]()
    monkeypatch.setattr(metrics, "limited", counted.append)

    def run() -> None:
        found = peer_limits(clock)
        assert [found.may_open(ADA) for _ in range(BURST + 50)] == [True] * BURST + [False] * 50
        assert all(found.may_open(FAR) for _ in range(3 * BURST))
        assert all(found.may_open(ROOT) for _ in range(1000))
        clock.now += 1
        assert sum(found.may_open(ADA) for _ in range(100)) == CONNECTIONS_PER_SECOND

    with caplog.at_level(logging.WARNING):
        in_loop(run, clock)
    assert caplog.messages == ["a connection from uid 1000 was refused: too many new connections per second"]
    assert counted == ["CONNECTION_RATE"] * (50 + 100 - CONNECTIONS_PER_SECOND)


def test_connections_that_speak_are_counted_for_each_peer_until_they_are_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run() -> None:
        found = peer_limits()
        one, two, three = (Connection(ADA) for _ in range(3))
        assert [found.may_proceed(each) for each in (one, two, three)] == [True, True, False]
        assert found.may_proceed(Connection(FAR))
        found.closed(three, spoke=False)
        assert not found.may_proceed(three)
        found.closed(one, spoke=True)
        assert found.may_proceed(three)

    in_loop(run)
    limit = "2 of 2 connections are open (access.max_connections), 2 in total"
    assert caplog.messages == [f"a connection from uid 1000 was refused: {limit}"]


@pytest.mark.parametrize("silent", [True, False])
def test_a_peer_without_connections_and_root_get_one_where_there_are_no_more(
    monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(crowd_module, "MAX_CONNECTIONS", 8)

    def run() -> None:
        found = peer_limits(max_per_peer=100)

        def gets_one(peer: Peer) -> bool:
            if not silent:
                return found.may_proceed(Connection(peer))
            if may := found.may_open(peer):
                found.opened(peer)
            return may

        assert [gets_one(ADA) for _ in range(20)] == [True] * 8 + [False] * 12
        assert gets_one(FAR)
        assert not gets_one(Peer(via=Via.UNIX, uid=1001))
        assert gets_one(ROOT)

    in_loop(run)


def test_all_connections_of_a_user_are_held_also_those_that_come_later() -> None:
    clock = Clock()

    def run() -> None:
        found = peer_limits(clock)
        first, gone, one, two, other = *(Connection(ADA) for _ in range(4)), Connection(ROOT)
        for each in (first, gone, one, other):
            found.joined(each)
        found.closed(first, spoke=False)
        found.hold(one, 0.5)
        found.hold(one, 0.5)
        found.hold(other, 5)
        found.joined(two)
        assert (one.held, two.held, other.held) == (True, True, False)
        found.closed(gone, spoke=False)
        clock.run(0.9)
        assert one.held
        clock.run(0.1)
        assert (one.held, two.held) == (False, True)
        clock.run(RELEASE_S)
        assert (one.held, two.held) == (False, False)
        clock.run(RELEASE_S)
        for each in (one, two, other):
            found.closed(each, spoke=False)
        assert found._groups == {}

    in_loop(run, clock)


def test_what_was_held_is_read_from_one_by_one_until_one_floods_again() -> None:
    clock = Clock()

    def run() -> None:
        found = peer_limits(clock)
        several = [Connection(ADA) for _ in range(4)]
        for each in several:
            found.joined(each)
        found.hold(several[0], 0.5)
        clock.run(0.5)
        clock.run(RELEASE_S)
        first, second = (each for each in several if not each.held)
        found.hold(second, 0.5)
        assert all(each.held for each in several)
        let_go = []
        clock.run(0.5 - RELEASE_S)
        while any(each.held for each in several):
            clock.run(RELEASE_S)
            let_go += [each for each in several if not each.held and each not in let_go]
        assert set(let_go[2:]) == {first, second}  # who had a turn waits for the others

    in_loop(run, clock)


def test_many_connections_at_once_are_read_from_one_after_the_other() -> None:
    clock = Clock()

    def run() -> None:
        found = peer_limits(clock)
        at_once = [Connection(Peer(via=Via.UNIX, uid=1001)) for _ in range(AT_ONCE + 2)]
        for each in at_once:
            if each is at_once[AT_ONCE]:
                clock.run(RELEASE_S)
            found.joined(each)
        assert [each.held for each in at_once] == [False] * (AT_ONCE + 1) + [True]
        several, roots = ([Connection(peer) for _ in range(3 * AT_ONCE)] for peer in (ADA, ROOT))
        for each in (*several, *roots):
            found.joined(each)
        assert [each.held for each in several] == [False] * AT_ONCE + [True] * 2 * AT_ONCE
        assert not any(each.held for each in roots)
        for released in range(AT_ONCE + 1, 3 * AT_ONCE + 1):
            clock.run(RELEASE_S)
            assert sum(not each.held for each in several) == released

    in_loop(run, clock)


def test_calls_are_granted_at_four_times_the_rate_of_requests_to_all_connections_of_a_user() -> None:
    clock, rate = Clock(), CALLS_A_REQUEST * REQUESTS_PER_SECOND

    def run() -> None:
        found = peer_limits(clock)
        one, two, root = Connection(ADA), Connection(ADA), Connection(ROOT)
        for each in (one, two, root):
            found.joined(each)
        assert found.may_begin(one) == rate * BURST_CALLS_S
        found.received(one, 100, found.may_begin(one))
        found.received(root, 100, 1000)
        assert (found.may_begin(two), found.may_begin(root) > 1000) == (0, True)
        found.hold_back(two)
        assert (one.held, two.held, root.held) == (True, True, False)
        clock.run(0.99 * NEXT_CALLS_S)
        assert (one.held, two.held) == (True, True)
        clock.run(0.02 * NEXT_CALLS_S)
        assert sorted((one.held, two.held)) == [False, True]
        assert found.may_begin(one) == int(rate * 1.01 * NEXT_CALLS_S)

    in_loop(run, clock)


def test_calls_begin_also_where_the_rate_is_one_request_a_second() -> None:
    clock = Clock()

    def run() -> None:
        found = PeerLimits(
            max_per_peer=lambda: 2, requests_per_second=lambda: 1, is_admin=lambda peer: peer.uid == 0, clock=clock
        )
        one = Connection(ADA)
        found.joined(one)
        assert found.may_begin(one) == BURST_CALLS
        found.received(one, 100, BURST_CALLS)
        found.hold_back(one)
        clock.run(1.01 / CALLS_A_REQUEST)
        assert (one.held, found.may_begin(one)) == (False, 1)

    in_loop(run, clock)


def test_one_that_is_held_again_while_it_is_let_go_is_held_as_long_as_that_says() -> None:
    clock = Clock()

    def run() -> None:
        found, one = peer_limits(clock), Flooding(ADA)
        one.peer_limits = found
        found.joined(one)
        found.hold(one, 0.5)
        for seconds, released in ((0.5, 1), (0.9, 1), (0.2, 2)):
            clock.run(seconds)
            assert (one.held, one.released) == (True, released)

    in_loop(run, clock)


def test_a_flood_counts_also_when_its_connection_is_closed_by_then() -> None:
    clock = Clock()

    def run() -> None:
        found, one, two = peer_limits(clock), Connection(ADA), Connection(ADA)
        found.joined(one)
        found.closed(one, spoke=False)
        found.hold(one, 0.5)
        found.joined(two)
        assert two.held
        clock.run(1)
        assert not two.held

    in_loop(run, clock)


def test_nobody_is_held_for_longer_than_the_most() -> None:
    clock = Clock()

    def run() -> None:
        found, one = peer_limits(clock), Connection(ADA)
        found.joined(one)
        for _ in range(10_000):
            found.hold(one, 0.05)
        clock.run(MAX_HOLD_S)
        assert not one.held
        found.hold(one, 1)
        found.closed(one, spoke=False)
        clock.run(2)
        assert found._groups == {}

    in_loop(run, clock)


def test_of_those_behind_one_address_only_the_one_who_floods_is_held() -> None:
    def run() -> None:
        found, one, two = peer_limits(), Connection(FAR, "a"), Connection(FAR, "b")
        for each in (one, two):
            found.joined(each)
        found.hold(one, 1)
        assert (one.held, two.held) == (True, False)

    in_loop(run)


def test_who_sends_too_much_is_read_more_slowly(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        found, one, root = peer_limits(), Connection(ADA), Connection(ROOT)
        for each in (one, root):
            found.joined(each)
            for _ in range(BURST_BYTES >> 20):
                found.received(each, 1 << 20, 0)
            assert not each.held
            found.received(each, 1 << 20, 0)
        assert (one.held, root.held) == (True, False)

    in_loop(run)
    assert caplog.messages == ["uid 1000 is sending too much data; reading from it more slowly"]


TUNNELS = Peer(via=Via.KUBERNETES, address="127.0.0.1")


def speaking(found: PeerLimits, users: str) -> list[Connection]:
    """Connections over forwarded ports, one of each user; a dot is nobody yet."""
    made = []
    for user in users:
        connection = Connection(TUNNELS)
        if not found.may_proceed(connection):
            connection.end()
        connection.user = user.strip(".")
        made.append(connection)
    return made


def ended(connections: list[Connection]) -> str:
    return "".join("x" if each.ended else each.user or "." for each in connections)


@pytest.mark.parametrize(
    ("users", "left"),
    [
        ("........b", "x.......b"),  # nobody's go first, the oldest
        ("b........", "bx......."),  # and no user's for them
        ("aaaaaaab.", "xaaaaaab."),
        ("aaabbbcc.", "aaabbbccx"),  # all have few: the new one goes
        ("bbbaaaaac", "bbbxaaaac"),
    ],
)
def test_over_forwarded_ports_whoever_has_most_makes_room(users: str, left: str) -> None:
    connections = list[Connection]()
    in_loop(lambda: connections.extend(speaking(peer_limits(max_per_peer=8), users)))
    assert ended(connections) == left


def test_a_forwarded_port_that_is_closed_makes_room() -> None:
    def run() -> None:
        found = peer_limits(max_per_peer=8)
        connections = speaking(found, "a" * 8)
        found.closed(connections[0], spoke=True)
        assert ended(connections + speaking(found, "b")) == "aaaaaaaab"

    in_loop(run)
