"""Connections of callers who can be told apart only by tokens, because forwarded ports all end at one address.

Theory of operation
    A connection belongs to nobody until a token on it has been found valid; from then on it belongs to that user. When
    an address is at its limit, the user with the most connections loses the oldest; those of nobody count as one user.
    So whoever takes all connections loses them to others, one by one. A user with few loses none; the new connection is
    refused instead.
"""

import collections
from typing import Protocol

from kinetod.access.peers import Peer

FEW = 4  # connections: kinetoctl has one for each node, and a watch may have another


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
