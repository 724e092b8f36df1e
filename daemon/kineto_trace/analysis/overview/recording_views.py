"""The view of what was recorded: process, machine, versions and window."""

from typing import Any

from kineto_trace.model.context import Context
from kineto_trace.model.trace_header import value
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

MAX_COMMAND = 2000  # characters


@view(
    "recordings",
    columns(
        ("world_size", "int", "", "number of ranks of the job"),
        ("host", "text", "", "name of the machine"),
        ("process", "text", "", "name of the process"),
        ("pid", "int", "", "number of the process, as it sees it itself"),
        ("command", "text", "", "command line of the process"),
        ("job", "text", "", "id of the job, from its launcher, such as Slurm"),
        ("labels", "texts", "", "labels of the capture, as key=value"),
        ("gpus", "texts", "", "names of the GPUs that the process could see"),
        ("framework", "text", "", "framework and its version"),
        ("python", "text", "", "version of Python"),
        ("cuda", "text", "", "version of the CUDA runtime"),
        ("driver_cuda", "text", "", "latest version of CUDA that the driver knows"),
        ("cupti", "text", "", "version of CUPTI, as CUPTI numbers it"),
        ("kinetod", "text", "", "version of kinetod that wrote the trace"),
        ("capture", "text", "", "id of the capture"),
        ("start_ns", "int", "ns", "beginning of the window"),
        ("length_us", "float", "us", "length of the window"),
    ),
)
def recordings(context: Context) -> Answer:
    """What was recorded, where and with which versions: one row for each trace.

    Everything is as the trace has it; what it does not have is missing. Only kinetod's own traces have the command line
    and the job. The window is the one that was asked for, or else spans the activities of the trace.
    """
    trace, target = context.trace, context.trace.target
    length = trace.window_end_ns - trace.window_start_ns
    found: dict[str, Any] = {
        "world_size": target.world_size,
        "host": target.host,
        "process": target.process_name,
        "pid": target.pid,
        "command": " ".join(target.command)[:MAX_COMMAND],
        "job": target.job_id,
        "labels": [f"{key}={text}" for key, text in sorted(target.labels.items())],
        "gpus": [name for device in trace.devices if isinstance(name := device.get("name"), str)],
        "framework": target.framework,
        "python": target.python_version,
        "cuda": _cuda(trace.versions.get("cuda_runtime_version")),
        "driver_cuda": _cuda(trace.versions.get("cuda_driver_version")),
        "cupti": str(trace.versions.get("cupti_version", "")),
        "kinetod": _kinetod(value(trace.head or {}, "kinetod")),
        "capture": target.capture_id,
        "start_ns": trace.window_start_ns if trace.window_start_ns > 0 else None,
        "length_us": length / 1e3 if length > 0 else None,
    }
    return Answer({name: [each or None] for name, each in found.items()})


def _cuda(number: int | None) -> str:
    """CUDA's own numbers: 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _kinetod(written: Any) -> str:
    version = written.get("version") if isinstance(written, dict) else None
    return version if isinstance(version, str) else ""
