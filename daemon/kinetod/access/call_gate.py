"""The gate that every call passes: identification, rate limit, authorization, and a line in the audit log.

Theory of operation
    `admit` runs before a call's own work and refuses calls by their name and the capture that they refer to. Access to
    processes is decided where they are looked up, by the same `role_policy.may`: for each target of a capture and each
    process of a list. A capture that the caller may not see is treated as if it did not exist.

    Each call writes one line to the audit log: a streaming call when it begins, any other when it ends, a refused one
    when it is refused.

    `CallTracker` limits how many calls a caller has at a time, and slows down callers who flood the daemon. `entered`
    runs before anything of a call is read and knows only what the connection shows: a uid, a certificate in
    `access.certificates`, or else an address. So a call whose request never arrives is counted as well.

    A refused request still costs the loop some 0.2 ms. So for each request refused as one too many, the daemon does not
    read from its sender for PENALTY_S: the excess takes less than 0.5 % of the daemon's time and piles up on the
    sender's side. These refusals are counted in the audit log (`log_tally`), not listed.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kinetod.access.audit_log import AuditLog, proxy_facts
from kinetod.access.callers import Auth, Callers, CallerStatus
from kinetod.base import metrics
from kinetod.base.errors import Exhausted, KinetodError, NotIdentified, NotPermitted, Reason
from kinetod.base.fair_slots import fair_share_key
from kinetod.base.logs import Tally
from kinetod.permissions.caller_limits import COSTS, RequestRate, Shares
from kinetod.permissions.role_policy import CALLS, Action, Caller, Resource, listed, may, may_at_all, needed

ResourceOf = Callable[[str], Awaitable[Resource | None]]
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

    async def introduced(self, connection: str, auth: Auth) -> NotPermitted | None:
        """Identifies the user of a connection that only a token identifies. Raises Exhausted.

        Returns why that was not possible; the call then counts for its address, and `entered` wants to know.
        """
        try:
            user = await self._callers.introduce(connection, auth)
        except NotPermitted as exc:
            return exc
        if user:
            self._vouch(connection, user)
        return None

    @contextlib.contextmanager
    def entered(
        self, method: str, connection: str, auth: Auth, *, ungated: bool, unidentified: NotPermitted | None = None
    ) -> Iterator[None]:
        """Counts one of the caller's calls for the block.

        ungated: the method passes no gate; unidentified: see `introduced`. Raises Exhausted, and `unidentified` where
        it is the reason why the call shares a limit with strangers.
        """
        standing = self._callers.standing(connection, auth)
        fair_share_key.set(standing.key)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._calls.one(standing.key, standing.who, admin=standing.admin))
                if ungated:  # counted separately, so that the user's other calls do not delay a probe
                    self._rate.take(f"{standing.key} {method}", standing.who)
            except Exhausted as exc:
                error = unidentified or exc
                self.flooded(method, connection, standing, error)
                raise error from None
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


@dataclass(slots=True)
class CallAnswer:
    """Answer of a call, filled in by the call."""

    answer: Any = None


class Authorizer:
    """Authorizes calls. resource_of: looks up a capture by id; no_such: error for one that does not exist."""

    def __init__(
        self,
        callers: Callers,
        rate: RequestRate,
        audit: AuditLog,
        call_tracker: CallTracker,
        *,
        resource_of: ResourceOf,
        no_such: Callable[[str], KinetodError],
    ) -> None:
        self._callers = callers
        self._rate = rate
        self._audit = audit
        self._call_tracker = call_tracker
        self._resource_of = resource_of
        self._no_such = no_such

    async def admit(self, call: str, connection: str, auth: Auth, request: Any) -> Caller:
        """Identifies and authorizes the caller. Raises KinetodError."""
        caller: Caller | None = None
        try:
            action = CALLS.get(call)
            caller = await self._callers.caller(connection, auth, action, _pods(request))
            fair_share_key.set(caller.key)
            self._rate.take(caller.key, caller, COSTS.get(call, 1))
            if caller.refusal is not None:
                raise caller.refusal
            if action is None:
                raise NotPermitted(Reason.ROLE_NEEDED, f"nobody is allowed to call {call}: no rule covers it")
            await self._decide(caller, action, request)
        except KinetodError as exc:
            if caller is None:
                self._call_tracker.unknown(call, connection, auth)
            elif exc.reason in FLOODS:
                self._call_tracker.flooded(call, connection, caller, exc)
                raise
            self._refused(call, caller, request, exc)
            raise
        return caller

    async def _decide(self, caller: Caller, action: Action, request: Any) -> None:
        if not may_at_all(caller, action):
            raise _role_needed(caller, action)
        capture_id = _capture_id(request)
        if capture_id is None:
            return
        resource = await self._resource_of(capture_id)
        if resource is None or not may(caller, Action.SEE_CAPTURE, resource):
            raise self._no_such(capture_id)
        if not may(caller, action, resource):
            raise _role_needed(caller, action)

    @contextlib.contextmanager
    def noted(self, call: str, caller: Caller, request: Any) -> Iterator[CallAnswer]:
        """Writes the audit line of a call. Wrap a unary call entirely, a streaming one only at its beginning."""
        noted = CallAnswer()
        try:
            yield noted
        except KinetodError as exc:
            self._refused(call, caller, request, exc)
            raise
        except BaseException as exc:  # a caller that hangs up too
            self._audit.write(call, type(exc).__name__, caller, **audit_fields(request))
            raise
        self._audit.write(call, "allowed", caller, **{**audit_fields(request), **_answered(noted.answer)})

    def note_end(self, capture: Any) -> None:
        """Writes the audit line for the end of a capture."""
        verdicts = [str(target.reason_code) or "DONE" for target in capture.targets]
        counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
        self._audit.write(
            "(end of capture)",
            "ended",
            None,
            capture=capture.id,
            owner_uid=capture.owner_uid if capture.HasField("owner_uid") else None,
            status=int(capture.status),
            verdicts=counts,
        )

    def _refused(self, call: str, caller: Caller | None, request: Any, error: KinetodError) -> None:
        denied = isinstance(error, NotPermitted | NotIdentified)
        facts = {"reason": str(error.reason), **audit_fields(request), **error.audited}
        self._audit.write(call, "denied" if denied else "refused", caller, **facts)


def _role_needed(caller: Caller, action: Action) -> NotPermitted:
    return NotPermitted(
        Reason.ROLE_NEEDED,
        f"{caller} is not allowed to {action} (roles: {listed(caller.roles)}); that needs {needed(action)}",
    )


def _capture_id(request: Any) -> str | None:
    """The capture that a request names; None if it names none."""
    for field in ("id", "capture_id"):
        if field in request.DESCRIPTOR.fields_by_name:
            return str(getattr(request, field))
    return None


def _pods(request: Any) -> frozenset[str]:
    """The pods that a request names, by UID."""
    fields = request.DESCRIPTOR.fields_by_name
    spec = request.spec if "spec" in fields else request
    return frozenset(spec.selector.pod_uids) if "selector" in spec.DESCRIPTOR.fields_by_name else frozenset()


def audit_fields(request: Any) -> dict[str, Any]:
    """The facts about a request for the audit log."""
    asked: dict[str, Any] = {"capture": _capture_id(request)}
    fields = request.DESCRIPTOR.fields_by_name
    if "pid" in fields:
        asked["asked_pid"] = request.pid
    spec = request.spec if "spec" in fields else request
    if "selector" in spec.DESCRIPTOR.fields_by_name:
        asked["selector"] = _selector(spec.selector)
    return asked


def _selector(selector: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for field, value in selector.ListFields():
        if isinstance(value, str):
            shown[field.name] = value[:500]
        else:
            shown[field.name] = value if isinstance(value, (bool, int)) else list(value[:100])
    return shown


def _answered(capture: Any) -> dict[str, Any]:
    """The audit facts of an answered capture: its id, owner and targets."""
    if capture is None or capture.DESCRIPTOR.name != "Capture":
        return {}
    return {
        "capture": capture.id,
        "owner_uid": capture.owner_uid if capture.HasField("owner_uid") else None,
        "targets": [_target(target) for target in capture.targets[:100]],
    }


def _target(target: Any) -> Mapping[str, Any]:
    shown = {"pid": target.pid, "uid": target.process.uid}
    return {**shown, "job": target.process.job_id} if target.process.job_id else shown
