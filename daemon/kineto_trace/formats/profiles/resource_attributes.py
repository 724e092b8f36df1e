"""Whom a profile is about, by OpenTelemetry's semantic conventions; what they have no name for begins with `kineto.`.

The process's own OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, which the daemon reads with its environment, and a
capture's label `service.name` come first: they are what the program's other telemetry is found by.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.telemetry_ids import SERVICE_NAME, TRACE_PARENT
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import GPU_TABLES, Trace

LABEL_PREFIX = "kineto.label."
Value = str | int | Sequence[str]

# Attribute -> what it is. docs/profiles.md has this table, too.
ATTRIBUTES: Mapping[str, str] = {
    SERVICE_NAME: "label `service.name` of the capture, else OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES of the "
    "process, else its script or program",
    "host.name": "the host",
    "process.pid": "as the process itself sees it",
    "process.executable.name": "its program",
    "process.runtime.version": "its Python version",
    "container.id": "by its control group",
    "k8s.pod.uid": "likewise",
    "k8s.pod.name": "what Kubernetes calls it",
    "k8s.namespace.name": "likewise",
    "k8s.container.name": "likewise",
    "kineto.capture.id": "the capture",
    "kineto.job.id": "the batch job, such as Slurm's",
    "kineto.rank": "rank of the process in its job",
    "kineto.world_size": "number of ranks",
    "kineto.framework": 'such as "torch 2.13.0"',
    "kineto.gpu.ids": "numbers of the GPUs that did work, as the process sees them",
    "kineto.gpu.models": "names of these GPUs, each once",
    f"{LABEL_PREFIX}NAME": f"each label of the capture; `{TRACE_PARENT}`: what the request for it was part of",
}


def resource_attributes(trace: Trace) -> dict[str, Value]:
    """Returns the attributes of the traced process; what is unknown is left out."""
    target = trace.target
    ids, models = _gpus(trace)
    known: dict[str, Value | None] = {
        **target.resource,
        SERVICE_NAME: target.labels.get(SERVICE_NAME) or target.resource.get(SERVICE_NAME) or _program(target),
        "host.name": target.host,
        "process.pid": target.pid,
        "process.executable.name": target.process_name,
        "process.runtime.version": target.python_version,
        "kineto.capture.id": target.capture_id,
        "kineto.job.id": target.job_id,
        "kineto.rank": target.rank,
        "kineto.world_size": target.world_size,
        "kineto.framework": target.framework,
        "kineto.gpu.ids": ids,
        "kineto.gpu.models": models,
        **{LABEL_PREFIX + name: text for name, text in target.labels.items() if name != SERVICE_NAME},
    }
    return {
        name: value
        for name, value in known.items()
        if value not in (None, "", []) and (name, value) != ("process.pid", 0)
    }


def _program(target: TargetInfo) -> str:
    """Returns the name of the script that Python runs, or of the program."""
    if target.python_version:
        script = next((each for each in target.command[1:] if each.endswith(".py")), "")
        module = target.command[2:3] if target.command[1:2] == ["-m"] else []
        if name := PurePath(script).name or next(iter(module), ""):
            return name
    return target.process_name or "unknown_service"  # OpenTelemetry's fallback


def _gpus(trace: Trace) -> tuple[list[str], list[str]]:
    """Returns the numbers of the GPUs that did work, and their names."""
    used = sorted({number for kind in GPU_TABLES for number in unique_values(trace.table(kind)["device"]).tolist()})
    names = {device.get("id"): device.get("name") for device in trace.devices}
    models = [name for device in used if isinstance(name := names.get(device), str) and name]
    return [str(device) for device in used], list(dict.fromkeys(models))
