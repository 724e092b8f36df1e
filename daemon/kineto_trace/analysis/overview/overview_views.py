"""The headline figures of a trace, and what was recorded where."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from kineto_trace.analysis.gpu_time_views import NO_GPU, unknown_without_gpu
from kineto_trace.analysis.kernels.precision_views import TensorUse, launch_figures, tensor_use
from kineto_trace.analysis.overview.gpu_figures import (
    GpuFigures,
    TimeCourse,
    gpu_figures,
    kernel_rows,
    unix_times,
    utilization_course,
)
from kineto_trace.analysis.overview.gpu_figures import sm_efficiency as efficiency_course
from kineto_trace.analysis.overview.step_breakdown import (
    OTHER,
    ROLES,
    UNRECORDED,
    Breakdown,
    breakdown,
    device_breakdown,
    incomplete_note,
)
from kineto_trace.arrays.intervals import union
from kineto_trace.base.array_types import AnyArray, Floats, Ints
from kineto_trace.model.context import Context
from kineto_trace.model.target_info import header_value
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.nesting import unrecorded
from kineto_trace.structure.trace_forms import recording_span
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

StepEnds = Literal["host", "device"]
AVERAGE = "average"
_OF_GPUS = (  # columns of step_breakdown and overview
    *(f"{role}_{unit}" for role in ("kernel", "memcpy", "memset") for unit in ("us", "pct")),
    "gpus",
    "kernels",
)
_WHOLE = (("all",), ("0",))  # steps of a trace without steps, by our rules and the plug-in's
_NO_KERNELS = "the trace has no kernels"
_NO_EVENTS = "the trace has no events, so there is no step"
_TITLES = {
    "kernel": "kernels, excluding communication",
    "memcpy": "copies on the GPU",
    "memset": "fills on the GPU",
    "communication": "collectives and transfers between GPUs",
    "runtime": "GPU runtime and driver calls",
    "dataloader": "waiting for the next batch",
    "cpu_exec": "operators and annotations on the host",
    OTHER: "everything else",
}
_UNKNOWN = "missing if the trace does not state what its sources cover"
_SHARES = (
    *((f"{role}_us", "float", "us", f"time: {title}") for role, title in _TITLES.items()),
    (f"{UNRECORDED}_us", "float", "us", f"time that a source did not record; {_UNKNOWN}"),
    *((f"{role}_pct", "float", "%", f"share of the step: {title}") for role, title in _TITLES.items()),
    (f"{UNRECORDED}_pct", "float", "%", f"share of the step that a source did not record; {_UNKNOWN}"),
)
MAX_COMMAND = 2000  # characters


class ShareSpans(NamedTuple):
    """A share (0 to 1) of one GPU over time."""

    start_ns: Ints
    duration_us: Floats
    share: Floats


@view(
    "step_breakdown",
    columns(
        (
            "step",
            "text",
            "",
            'step number; "all": the trace has no steps; "average": mean of the measured steps',
        ),
        ("start_ns", "int", "ns", "start of the step, Unix time"),
        ("complete", "bool", "", "whether all of it was recorded; if not, total_us is the recorded part"),
        ("total_us", "float", "us", "length of the step"),
        *_SHARES,  # type: ignore[arg-type]
    ),
)
def step_breakdown(context: Context, *, step_ends: StepEnds = "host") -> Answer:
    """What each training step spent its time on; the last row is the average of the measured steps.

    A step that began before the recording or ended after it has a row, but does not count towards the average. Neither
    do first steps that do not show the program's pace: warm-up steps, and steps in which the host ran ahead of the GPU.

    Each moment of a step counts for one role: the first of kernel, memcpy, memset, communication, runtime, dataloader
    and cpu_exec that is active then, or other if none is. Time that a source did not record (see the view validate)
    counts as unrecorded, since its roles are unknown. The parts of a row therefore add up to the length of the step.
    The average covers the steps without unrecorded time, if there are any. The role kernel excludes communication
    kernels; communication includes NCCL's kernels, recognized by their names or arguments, and host ranges such as
    "nccl:all_reduce" and "gloo:broadcast". Without any GPU activity in the trace, the times of kernels, copies and
    fills are missing, not zero.

    Options:
    - step_ends: "host" uses the steps as the host sees them ("ProfilerStep#N"). "device" applies the rule of the
      TensorBoard plug-in: each step ends with the last GPU activity that it launched and starts when the previous step
      ends, and steps at the end whose GPU work may be missing are left out.
    """
    answer = step_columns(_chosen_breakdown(context, step_ends), _NO_EVENTS)
    return unknown_without_gpu(context, answer, _OF_GPUS) if answer.values["step"] else answer


def _chosen_breakdown(context: Context, step_ends: StepEnds) -> Breakdown:
    return context.get(device_breakdown if step_ends == "device" else breakdown)


def step_columns(found: Breakdown, without_steps: str) -> Answer:
    """The columns of the view step_breakdown. without_steps: the note if there are none."""
    notes = _step_notes(found, without_steps)
    if not found.steps:
        return step_breakdown.answer([], notes)
    counted, several = found.counted, np.vstack([found.shares_us, found.unrecorded])
    total, averages = found.lengths_us, 1 if len(counted) else 0
    if averages:
        total = np.append(total, total[counted].mean())
        several = np.column_stack([several, several[:, counted].mean(axis=1)])
    complete = np.ones(len(found.steps) + averages, np.bool_)
    complete[list(found.cut)] = False
    values: dict[str, object] = {
        "step": [*found.steps, *[AVERAGE] * averages],
        "start_ns": [*found.start_ns.tolist(), *[None] * averages],
        "complete": complete,
        "total_us": total,
    }
    for role, share in zip((*ROLES, OTHER, UNRECORDED), several, strict=True):
        values[f"{role}_us"] = share
        values[f"{role}_pct"] = np.divide(100 * share, total, out=np.zeros_like(total), where=total > 0)
    if found.unrecorded_us is None:
        values.update({f"{UNRECORDED}_{unit}": np.full(len(total), np.nan) for unit in ("us", "pct")})
    return Answer(values, notes)


def _step_notes(found: Breakdown, without_steps: str) -> list[str]:
    notes = []
    if not found.steps:
        notes.append(without_steps)
    elif found.steps in _WHOLE:
        notes.append('the trace has no "ProfilerStep#N" annotations: shares refer to the whole trace')
    if found.cut:
        longest = float(found.lengths_us[list(found.cut)].max())
        notes.append(incomplete_note([found.steps[place] for place in found.cut], len(found.measured), longest))
    if found.pace_note is not None:
        notes.append(found.pace_note)
    if found.unrecorded.any():
        notes.append(_unrecorded_note(found))
    if found.dropped:
        notes.append(
            f"steps left out because the recording may have ended before their kernels did: {', '.join(found.dropped)}"
        )
    return notes


def _unrecorded_note(found: Breakdown) -> str:
    count, total = len(found.counted), len(found.measured)
    share = 100 * found.unrecorded.sum() / found.lengths_us.sum()
    text = f"{share:.3g} % of the steps' time is unrecorded: a source does not cover it (see the view validate)"
    if 0 < count < total:
        text += (
            f"; shares of the mean step refer to the {count} of {total} measured steps that were recorded completely"
        )
    return text


@view(
    "gpu_summary",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("name", "text", "", "name of the GPU"),
        ("memory_bytes", "int", "bytes", "memory of the GPU"),
        ("compute_capability", "text", "", "compute capability; missing for GPUs that are not NVIDIA's"),
        ("kernels", "int", "", "number of kernels that ran on it"),
        ("kernel_us", "float", "us", "sum of their durations"),
        ("utilization_pct", "float", "%", "share of the steps' time in which at least one kernel ran"),
        ("busy_pct", "float", "%", "share of the steps' time in which at least one kernel, copy or fill ran"),
        ("sm_efficiency_pct", "float", "%", "estimated share of its multiprocessors that held a block"),
        ("occupancy_pct", "float", "%", "estimated achieved occupancy of its kernels, weighted by duration"),
        ("tensor_core_pct", "float", "%", "share of the kernels' time in kernels that use tensor cores"),
        ("peak_memory_bytes", "int", "bytes", "largest number of bytes that the allocator had handed out at any time"),
    ),
)
def gpu_summary(context: Context) -> Answer:
    """How busy each GPU was from the start of the first measured step to the end of the last one.

    Utilization counts the union of kernels only. SM efficiency is the mean of min(blocks per multiprocessor of all
    running kernels, 1); occupancy is the mean of the kernels' estimates weighted by their time. Both are estimates from
    launch shapes, not measurements. The tensor-core share covers all kernels, recognized by their names. The memory
    peak needs recorded allocations.
    """
    return gpu_columns(context.get(gpu_figures))


def gpu_columns(rows: Sequence[GpuFigures]) -> Answer:
    """The columns of the view gpu_summary."""
    return Answer(
        {
            "device": [row.device for row in rows],
            "name": [row.name for row in rows],
            "memory_bytes": [row.memory_bytes for row in rows],
            "compute_capability": [row.compute_capability for row in rows],
            "kernels": [row.kernels for row in rows],
            "kernel_us": [row.kernel_ns / 1000 for row in rows],
            "utilization_pct": _percent(row.utilization for row in rows),
            "busy_pct": _percent(row.busy for row in rows),
            "sm_efficiency_pct": _percent(row.sm_efficiency for row in rows),
            "occupancy_pct": _percent(row.occupancy / 100 for row in rows),
            "tensor_core_pct": _percent(row.tensor_cores for row in rows),
            "peak_memory_bytes": [row.peak_memory_bytes for row in rows],
        },
        [] if rows else [NO_GPU],
    )


def _percent(shares: Iterable[float]) -> Floats:
    return 100 * np.array(list(shares), np.float64)


def _mean(values: list[float]) -> float:
    """Returns the mean of the known values; NaN if there are none."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


