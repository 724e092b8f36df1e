"""The initial state of a new capture, its owner, and the idempotency key of its owner."""

import os
import secrets
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import NamedTuple

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.captures.request.target_resolution import Resolved
from kinetod.permissions.role_policy import Action, Caller, sees_all

NOBODY = -1


def new_capture(
    spec: pb.CaptureSpec, targets: Sequence[Resolved], *, host: str, requested_ns: int, owner_uid: int
) -> pb.Capture:
    """Builds a new capture: its targets are pending, and those with a problem have already ended with it."""
    now_ns = time.time_ns()
    capture = pb.Capture(
        id=new_id(now_ns),
        spec=spec,
        status=pb.CAPTURE_STATUS_RUNNING,
        created_ns=now_ns,
        host=host,
        owner_uid=owner_uid,
        armed_until_ns=now_ns + spec.arm_ns if spec.arm_ns else 0,
    )
    for resolved in targets:
        process = resolved.process
        target = capture.targets.add(pid=process.pid, start_time_ns=process.start_time_ns, process=process)
        target.state = pb.TARGET_STATE_PENDING
        target.state_since_ns = now_ns
        target.requested_ns = requested_ns
        target.recorder = resolved.records
        target.warnings.extend(resolved.warnings)
        if resolved.problem is not None:
            target.state = pb.TARGET_STATE_ENDED
            target.verdict = pb.VERDICT_FAILED
            target.reason_code = resolved.problem.reason
            target.reason = resolved.problem.message
        if (attached := resolved.attached) is not None:
            target.attach.method = attached.method
            target.attach.latency_ns = attached.latency_ns
            target.attach.stopped_ns = attached.stopped_ns
    return capture


def new_id(now_ns: int) -> str:
    """A capture id that sorts by time, such as 20260131-235959-123-9f86d0."""
    when = datetime.fromtimestamp(now_ns // 10**9, timezone.utc)
    return f"{when:%Y%m%d-%H%M%S}-{now_ns // 10**6 % 1000:03d}-{secrets.token_hex(3)}"


class OwnersKey(NamedTuple):
    """An idempotency key, scoped to its owner."""

    text: str
    owner_uid: int

    @property
    def stored(self) -> str:
        """The key in its form in the index; "" for none."""
        return f"{self.owner_uid}:{self.text}" if self.text else ""


def owner_of(caller: Caller) -> int:
    """The uid that owns the caller's captures; the daemon's own for a certificate that maps to no user."""
    return os.geteuid() if caller.uid is None else caller.uid


def whose_are_listed(caller: Caller) -> int | None:
    """The uid whose captures the caller may list; None for all users'."""
    if sees_all(caller, Action.SEE_CAPTURE):
        return None
    return NOBODY if caller.uid is None else caller.uid
