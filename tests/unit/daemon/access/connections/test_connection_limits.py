"""How many connections peers have, how fast they make them, and who is not read from."""

import asyncio
import logging
from collections.abc import Callable

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
    Crowd,
)
from kinetod.access.peers import Peer
from kinetod.permissions.role_policy import Via

ADA, ROOT = Peer(via=Via.UNIX, uid=1000), Peer(via=Via.UNIX, uid=0)
FAR = Peer(via=Via.TLS, address="192.0.2.7")
BURST = 4 * CONNECTIONS_PER_SECOND
REQUESTS_PER_SECOND = 50


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


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

    crowd: Crowd
    released = 0

    def release(self) -> None:
        super().release()
        self.released += 1
        self.crowd.hold(self, 1.0)


def crowd(clock: Callable[[], float] | None = None, max_per_peer: int = 2) -> Crowd:
    return Crowd(
        max_per_peer=lambda: max_per_peer,
        requests_per_second=lambda: REQUESTS_PER_SECOND,
        is_admin=lambda peer: peer.uid == 0,
        clock=clock or Clock(),
    )


def in_loop(function: Callable[[], None]) -> None:
    async def run() -> None:
        function()

    asyncio.run(run())


def test_a_peer_that_connects_too_fast_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    def run() -> None:
        found = crowd(clock)
        assert [found.may_open(ADA) for _ in range(BURST + 50)] == [True] * BURST + [False] * 50
        assert all(found.may_open(FAR) for _ in range(3 * BURST))
        assert all(found.may_open(ROOT) for _ in range(1000))
        clock.now += 1
        assert sum(found.may_open(ADA) for _ in range(100)) == CONNECTIONS_PER_SECOND

    with caplog.at_level(logging.WARNING):
        in_loop(run)
    (line,) = [record.message for record in caplog.records]
    assert line == "a connection of uid 1000 was refused: it opens too many per second"


def test_connections_that_speak_are_counted_for_each_peer_until_they_are_closed() -> None:
    def run() -> None:
        found = crowd()
        one, two, three = (Connection(ADA) for _ in range(3))
        assert [found.may_speak(each) for each in (one, two, three)] == [True, True, False]
        assert found.may_speak(Connection(FAR))
        found.closed(one, spoke=True)
        assert found.may_speak(three)

    in_loop(run)


def test_a_peer_without_connections_and_root_get_one_where_there_are_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd_module, "MAX_CONNECTIONS", 8)

    def run() -> None:
        found = crowd(max_per_peer=100)
        assert sum(found.may_speak(Connection(ADA)) for _ in range(20)) == 8
        assert found.may_speak(Connection(FAR))
        assert not found.may_speak(Connection(Peer(via=Via.UNIX, uid=1001)))
        assert found.may_speak(Connection(ROOT))

    in_loop(run)


def test_all_connections_of_a_user_are_held_also_those_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def run() -> None:
        found = crowd(clock)
        one, two, other = Connection(ADA), Connection(ADA), Connection(ROOT)
        for each in (one, other):
            found.joined(each)
        found.hold(one, 0.5)
        found.hold(one, 0.5)
        found.hold(other, 5)
        found.joined(two)
        assert (one.held, two.held, other.held) == (True, True, False)
        clock.now += 0.9
        found._due("uid 1000")
        assert one.held
        clock.now += 0.2
        found._due("uid 1000")
        assert (one.held, two.held) == (False, True)
        clock.now += RELEASE_S
        found._due("uid 1000")
        assert (one.held, two.held) == (False, False)

    in_loop(run)


def test_what_was_held_is_read_from_one_by_one_until_one_floods_again() -> None:
    clock = Clock()

    def run() -> None:
        found = crowd(clock)
        several = [Connection(ADA) for _ in range(4)]
        for each in several:
            found.joined(each)
        found.hold(several[0], 0.5)
        for _ in range(2):
            clock.now += 0.5
            found._due("uid 1000")
        first, second = (each for each in several if not each.held)
        found.hold(second, 0.5)
        assert all(each.held for each in several)
        let_go = []
        while any(each.held for each in several):
            clock.now += 1
            found._due("uid 1000")
            let_go += [each for each in several if not each.held and each not in let_go]
        assert set(let_go[2:]) == {first, second}  # who had a turn waits for the others

    in_loop(run)


def test_many_connections_at_once_are_read_from_one_after_the_other() -> None:
    clock = Clock()

    def run() -> None:
        found = crowd(clock)
        several, root = [Connection(ADA) for _ in range(3 * AT_ONCE)], Connection(ROOT)
        for each in (*several, root):
            found.joined(each)
        assert [each.held for each in (*several, root)] == [False] * AT_ONCE + [True] * 2 * AT_ONCE + [False]
        for released in range(AT_ONCE + 1, 3 * AT_ONCE + 1):
            clock.now += RELEASE_S
            found._due("uid 1000")
            assert sum(not each.held for each in several) == released

    in_loop(run)