@view(
    "overview",
    columns(
        ("steps", "int", "", "number of measured steps: complete steps that show the program's pace"),
        ("step_us", "float", "us", "mean length of a measured step; missing if no step is complete"),
        *((f"{role}_pct", "float", "%", f"share of the mean step: {title}") for role, title in _TITLES.items()),
        (
            f"{UNRECORDED}_pct",
            "float",
            "%",
            f"share of the steps' time that a source did not record, not included in the shares above; {_UNKNOWN}",
        ),
        ("gpus", "int", "", "number of GPUs that ran kernels"),
        ("gpu_name", "text", "", "names of these GPUs"),
        ("utilization_pct", "float", "%", "mean over the GPUs: share of the steps' time in which a kernel ran"),
        ("sm_efficiency_pct", "float", "%", "mean over the GPUs: estimated share of multiprocessors that held a block"),
        ("occupancy_pct", "float", "%", "mean over the GPUs: estimated achieved occupancy, weighted by duration"),
        ("tensor_core_pct", "float", "%", "share of all kernels' time in kernels that use tensor cores"),
        (
            "tensor_core_eligible_pct",
            "float",
            "%",
            "share of the operators' kernel time in operators that could use tensor cores",
        ),
        ("kernels", "int", "", "number of kernels"),
        ("kernel_us", "float", "us", "sum of the kernels' durations"),
    ),
)
def overview(context: Context, *, step_ends: StepEnds = "host") -> Answer:
    """The headline figures of a trace in one row: the average step, and how well its GPUs were used.

    The parts of the step and the option step_ends are those of step_breakdown, the GPU figures those of gpu_summary,
    and the tensor-core figures those of tensor_core_use. Steps that the recording cut off do not count. Neither do
    first steps that do not show the program's pace: warm-up steps, and steps in which the host ran ahead of the GPU. If
    no step is complete, the shares refer to the recorded parts; in a trace without steps, to the whole trace. Without
    any GPU activity in the trace, the GPU figures are missing, not zero.
    """
    found = _chosen_breakdown(context, step_ends)
    answer = overview_columns(found, context.get(gpu_figures), context.get(tensor_use), _NO_EVENTS)
    if found.steps in _WHOLE:
        answer = Answer({**answer.values, "steps": [0], "step_us": [None]}, answer.notes)
    if len(context.get(gpu)):
        return answer
    notes = [note for note in answer.notes if note != _NO_KERNELS]
    return unknown_without_gpu(context, Answer(answer.values, notes), _OF_GPUS)


