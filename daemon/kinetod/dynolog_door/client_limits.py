"""How many connections each client of Dynolog may have and make, so that one keeps nobody else out.

Theory of operation
    A connection counts for a user of this host, or for the address of another host. Each may have OWN open and make
    CONNECTIONS_PER_SECOND; of all, ALL may be open, an eighth more for clients who have none, and another for root and
    the daemon's own user, whom the other limits do not concern. What is beyond is closed at once.

    A client that has been refused as one too many by the limits of all calls (`call_limits`) is not read from for a
    while, as at the gRPC door.
"""

import collections
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kinetod.access.peers import Peer
from kinetod.base import metrics
from kinetod.base.log_tally import Tally
from kinetod.base.safe_text import clean
from kinetod.permissions.caller_limits import RequestRate, full, less

log = logging.getLogger(__name__)

OWN = 32
ALL = 256
CONNECTIONS_PER_SECOND = 32  # the burst is four times as many
MAX_HOLD_S = 30.0
UNKNOWN, UNANSWERED = "unknown", "unanswered"


class ClientLimits:
    """Counts connections. is_admin: whether a peer is exempt."""

    def __init__(self, is_admin: Callable[[Peer], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_admin = is_admin
        self._clock = clock
        self._rate = RequestRate(lambda: CONNECTIONS_PER_SECOND, clock)
        self._open: collections.Counter[str] = collections.Counter()
        self._held_until: dict[str, float] = {}
        self._tally = Tally(_log)

    def may_open(self, peer: Peer) -> bool:
        """Counts one more connection of this peer, or returns False if it has too many."""
        admin = self._is_admin(peer)
        if not admin and self._rate.late_s(peer.key):
            self._refused(peer, "CONNECTION_RATE", "it opens too many per second")
            return False
        held, used = self._open[peer.key], self._open.total()
        if full(held, used, own=OWN, in_all=ALL, admin=admin) is not None:
            self._refused(peer, "CONNECTIONS", f"it has {held} of {OWN}, and {used} are open in all")
            return False
        self._open[peer.key] += 1
        return True

    def closed(self, peer: Peer) -> None:
        """Stops counting a closed connection."""
        less(self._open, peer.key)

    def hold(self, peer: Peer, seconds: float) -> None:
        """Delays reading from this peer for so long, on top of current delays."""
        if self._is_admin(peer):
            return
        now = self._clock()
        self._held_until = {key: until for key, until in self._held_until.items() if until > now}
        before = self._held_until.get(peer.key, now)
        self._held_until[peer.key] = min(now + MAX_HOLD_S, before + seconds)

    def wait_s(self, peer: Peer) -> float:
        """How long this peer is not to be read from."""
        return max(0.0, self._held_until.get(peer.key, 0.0) - self._clock())

    def unknown(self, why: str) -> None:
        """Logs that a client was refused whom the kernel does not identify."""
        self._tally.note(why, {"text": f"a connection of a client of Dynolog was refused: {why}"})

    def nonsense(self, peer: Peer, what: str) -> None:
        """Counts and logs something that is no request."""
        metrics.dynolog_request(UNKNOWN, UNANSWERED)
        text = f"a client of Dynolog, {peer.key}, got no answer: {clean(what, 200)}"
        self._tally.note((peer.key, UNANSWERED), {"text": text})

    def _refused(self, peer: Peer, limit: str, why: str) -> None:
        metrics.limited(limit)
        text = f"a connection of a client of Dynolog, {peer.key}, was refused: {why}"
        self._tally.note((peer.key, limit), {"text": text})


def _log(line: Mapping[str, Any]) -> None:
    more = f" ({line['count']} more)" if "count" in line else ""
    log.warning("%s%s", line.get("text", "more connections were refused"), more)
