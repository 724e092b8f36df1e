"""Limits how many calls a caller has at a time, and slows down callers who flood the daemon.

Theory of operation
    `entered` runs before anything of a call is read and knows only what the connection shows: a uid, a certificate in
    `access.certificates`, or else an address. So a call whose request never arrives is counted as well.

    A refused request still costs the loop some 0.2 ms. So for each request refused as one too many, the daemon does not
    read from its sender for PENALTY_S: the excess takes less than 0.5 % of the daemon's time and piles up on the
    sender's side. These refusals are counted in the audit log (`log_tally`), not listed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kinetod.access.audit_log import AuditLog, proxy_facts
from kinetod.access.callers import Auth, Callers, CallerStatus
from kinetod.base import metrics
from kinetod.base.errors import Exhausted, KinetodError, Reason
from kinetod.base.fair_slots import fair_share_key
from kinetod.base.logs import Tally
from kinetod.permissions.caller_limits import RequestRate, Shares
from kinetod.permissions.role_policy import Caller

PENALTY_S = 0.05
FLOODS = frozenset({Reason.TOO_MANY_REQUESTS, Reason.TOO_MANY_CALLS})


class CallTracker:
    """Admits calls within their limits. hold, vouch: see `Front`."""

    def __init__(
        self,
        callers: Callers,
        calls: Shares,
        rate: RequestRate,
        audit: AuditLog,
        *,
        hold: Callable[[str, float], None],
        vouch: Callable[[str, str], None] = lambda _connection, _user: None,
    ) -> None:
        self._callers = callers
        self._calls = calls
        self._rate = rate
        self._audit = audit
        self._hold = hold
        self._vouch = vouch
        self._tally = Tally(self._write)

    async def introduced(self, connection: str, auth: Auth) -> None:
        """Identifies the user of a connection that only a token identifies. Raises Exhausted."""
        if user := await self._callers.introduce(connection, auth):
            self._vouch(connection, user)

    @contextlib.contextmanager
    def entered(self, method: str, connection: str, auth: Auth, *, ungated: bool) -> Iterator[None]:
        """Counts one of the caller's calls for the block. ungated: the method passes no gate. Raises Exhausted."""
        standing = self._callers.standing(connection, auth)
        fair_share_key.set(standing.key)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._calls.one(standing.key, standing.who, admin=standing.admin))
                if ungated:  # counted separately, so that the user's other calls do not delay a probe
                    self._rate.take(f"{standing.key} {method}", standing.who)
            except Exhausted as exc:
                self.flooded(method, connection, standing, exc)
                raise
            if ungated:
                self._tally.note((standing.key, method), self._line(method, "allowed", standing))
            yield

    def flooded(self, call: str, connection: str, who: CallerStatus | Caller, error: KinetodError) -> None:
        """Notes a request that was refused because there are too many."""
        metrics.limited(str(error.reason))
        line = self._line(call, "refused", who, reason=str(error.reason))
        self._tally.note((who.key, call, error.reason), line)
        if who.proxy is None:  # other users of a page share its connection
            self._hold(connection, PENALTY_S)

    def unknown(self, call: str, connection: str, auth: Auth) -> None:
        """Notes a call refused before its caller was identified. Raises Exhausted if there are too many."""
        standing = self._callers.standing(connection, auth)
        try:
            self._rate.take(f"{standing.key} unknown", standing.who)
        except Exhausted as exc:
            self.flooded(call, connection, standing, exc)
            raise

    def close(self) -> None:
        """Writes the lines that are still only counted."""
        self._tally.flush()

    @staticmethod
    def _line(call: str, decision: str, who: CallerStatus | Caller, **facts: Any) -> dict[str, Any]:
        line: dict[str, Any] = {"call": call, "decision": decision, **facts}
        if isinstance(who, Caller):
            return {**line, "caller": who}
        named = {"via": str(who.via), "uid": who.uid, "address": who.address, "proxy": proxy_facts(who.proxy)}
        return {**line, **named}

    def _write(self, line: Any) -> None:
        facts = dict(line)
        call, decision, caller = facts.pop("call"), facts.pop("decision"), facts.pop("caller", None)
        self._audit.write(call, decision, caller, **facts)