def overview_columns(found: Breakdown, figures: Sequence[GpuFigures], use: TensorUse, without_steps: str) -> Answer:
    """The columns of the view overview. without_steps: the note if there are no steps."""
    gpus = [gpu for gpu in figures if gpu.kernels]
    names = dict.fromkeys(gpu.name for gpu in gpus if gpu.name)
    return Answer(
        {
            "steps": [len(found.measured)],
            "step_us": [found.lengths_us[found.measured].mean() if len(found.measured) else None],
            **{f"{role}_pct": _percent([found.average(role)]) for role in (*ROLES, OTHER)},
            f"{UNRECORDED}_pct": _percent([_unrecorded_share(found)]),
            "gpus": [len(gpus)],
            "gpu_name": [", ".join(names) or None],
            "utilization_pct": _percent([_mean([gpu.utilization for gpu in gpus])]),
            "sm_efficiency_pct": _percent([_mean([gpu.sm_efficiency for gpu in gpus])]),
            "occupancy_pct": _percent([_mean([gpu.occupancy / 100 for gpu in gpus])]),
            "tensor_core_pct": _percent([use.kernel_share]),
            "tensor_core_eligible_pct": _percent([use.eligible_share]),
            "kernels": [sum(gpu.kernels for gpu in gpus)],
            "kernel_us": [sum(gpu.kernel_ns for gpu in gpus) / 1000],
        },
        [*_step_notes(found, without_steps), *([] if gpus else [_NO_KERNELS])],
    )


def _unrecorded_share(found: Breakdown) -> float:
    total = found.lengths_us.sum()
    return float(found.unrecorded.sum() / total) if total and found.unrecorded_us is not None else float("nan")


def share_spans(course: TimeCourse) -> ShareSpans:
    """Returns the spans of a course, whose times are Unix ns."""
    return ShareSpans(course.start, (course.end - course.start) / 1000, course.value)


