"""Connections of callers whom only tokens tell apart: forwarded ports all end at one address.

Theory of operation
    A connection is nobody's until the token of a call on it was found good; it is that user's from then on. Where an
    address has as many as it may, the user with the most loses the oldest, nobody being a user too: so whoever takes
    all that there are loses them to others, one by one. A user of few loses none; then the new one is refused.
"""

import collections
from typing import Protocol

from kinetod.access.peers import Peer

FEW = 4  # connections: kinetoctl has one for each node, and a watch may have another


class Tunnel(Protocol):
    """A connection that can be ended. user: who it belongs to; "" until a token has identified the user."""

    peer: Peer
    user: str

    def end(self) -> None:
        """Closes the connection."""


class Tunnels:
    """The connections that have sent something, oldest first."""

    def __init__(self) -> None:
        self._open: dict[str, dict[Tunnel, None]] = {}  # by address

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

    def add(self, tunnel: Tunnel) -> None:
        """Adds a connection that has sent something."""
        self._open.setdefault(tunnel.peer.key, {})[tunnel] = None

    def remove(self, tunnel: Tunnel) -> None:
        """Removes a closed connection."""
        group = self._open.get(tunnel.peer.key, {})
        group.pop(tunnel, None)
        if not group:
            self._open.pop(tunnel.peer.key, None)
