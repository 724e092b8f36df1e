"""The content of target.json: the daemon's facts about a target and its agent's final report."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.model.target_info import TargetInfo

from kinetod.base.safe_text import clean
from kinetod.captures.target.conversion import overhead_of
from kinetod.captures.target.kernel_readings import KernelReadings

_MAX_THREADS = 4096
_MAX_ITERATIONS = 1024
_MAX_ITERATION = 2**53  # beyond that readers of JSON would round
_MAX_THREAD_ID = 2**31
_MAX_SETTINGS = 128
_MAX_SETTING = 2**53
_MAX_REASONS = 64


def describe_process(
    process: pb.Process,
    *,
    capture_id: str,
    host: str,
    labels: Mapping[str, str],
    start: wire.Start,
    clock: pb.ClockOffset | None = None,
) -> TargetInfo:
    """The part of target.json about a process and its capture, whoever records. clock: as for `describe_target`."""
    return TargetInfo(
        capture_id=capture_id,
        host=host,
        pid=process.pid,
        process_name=Path(process.command[0]).name if process.command else "",
        command=list(process.command),
        job_id=process.job_id,
        rank=process.rank if process.HasField("rank") else None,
        world_size=process.world_size if process.HasField("world_size") else None,
        framework=process.framework,
        labels=dict(labels),
        resource=_resource(process),
        trace_parent=process.trace_parent,
        activity_types=list(start.activity_types),
        clock_offset_ns=clock.offset_ns if clock is not None else None,
        clock_uncertainty_ns=clock.uncertainty_ns if clock is not None else None,
    )


def describe_target(
    *,
    capture_id: str,
    host: str,
    process: pb.Process,
    hello: wire.Hello,
    start: wire.Start,
    result: wire.Result | None,
    window_ns: tuple[int, int],
    labels: Mapping[str, str],
    clock: pb.ClockOffset | None = None,
    kernel: KernelReadings | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TargetInfo:
    """The current content of target.json. window_ns: start and end, Unix ns. The result is untrusted.

    clock: this host's clock offset as measured by the caller. kernel: readings of the process, once it has ended.
    settings: the program's, from its agent; untrusted.
    """
    threads = list((result.threads if result else {}).items())[:_MAX_THREADS]
    iterations = result.iterations if result else {}
    overhead = overhead_of(result.overhead if result else {})
    counters = kernel.counters() if kernel is not None else None
    kernel_names = kernel.thread_names() if kernel is not None else {}
    agent_names = {int(tid): clean(name, 64) for tid, name in threads if tid.isascii() and tid.isdecimal()}
    known = describe_process(process, capture_id=capture_id, host=host, labels=labels, start=start, clock=clock)
    return replace(
        known,
        pid=hello.pid,
        python_version=process.python_version,
        window_start_ns=window_ns[0],
        window_end_ns=window_ns[1],
        threads={**kernel_names, **agent_names},
        iterations=checked_iterations(iterations),
        iteration_thread=_thread_id(iterations.get("thread")),
        options=dict(start.options),
        not_recorded=_checked_reasons(result.not_recorded if result else {}),
        kernel_counters=counters.to_json() if counters is not None else {},
        settings=checked_settings(settings or {}),
        step_ratio=overhead.step_ratio,
        least_step_ratio=overhead.least_step_ratio,
        complete=result is not None,
    )


def _resource(process: pb.Process) -> dict[str, str]:
    """The process's own attributes, overridden by those that the kernel and Kubernetes know better."""
    known = {
        "container.id": process.container_id,
        "k8s.pod.uid": process.pod_uid,
        "k8s.pod.name": process.pod_name,
        "k8s.namespace.name": process.pod_namespace,
        "k8s.container.name": process.container_name,
    }
    return {**process.resource, **{name: value for name, value in known.items() if value}}


def checked_settings(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The settings reported by an agent, without values that are not plain."""
    found: dict[str, bool | int | float | str] = {}
    for name, value in list(settings.items())[:_MAX_SETTINGS]:
        if isinstance(value, str):
            found[clean(name, 80)] = clean(value, 200)
        elif isinstance(value, (bool, int, float)) and abs(value) < _MAX_SETTING:  # neither NaN nor infinite
            found[clean(name, 80)] = value
    return found


def _checked_reasons(reasons: Mapping[str, str]) -> dict[str, str]:
    return {clean(name, 64): clean(why, 500) for name, why in list(reasons.items())[:_MAX_REASONS]}


def checked_iterations(iterations: Mapping[str, Any]) -> list[list[int]]:
    """Number and start (Unix ns) of the iterations reported by an agent, without entries out of order."""
    starts = iterations.get("starts")
    found: list[list[int]] = []
    for entry in starts[:_MAX_ITERATIONS] if isinstance(starts, list) else ():
        if _is_start(entry) and (not found or (entry[0] > found[-1][0] and entry[1] >= found[-1][1])):
            found.append(list(entry))
    return found


def _is_start(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not all(type(value) is int for value in entry):
        return False
    number, time_ns = entry
    return bool(0 <= number < _MAX_ITERATION and 0 < time_ns < 2**63)


def _thread_id(value: Any) -> int:
    return value if type(value) is int and 0 < value < _MAX_THREAD_ID else 0
