"""Limits how many connections peers have, how fast they make them, and pauses reading from those that send too much.

One peer cannot keep others out:
- it makes at most CONNECTIONS_PER_SECOND (an address: ADDRESS_CONNECTIONS_PER_SECOND), after a first burst, has at most
  `max_per_peer` that speak, and sends at most BYTES_PER_SECOND. An eighth of all connections is kept for peers that
  have none, one for administrators;
- it begins at most CALLS_A_REQUEST times as many calls as it may make requests. gRPC does not see further calls before
  that (`proxied_connection`), so a flood of calls waits on the sender's side at no cost: refusing one takes the loop
  0.2 ms;
- after a hold it cannot send everything at once: its connections are read again one by one, every RELEASE_S, and so are
  new simultaneous ones beyond AT_ONCE; each may cause all of them to be held again;
- a reason for closing or holding is logged once, then counted: a flood of connections does not flood the log.
A peer that has a uid is one peer, however many connections it has; without one, each connection is held by itself,
since a whole cluster may be behind one address.

Forwarded ports all end at one address, where only tokens distinguish callers. A connection belongs to nobody there
until a token on it has proved valid; from then on it belongs to that user. When the address is at its limit, the user
with the most connections loses the oldest; connections of nobody count as one user. So a user who takes all connections
loses them to others, one by one. A user with few loses none; the new connection is refused instead.
"""

import asyncio
import collections
import logging
import sys
import time
from collections.abc import Callable
from typing import Protocol

from kinetod.access.peers import Peer
from kinetod.base import metrics
from kinetod.base.logs import Tally, text_lines
from kinetod.permissions.caller_limits import Debts, RequestRate, full, less
from kinetod.permissions.role_policy import Via

FEW = 4  # connections: kinetoctl has one for each node, and a watch may have another
log = logging.getLogger(__name__)
MAX_CONNECTIONS = 4096  # of all peers
CONNECTIONS_PER_SECOND = 32  # for one user; the burst is four times as many
ADDRESS_CONNECTIONS_PER_SECOND = 128  # for one address, behind which many users may be
BYTES_PER_SECOND = 4 << 20  # the largest request has 1 MiB
BURST_BYTES = 16 << 20
CALLS_A_REQUEST = 4  # calls that a peer may begin for each request allowed to it; further ones would be refused
# This many seconds' worth of calls may begin at once, also after a pause; or BURST_CALLS, if that is more.
BURST_CALLS_S, BURST_CALLS = 0.2, 8
NEXT_CALLS_S, NEXT_CALLS = 0.04, 1
MAX_HOLD_S = 30.0
RELEASE_S = 0.005
AT_ONCE = 8  # connections that a peer opens at the same time without being held


class ForwardedConnection(Protocol):
    """A connection that can be ended. user: who it belongs to; "" until a token has identified the user."""

    peer: Peer
    user: str

    def end(self) -> None:
        """Closes the connection."""


class ForwardedConnections:
    """The connections that have sent something, oldest first."""

    def __init__(self) -> None:
        self._open: dict[str, dict[ForwardedConnection, None]] = {}  # by address

    def count(self, key: str) -> int:
        """The number of connections from one address."""
        return len(self._open.get(key, ()))

    def make_room(self, key: str, most: int) -> None:
        """Ends a connection if the address is at its limit and some user has more than FEW."""
        if self.count(key) < most:
            return
        users = collections.Counter(each.user for each in self._open[key])
        user, count = max(users.items(), key=lambda item: (item[1], not item[0]))
        if count > FEW:
            oldest = next(each for each in self._open[key] if each.user == user)
            self.remove(oldest)
            oldest.end()

    def add(self, tunnel: ForwardedConnection) -> None:
        """Adds a connection that has sent something."""
        self._open.setdefault(tunnel.peer.key, {})[tunnel] = None

    def remove(self, tunnel: ForwardedConnection) -> None:
        """Removes a closed connection."""
        group = self._open.get(tunnel.peer.key, {})
        group.pop(tunnel, None)
        if not group:
            self._open.pop(tunnel.peer.key, None)


