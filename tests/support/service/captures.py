"""Captures as a daemon would answer them, for the tests of the command line."""

import hashlib

from kineto_protos.v1 import profiler_pb2 as pb

START_NS = 1_700_000_000_000_000_000
CONTENT = bytes(range(256)) * 1200  # 300 KiB: some chunks


def trace_file(content: bytes = CONTENT, file_format: str = "chrome") -> pb.TraceFile:
    """The announcement of a stored file."""
    return pb.TraceFile(
        format=file_format, name="trace.json.gz", size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )


def process(pid: int = 4242, rank: int | None = 0) -> pb.Process:
    """A training process with a ready agent."""
    return pb.Process(
        pid=pid,
        start_time_ns=pid,
        user="ada",
        uid=1000,
        command=["python", "train.py", "--epochs", "3"],
        gpus=[0],
        rank=rank,
        framework="torch 2.9.0",
        agent_state=pb.AGENT_STATE_READY,
        iterations=120,
    )


def target(
    pid: int = 4242,
    *,
    state: pb.TargetState = pb.TARGET_STATE_PENDING,
    verdict: pb.Verdict = pb.VERDICT_UNSPECIFIED,
    reason_code: str = "",
    reason: str = "",
    files: tuple[pb.TraceFile, ...] = (),
) -> pb.Target:
    """A target in some state."""
    return pb.Target(
        pid=pid,
        start_time_ns=pid,
        process=process(pid),
        state=state,
        verdict=verdict,
        reason_code=reason_code,
        reason=reason,
        files=files,
    )


def done_target(pid: int = 4242, content: bytes = CONTENT) -> pb.Target:
    """A target with a stored trace."""
    return target(pid, state=pb.TARGET_STATE_ENDED, verdict=pb.VERDICT_DONE, files=(trace_file(content),))


def capture(*targets: pb.Target, status: pb.CaptureStatus = pb.CAPTURE_STATUS_RUNNING) -> pb.Capture:
    """A capture with these targets (default: one that is pending)."""
    return pb.Capture(id="c0ffee", host="gpu-7", status=status, targets=targets or (target(),), created_ns=START_NS)


def snapshot(value: pb.Capture) -> pb.CaptureEvent:
    """The event with the whole capture."""
    return pb.CaptureEvent(snapshot=value)


def change(value: pb.Target) -> pb.CaptureEvent:
    """The event of one target."""
    return pb.CaptureEvent(target=value)
