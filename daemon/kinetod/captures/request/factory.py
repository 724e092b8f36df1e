"""Builds a new capture as it is first shown and stored."""

import secrets
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.captures.request.target_resolution import Resolved


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