class Held(Protocol):
    """A connection whose reading can be paused."""

    peer: Peer
    name: str
    user: str

    def end(self) -> None:
        """Closes the connection."""

    def hold(self) -> None:
        """Stops reading from it."""

    def release(self) -> None:
        """Resumes reading."""


class _Group:
    """Connections that are held together. held: in the order in which they are released."""

    def __init__(self) -> None:
        self.connections: set[Held] = set()
        self.held: dict[Held, None] = {}
        self.until: float | None = None  # None: nothing is held

    def hold_all(self) -> None:
        """Holds all connections; those being read are released last."""
        for each in self.connections - self.held.keys():
            self.hold(each)

    def hold(self, connection: Held) -> None:
        """Holds one connection."""
        self.held[connection] = None
        connection.hold()

    def discard(self, connection: Held) -> None:
        """Forgets a closed connection."""
        self.connections.discard(connection)
        self.held.pop(connection, None)


class PeerLimits:
    """Limits connections and what they send. is_admin: whether a peer is exempt."""

    def __init__(
        self,
        *,
        max_per_peer: Callable[[], int],
        requests_per_second: Callable[[], int],
        is_admin: Callable[[Peer], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_per_peer = max_per_peer
        self._requests_per_second = requests_per_second
        self._is_admin = is_admin
        self._clock = clock
        self._rate = RequestRate(lambda: CONNECTIONS_PER_SECOND, clock)
        self._address_rate = RequestRate(lambda: ADDRESS_CONNECTIONS_PER_SECOND, clock)
        self._open: collections.Counter[str] = collections.Counter()
        self._speaking: collections.Counter[str] = collections.Counter()
        self._sent = Debts(clock, MAX_CONNECTIONS)  # in bytes
        self._joined = Debts(clock, MAX_CONNECTIONS)  # connections
        self._begun = Debts(clock, MAX_CONNECTIONS)  # calls
        self._groups: dict[str, _Group] = {}  # speaking connections, by the key that they are held with
        self._tunnels = ForwardedConnections()
        self._tally = Tally(text_lines(log))

    @property
    def speaking(self) -> int:
        """The number of connections that have sent something."""
        return self._speaking.total()

    def may_open(self, peer: Peer) -> bool:
        """Whether this peer may open one more connection."""
        if self._is_admin(peer):
            return True
        rate = self._rate if peer.uid is not None else self._address_rate
        if rate.late_s(peer.key):
            self._refused(peer, "CONNECTION_RATE", "too many new connections per second")
            return False
        held, used = self._open[peer.key], self._open.total()
        if full(held, used, own=MAX_CONNECTIONS, in_all=MAX_CONNECTIONS, admin=False) is not None:
            self._refused(peer, "CONNECTIONS", f"{used} connections are already open")
            return False
        return True

    def opened(self, peer: Peer) -> None:
        """Counts a connection that was opened."""
        self._open[peer.key] += 1

    def may_proceed(self, connection: Held) -> bool:
        """Whether a connection that sent its first byte may continue; if so, it counts from now on."""
        key, admin = connection.peer.key, self._is_admin(connection.peer)
        held, used = self._speaking[key], self._speaking.total()
        if tunnelled := connection.peer.via is Via.KUBERNETES:
            self._tunnels.make_room(key, self._max_per_peer())
            held = self._tunnels.count(key)  # without those that are being closed
        if full(held, used, own=self._max_per_peer(), in_all=MAX_CONNECTIONS, admin=admin) is not None:
            why = f"{held} of {self._max_per_peer()} connections are open (access.max_connections), {used} in total"
            self._refused(connection.peer, "CONNECTIONS", why)
            return False
        self._speaking[key] += 1
        if tunnelled:
            self._tunnels.add(connection)
        return True

    def closed(self, connection: Held, *, spoke: bool) -> None:
        """Stops counting a closed connection."""
        less(self._open, connection.peer.key)
        if spoke:
            less(self._speaking, connection.peer.key)
        self._tunnels.remove(connection)
        name = _group(connection)
        if (group := self._groups.get(name)) is not None:
            group.discard(connection)
            if not group.connections and group.until is None:
                del self._groups[name]

    def joined(self, connection: Held) -> None:
        """Admits a connection to gRPC, unless its peer is held or has just joined many others."""
        name = _group(connection)
        group = self._groups.setdefault(name, _Group())
        group.connections.add(connection)
        if self._is_admin(connection.peer):
            return
        many = self._joined.add(name, 1, 1 / RELEASE_S) > AT_ONCE
        if many or group.until is not None:
            group.hold(connection)
            self._hold_until(name, group, RELEASE_S if group.until is None else 0.0)

    def may_begin(self, connection: Held) -> int:
        """How many calls a connection may start now."""
        if self._is_admin(connection.peer):
            return sys.maxsize
        begun = self._begun.add(_group(connection), 0, self._calls_per_second)
        return max(0, int(self._burst_calls - begun))

    @property
    def _calls_per_second(self) -> int:
        return CALLS_A_REQUEST * self._requests_per_second()

    @property
    def _burst_calls(self) -> float:
        return max(BURST_CALLS, BURST_CALLS_S * self._calls_per_second)

    def hold_back(self, connection: Held) -> None:
        """Holds a connection that would start too many calls, until some fit its rate again."""
        rate = self._calls_per_second
        room = self._burst_calls - self._begun.add(_group(connection), 0, rate)
        self._slowed(connection, "CALLS", "is starting too many calls per second")
        self.hold(connection, max(0.0, max(NEXT_CALLS, rate * NEXT_CALLS_S) - room) / rate)

    def received(self, connection: Held, size: int, calls: int) -> None:
        """Counts received bytes and the calls that began in them."""
        if self._is_admin(connection.peer):
            return
        group = _group(connection)
        self._begun.add(group, calls, self._calls_per_second)
        sent = self._sent.add(group, size, BYTES_PER_SECOND)
        if sent > BURST_BYTES:
            self._slowed(connection, "BYTES", "is sending too much data")
            self.hold(connection, (sent - BURST_BYTES) / BYTES_PER_SECOND)

    def hold(self, connection: Held, seconds: float) -> None:
        """Pauses reading from this peer for so long, on top of current holds; at most MAX_HOLD_S."""
        if self._is_admin(connection.peer):
            return
        name = _group(connection)
        group = self._groups.setdefault(name, _Group())
        group.hold_all()
        self._hold_until(name, group, seconds)

    def _hold_until(self, name: str, group: _Group, seconds: float) -> None:
        now, until = self._clock(), group.until
        group.until = min(now + MAX_HOLD_S, (now if until is None else max(now, until)) + seconds)
        if until is None:
            asyncio.get_running_loop().call_later(seconds, self._due, name)

    def _due(self, name: str) -> None:
        group = self._groups[name]
        assert group.until is not None
        left = group.until - self._clock()
        if left <= 0 and group.held:
            first = next(iter(group.held))
            del group.held[first]
            first.release()
            group.until = max(group.until, self._clock() + RELEASE_S)  # it may have been held again at once
            left = group.until - self._clock()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._due, name)
            return
        group.until = None
        if not group.connections:
            del self._groups[name]

    def unknown(self, listener: str, why: str) -> None:
        """Logs that an unidentified client was refused at that address."""
        self._tally.note((listener, why), {"text": f"a connection to {listener} was refused: {why}"})

    def _refused(self, peer: Peer, limit: str, why: str) -> None:
        self._limited(peer.key, limit, f"a connection from {peer.key} was refused: {why}")

    def _slowed(self, connection: Held, limit: str, why: str) -> None:
        self._limited(_group(connection), limit, f"{connection.peer.key} {why}; reading from it more slowly")

    def _limited(self, who: str, limit: str, text: str) -> None:
        metrics.limited(limit)
        self._tally.note((who, limit), {"text": text})


def _group(connection: Held) -> str:
    return connection.peer.key if connection.peer.uid is not None else connection.name
