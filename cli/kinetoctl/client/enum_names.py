"""Names of enum values without their prefix, or the number if only a newer daemon knows the value."""

from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb

RECORDERS = {"agent": pb.RECORDER_AGENT, "kineto": pb.RECORDER_KINETO}  # as people call them


def _name(enum: Any, value: int, prefix: str) -> str:
    try:
        return str(enum.Name(value)).removeprefix(prefix)
    except ValueError:
        return str(value)


def agent_state(value: pb.AgentState) -> str:
    """READY, BUSY, NONE, …"""
    return _name(pb.AgentState, value, "AGENT_STATE_")


def target_state(value: pb.TargetState) -> str:
    """PENDING, WARMUP, COLLECT, …"""
    return _name(pb.TargetState, value, "TARGET_STATE_")


def verdict(value: pb.Verdict) -> str:
    """DONE, PARTIAL, …"""
    return _name(pb.Verdict, value, "VERDICT_")


def capture_status(value: pb.CaptureStatus) -> str:
    """RUNNING, DONE, …"""
    return _name(pb.CaptureStatus, value, "CAPTURE_STATUS_")


def upload_state(value: pb.UploadState) -> str:
    """WAITING, RUNNING, RETRYING, UPLOADED."""
    return _name(pb.UploadState, value, "UPLOAD_STATE_")


def check_status(value: pb.CheckStatus) -> str:
    """OK, NOTE, PROBLEM, UNKNOWN."""
    return _name(pb.CheckStatus, value, "CHECK_STATUS_")


def plugin_state(value: pb.PluginState) -> str:
    """ON, OFF, REFUSED."""
    return _name(pb.PluginState, value, "PLUGIN_STATE_")


def pod(process: pb.Process) -> str:
    """NAMESPACE/POD, or empty if the process is in no pod or its pod is unknown."""
    return f"{process.pod_namespace}/{process.pod_name}" if process.pod_name else ""


def target(value: pb.Target) -> str:
    """Which process: pid 4242, rank 3."""
    rank = f", rank {value.process.rank}" if value.process.HasField("rank") else ""
    return f"pid {value.pid}{rank}"