@view(
    "gpu_utilization",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("start_ns", "int", "ns", "start of the bucket, Unix time"),
        ("duration_us", "float", "us", "length"),
        (
            "utilization_pct",
            "float",
            "%",
            "share of the bucket in which a kernel ran; missing if not recorded",
        ),
    ),
)
def gpu_utilization(context: Context) -> Answer:
    """How busy each GPU was over the recording, in at most 100 buckets of 1, 10, 100, … µs each.

    The recording is the profiler's own range if the file states it, otherwise the time from the first to the last
    event. The last bucket also covers the remainder. Time that the GPU's source did not record does not count.
    """
    low, high = recording_span(context)
    missing = unrecorded(context.trace, GPU_TABLES)
    start, end = unix_times(context.trace.table("kernel"))
    return utilization_columns(
        {
            device: share_spans(utilization_course(union(start[rows], end[rows]), low, high, missing=missing))
            for device, rows in context.get(kernel_rows).items()
        }
    )


def utilization_columns(found: Mapping[int, ShareSpans]) -> Answer:
    """The columns of the view gpu_utilization."""
    return Answer(_stretch_columns(found, "utilization_pct"), [] if found else [NO_GPU])


@view(
    "sm_efficiency",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("start_ns", "int", "ns", "start of the span, Unix time"),
        ("duration_us", "float", "us", "length"),
        ("sm_efficiency_pct", "float", "%", "estimated share of the multiprocessors that held a block"),
    ),
)
def sm_efficiency(context: Context) -> Answer:
    """The estimated SM efficiency of each GPU over time: one row per span in which the same kernels run.

    The estimate is min(sum of the running kernels' blocks per multiprocessor, 1). There are no rows for time without
    kernels.
    """
    blocks = context.get(launch_figures).blocks_per_sm
    start, end = unix_times(context.trace.table("kernel"))
    return efficiency_columns(
        {
            device: share_spans(efficiency_course(blocks[rows], start[rows], end[rows]))
            for device, rows in context.get(kernel_rows).items()
        }
    )


def efficiency_columns(found: Mapping[int, ShareSpans]) -> Answer:
    """The columns of the view sm_efficiency."""
    values = _stretch_columns(found, "sm_efficiency_pct")
    known = len(values["device"]) > 0
    return Answer(values, [] if known else ["no kernel has both a launch shape and a GPU with known properties"])


def _stretch_columns(found: Mapping[int, ShareSpans], name: str) -> dict[str, AnyArray]:
    none = ShareSpans(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    start, duration, share = (np.concatenate(parts) for parts in zip(none, *found.values(), strict=True))
    device = np.repeat(np.array(list(found), np.int64), [len(each.start_ns) for each in found.values()])
    return {"device": device, "start_ns": start, "duration_us": duration, name: 100 * share}


@view(
    "recordings",
    columns(
        ("world_size", "int", "", "number of ranks in the job"),
        ("host", "text", "", "name of the machine"),
        ("process", "text", "", "name of the process"),
        ("pid", "int", "", "process id, as the process itself sees it"),
        ("command", "text", "", "command line of the process"),
        ("job", "text", "", "job id from its launcher, for example Slurm"),
        ("labels", "texts", "", "labels of the capture, as key=value"),
        ("gpus", "texts", "", "names of the GPUs that the process could see"),
        ("framework", "text", "", "framework and its version"),
        ("python", "text", "", "version of Python"),
        ("cuda", "text", "", "version of the CUDA runtime"),
        ("driver_cuda", "text", "", "latest version of CUDA that the driver supports"),
        ("cupti", "text", "", "version of CUPTI, as CUPTI numbers it"),
        ("kinetod", "text", "", "version of kinetod that wrote the trace"),
        ("capture", "text", "", "id of the capture"),
        ("start_ns", "int", "ns", "beginning of the recording window, Unix time"),
        ("length_us", "float", "us", "length of the recording window"),
    ),
)
def recordings(context: Context) -> Answer:
    """What was recorded, where and with which versions: one row for each trace.

    All values come from the trace; values that it does not have are missing. Only kinetod's own traces have the command
    line and the job. The window is the requested time span or, if unknown, that of the activities in the trace.
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
        "kinetod": _kinetod(header_value(trace.head or {}, "kinetod")),
        "capture": target.capture_id,
        "start_ns": trace.window_start_ns if trace.window_start_ns > 0 else None,
        "length_us": length / 1e3 if length > 0 else None,
    }
    return Answer({name: [each or None] for name, each in found.items()})


def _cuda(number: int | None) -> str:
    """Converts CUDA's own number: 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _kinetod(written: Any) -> str:
    version = written.get("version") if isinstance(written, dict) else None
    return version if isinstance(version, str) else ""
