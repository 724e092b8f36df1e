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
    """A connection that can be ended. user: whose it is; "": nobody's yet."""

    peer: Peer
    user: str

    def end(self) -> None:
        """Closes it."""


class Tunnels:
    """Those that speak, the oldest first."""

    def __init__(self) -> None:
        self._open: dict[str, dict[Tunnel, None]] = {}  # by address

    def count(self, key: str) -> int:
        """Of one address."""
        return len(self._open.get(key, ()))

    def make_room(self, key: str, most: int) -> None:
        """Ends one if the address has as many as it may, and somebody has more than FEW of them."""
        if self.count(key) < most:
            return
        users = collections.Counter(each.user for each in self._open[key])
        user, count = max(users.items(), key=lambda item: (item[1], not item[0]))
        if count > FEW:
            oldest = next(each for each in self._open[key] if each.user == user)
            self.remove(oldest)
            oldest.end()

    def add(self, tunnel: Tunnel) -> None:
        """It speaks."""
        self._open.setdefault(tunnel.peer.key, {})[tunnel] = None

    def remove(self, tunnel: Tunnel) -> None:
        """It is gone."""
        group = self._open.get(tunnel.peer.key, {})
        group.pop(tunnel, None)
        if not group:
            self._open.pop(tunnel.peer.key, None)
