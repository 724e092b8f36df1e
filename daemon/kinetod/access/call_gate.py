"""The gate that every call passes: identification, rate limit, authorization, and a line in the audit log.

Theory of operation
    `admit` runs before a call's own work and refuses calls by their name and the capture that they refer to. Access to
    processes is decided where they are looked up, by the same `role_policy.may`: for each target of a capture and each
    process of a list. A capture that the caller may not see is treated as if it did not exist.

    Each call writes one line to the audit log: a streaming call when it begins, any other when it ends, a refused one
    when it is refused.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kinetod.access.audit_log import AuditLog
from kinetod.access.call_limits import FLOODS, CallTracker
from kinetod.access.callers import Auth, Callers
from kinetod.base.errors import KinetodError, NotIdentified, NotPermitted, Reason
from kinetod.base.fair_slots import fair_share_key
from kinetod.permissions.caller_limits import COSTS, RequestRate
from kinetod.permissions.role_policy import CALLS, Action, Caller, Resource, listed, may, may_at_all, needed

ResourceOf = Callable[[str], Awaitable[Resource | None]]


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
                raise NotPermitted(Reason.ROLE_NEEDED, f"nobody may call {call}: no rule covers it")
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
