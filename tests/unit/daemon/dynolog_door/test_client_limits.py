"""One client keeps nobody else out."""

import asyncio
from collections.abc import Callable

from kinetod.access.peers import Peer
from kinetod.dynolog_door.client_limits import ALL, CONNECTIONS_PER_SECOND, MAX_HOLD_S, OWN, ClientLimits
from kinetod.permissions.role_policy import Via

ADA, BOB, ROOT = (Peer(via=Via.DYNOLOG, uid=uid) for uid in (1000, 1001, 0))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def with_limits(play: Callable[[ClientLimits, Clock], None]) -> None:
    async def played() -> None:
        clock = Clock()
        play(ClientLimits(lambda peer: peer.uid == 0, clock), clock)

    asyncio.run(played())


def test_a_client_has_so_many_connections_and_may_have_another_when_one_is_closed() -> None:
    def play(limits: ClientLimits, _clock: Clock) -> None:
        assert [limits.may_open(ADA) for _ in range(OWN + 1)] == [True] * OWN + [False]
        assert limits.may_open(BOB)
        limits.closed(ADA)
        assert limits.may_open(ADA)

    with_limits(play)


def test_all_clients_together_leave_room_for_a_newcomer_and_for_root() -> None:
    def play(limits: ClientLimits, _clock: Clock) -> None:
        peers = [Peer(via=Via.DYNOLOG, address=f"192.0.2.{number}") for number in range(ALL // OWN)]
        assert all(limits.may_open(peer) for peer in peers for _ in range(OWN))
        assert not limits.may_open(peers[0])
        assert limits.may_open(BOB)
        assert not limits.may_open(BOB)  # the reserve is for who has none
        assert all(limits.may_open(ROOT) for _ in range(OWN + 1))

    with_limits(play)


def test_connections_are_made_at_a_limited_rate() -> None:
    def play(limits: ClientLimits, clock: Clock) -> None:
        def opened(peer: Peer, count: int) -> int:
            done = 0
            for _ in range(count):
                if limits.may_open(peer):
                    limits.closed(peer)
                    done += 1
            return done

        assert opened(ADA, 1000) == 4 * CONNECTIONS_PER_SECOND
        assert (opened(BOB, 10), opened(ROOT, 1000)) == (10, 1000)
        clock.now += 1
        assert opened(ADA, 1000) == CONNECTIONS_PER_SECOND

    with_limits(play)


def test_a_client_that_was_one_too_many_is_read_later_and_others_are_not() -> None:
    def play(limits: ClientLimits, clock: Clock) -> None:
        limits.hold(ADA, 0.5)
        limits.hold(ADA, 0.5)
        limits.hold(ROOT, 5)
        assert (limits.wait_s(ADA), limits.wait_s(BOB), limits.wait_s(ROOT)) == (1.0, 0.0, 0.0)
        limits.hold(ADA, 1000)
        assert limits.wait_s(ADA) == MAX_HOLD_S
        clock.now += MAX_HOLD_S
        assert limits.wait_s(ADA) == 0.0

    with_limits(play)
