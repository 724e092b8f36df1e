"""What every call passes: identification, rate limit, authorization, and a line in the audit log.

Theory of operation
    `admit` runs before a call's own work and refuses what can be refused by the call's name and the capture that it
    names. Access to processes is decided where they are looked up, by the same `role_policy.may`: for each target of a
    capture and each process of a list. A capture that the caller may not see is treated as if it did not exist.

    Each call writes one line to the audit log: a streaming call when it begins, any other when it ends, a refused one
    when it is refused.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kinetod.access.audit_log import AuditLog
from kinetod.access.call_limits import FLOODS, Doorkeeper
from kinetod.access.callers import Auth, Callers
from kinetod.base.errors import KinetodError, NotIdentified, NotPermitted, Reason
from kinetod.base.fair_slots import payer
from kinetod.permissions.caller_limits import COSTS, RequestRate
from kinetod.permissions.role_policy import CALLS, Action, Caller, Thing, listed, may, may_at_all, needed

_CAPTURE_ACTIONS = (Action.SEE_CAPTURE, Action.CHANGE_CAPTURE)
ThingOf = Callable[[str], Awaitable[Thing | None]]


@dataclass(slots=True)
class Noted:
    """What a call answered, filled in by the call."""

    answer: Any = None


class Gate:
    """Authorizes calls. thing_of: looks up a capture by id; no_such: the error for one that does not exist."""

    def __init__(
        self,
        callers: Callers,
        rate: RequestRate,
        audit: AuditLog,
        doorkeeper: Doorkeeper,
        *,
        thing_of: ThingOf,
        no_such: Callable[[str], KinetodError],
    ) -> None:
        self._callers = callers
        self._rate = rate
        self._audit = audit
        self._doorkeeper = doorkeeper
        self._thing_of = thing_of
        self._no_such = no_such

    async def admit(self, call: str, connection: str, auth: Auth, request: Any) -> Caller:
        """Identifies and authorizes the caller. Raises KinetodError."""
        caller: Caller | None = None
        try:
            action = CALLS.get(call)
            caller = await self._callers.caller(connection, auth, action, _pods(request))
            payer.set(caller.key)
            self._rate.take(caller.key, caller, COSTS.get(call, 1))
            if caller.refusal is not None:
                raise caller.refusal
            if action is None:
                raise NotPermitted(Reason.ROLE_NEEDED, f"nobody may call {call}: no rule covers it")
            await self._decide(caller, action, request)
        except KinetodError as exc:
            if caller is None:
                self._doorkeeper.unknown(call, connection, auth)
            if caller is not None and exc.reason in FLOODS:
                self._doorkeeper.flooded(call, connection, caller, exc)
            else:
                self._refused(call, caller, request, exc)
            raise
        return caller

    async def _decide(self, caller: Caller, action: Action, request: Any) -> None:
        if not may_at_all(caller, action):
            raise _role_needed(caller, action)
        capture_id = _capture_id(request)
        if action not in _CAPTURE_ACTIONS or capture_id is None:
            return
        thing = await self._thing_of(capture_id)
        if thing is None or not may(caller, Action.SEE_CAPTURE, thing):
            raise self._no_such(capture_id)
        if not may(caller, action, thing):
            raise _role_needed(caller, action)

    @contextlib.contextmanager
    def noted(self, call: str, caller: Caller, request: Any) -> Iterator[Noted]:
        """Writes the audit line of a call. Wrap a unary call entirely, a streaming one only at its beginning."""
        noted = Noted()
        try:
            yield noted
        except KinetodError as exc:
            self._refused(call, caller, request, exc)
            raise
        except BaseException as exc:  # a caller that hangs up too
            self._audit.write(call, type(exc).__name__, caller, **what_is_asked(request))
            raise
        self._audit.write(call, "allowed", caller, **{**what_is_asked(request), **_answered(noted.answer)})

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
        facts = {"reason": str(error.reason), **what_is_asked(request), **error.audited}
        self._audit.write(call, "denied" if denied else "refused", caller, **facts)


def _role_needed(caller: Caller, action: Action) -> NotPermitted:
    return NotPermitted(
        Reason.ROLE_NEEDED,
        f"{caller} may not {action} with the roles {listed(caller.roles)}; that needs {needed(action)}",
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


def what_is_asked(request: Any) -> dict[str, Any]:
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
