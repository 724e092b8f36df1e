"""Names of enum values without their prefix, or the number if only a newer daemon knows the value."""

from collections.abc import Callable
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb

RECORDERS = {"agent": pb.RECORDER_AGENT, "kineto": pb.RECORDER_KINETO}  # as people call them


def _names(enum: Any, prefix: str) -> Callable[[int], str]:
    def name(value: int) -> str:
        try:
            return str(enum.Name(value)).removeprefix(prefix)
        except ValueError:
            return str(value)

    return name


agent_state = _names(pb.AgentState, "AGENT_STATE_")  # READY, BUSY, NONE, …
target_state = _names(pb.TargetState, "TARGET_STATE_")  # PENDING, WARMUP, COLLECT, …
verdict = _names(pb.Verdict, "VERDICT_")  # DONE, PARTIAL, …
capture_status = _names(pb.CaptureStatus, "CAPTURE_STATUS_")  # RUNNING, DONE, …
upload_state = _names(pb.UploadState, "UPLOAD_STATE_")  # WAITING, RUNNING, RETRYING, UPLOADED
check_status = _names(pb.CheckStatus, "CHECK_STATUS_")  # OK, NOTE, PROBLEM, UNKNOWN
wait = _names(pb.Wait, "")  # WAIT_LOCK, …, as in JSON
thread_state = _names(pb.ThreadState, "THREAD_STATE_")  # RUNNING, SLEEPING, …
plugin_state = _names(pb.PluginState, "PLUGIN_STATE_")  # ON, OFF, REFUSED


def pod(process: pb.Process) -> str:
    """NAMESPACE/POD, or empty if the process is in no pod or its pod is unknown."""
    return f"{process.pod_namespace}/{process.pod_name}" if process.pod_name else ""


def target(value: pb.Target) -> str:
    """Which process: pid 4242, rank 3."""
    rank = f", rank {value.process.rank}" if value.process.HasField("rank") else ""
    return f"pid {value.pid}{rank}"