def test_calls_are_granted_at_four_times_the_rate_of_requests_to_all_connections_of_a_user() -> None:
    clock, rate = Clock(), CALLS_A_REQUEST * REQUESTS_PER_SECOND

    def run() -> None:
        found = crowd(clock)
        one, two, root = Connection(ADA), Connection(ADA), Connection(ROOT)
        for each in (one, two, root):
            found.joined(each)
        assert found.may_begin(one) == rate * BURST_CALLS_S
        found.received(one, 100, found.may_begin(one))
        found.received(root, 100, 1000)
        assert (found.may_begin(two), found.may_begin(root) > 1000) == (0, True)
        found.hold_back(two)
        assert (one.held, two.held, root.held) == (True, True, False)
        clock.now += 0.99 * NEXT_CALLS_S
        found._due("uid 1000")
        assert (one.held, two.held) == (True, True)
        clock.now += 0.02 * NEXT_CALLS_S
        found._due("uid 1000")
        assert sorted((one.held, two.held)) == [False, True]
        assert found.may_begin(one) == int(rate * 1.01 * NEXT_CALLS_S)

    in_loop(run)


def test_calls_begin_also_where_the_rate_is_one_request_a_second() -> None:
    clock = Clock()

    def run() -> None:
        found = Crowd(
            max_per_peer=lambda: 2, requests_per_second=lambda: 1, is_admin=lambda peer: peer.uid == 0, clock=clock
        )
        one = Connection(ADA)
        found.joined(one)
        assert found.may_begin(one) == BURST_CALLS
        found.received(one, 100, BURST_CALLS)
        found.hold_back(one)
        clock.now += 1.01 / CALLS_A_REQUEST
        found._due("uid 1000")
        assert (one.held, found.may_begin(one)) == (False, 1)

    in_loop(run)


def test_one_that_is_held_again_while_it_is_let_go_is_held_as_long_as_that_says() -> None:
    clock = Clock()

    def run() -> None:
        found, one = crowd(clock), Flooding(ADA)
        one.crowd = found
        found.joined(one)
        found.hold(one, 0.5)
        for seconds, released in ((0.5, 1), (0.9, 1), (0.2, 2)):
            clock.now += seconds
            found._due("uid 1000")
            assert (one.held, one.released) == (True, released)

    in_loop(run)


def test_a_flood_counts_also_when_its_connection_is_closed_by_then() -> None:
    clock = Clock()

    def run() -> None:
        found, one, two = crowd(clock), Connection(ADA), Connection(ADA)
        found.joined(one)
        found.closed(one, spoke=False)
        found.hold(one, 0.5)
        found.joined(two)
        assert two.held
        clock.now += 1
        found._due("uid 1000")
        found._due("uid 1000")
        assert not two.held

    in_loop(run)


def test_nobody_is_held_for_longer_than_the_most() -> None:
    clock = Clock()

    def run() -> None:
        found, one = crowd(clock), Connection(ADA)
        found.joined(one)
        for _ in range(10_000):
            found.hold(one, 0.05)
        clock.now += MAX_HOLD_S
        found._due("uid 1000")
        assert not one.held

    in_loop(run)


def test_of_those_behind_one_address_only_the_one_who_floods_is_held() -> None:
    def run() -> None:
        found, one, two = crowd(), Connection(FAR, "a"), Connection(FAR, "b")
        for each in (one, two):
            found.joined(each)
        found.hold(one, 1)
        assert (one.held, two.held) == (True, False)

    in_loop(run)


def test_who_sends_too_much_is_read_more_slowly() -> None:
    def run() -> None:
        found, one, root = crowd(), Connection(ADA), Connection(ROOT)
        for each in (one, root):
            found.joined(each)
            for _ in range(BURST_BYTES >> 20):
                found.received(each, 1 << 20, 0)
            assert not each.held
            found.received(each, 1 << 20, 0)
        assert (one.held, root.held) == (True, False)

    in_loop(run)


TUNNELS = Peer(via=Via.KUBERNETES, address="127.0.0.1")


def speaking(found: Crowd, users: str) -> list[Connection]:
    """Connections over forwarded ports, one of each user; a dot is nobody yet."""
    made = []
    for user in users:
        connection = Connection(TUNNELS)
        if not found.may_speak(connection):
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
    in_loop(lambda: connections.extend(speaking(crowd(max_per_peer=8), users)))
    assert ended(connections) == left
