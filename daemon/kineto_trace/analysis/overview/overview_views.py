"""The views of the overview: where the time of steps goes, and how busy each GPU was."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.kernels.launch_occupancy import launch_figures
from kineto_trace.analysis.kernels.tensor_core_use import tensor_use
from kineto_trace.analysis.overview.gpu_figures import (
    GpuFigures,
    gpu_figures,
    kernel_rows,
    plugin_gpu_figures,
    plugin_kernel_rows,
)
from kineto_trace.analysis.overview.gpu_utilization import Course, utilization_course
from kineto_trace.analysis.overview.gpu_utilization import plugin_sm_efficiency as plugin_efficiency_course
from kineto_trace.analysis.overview.gpu_utilization import sm_efficiency as efficiency_course
from kineto_trace.analysis.overview.step_breakdown import (
    OTHER,
    ROLES,
    Breakdown,
    breakdown,
    device_breakdown,
    plugin_breakdown,
)
from kineto_trace.arrays.intervals import union
from kineto_trace.compat.tensorboard.plugin_kernels import plugin_launch_figures, plugin_tensor_use
from kineto_trace.compat.tensorboard.plugin_rounding import rounded
from kineto_trace.compat.tensorboard.plugin_steps import UNIX_NS, TickClock, plugin_clock, profiler_span
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.recording_span import recording_span
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view

STEP_ENDS = ("host", "device")
AVERAGE = "average"

_TITLES = {
    "kernel": "kernels, without communication",
    "memcpy": "copies on the GPU",
    "memset": "fills on the GPU",
    "communication": "collectives and transfers between GPUs",
    "runtime": "calls of CUDA's runtime and driver",
    "dataloader": "waiting for the next batch",
    "cpu_exec": "operators and annotations on the host",
    OTHER: "none of the above",
}
_SHARES = (
    *((f"{role}_us", "float", "us", f"time in {title}") for role, title in _TITLES.items()),
    *((f"{role}_pct", "float", "%", f"share of the step: {title}") for role, title in _TITLES.items()),
)


def chosen_breakdown(context: Context, compat: Compat, step_ends: str = "host") -> tuple[Breakdown, list[str]]:
    """Returns the steps with their time, and notes for the reader. Raises ViewError."""
    if step_ends not in STEP_ENDS:
        raise ViewError(f"step_ends={step_ends!r} is not valid; use {' or '.join(STEP_ENDS)}")
    if compat is Compat.PLUGIN:
        found = context.get(plugin_breakdown)
    else:
        found = context.get(device_breakdown if step_ends == "device" else breakdown)
    notes = []
    if not len(found.steps):
        notes.append(
            "the plug-in has no steps without operators"
            if compat is Compat.PLUGIN
            else "the trace has no events to form a step from"
        )
    elif found.steps.name in (("all",), ("0",)) and len(found.steps) == 1:
        notes.append('the trace has no "ProfilerStep#N": the whole trace counts as one step')
    if found.steps.dropped:
        notes.append(
            f"steps left out because the recording may have ended before their kernels: "
            f"{', '.join(found.steps.dropped)}"
        )
    return found, notes


@view(
    "step_breakdown",
    columns(
        ("step", "text", "", 'number of the step; "all": the trace has no steps; "average": the mean of all steps'),
        ("start_ns", "int", "ns", "start of the step, Unix time"),
        ("total_us", "float", "us", "length of the step"),
        *_SHARES,  # type: ignore[arg-type]
    ),
    compat=(Compat.PLUGIN,),
)
def step_breakdown(context: Context, *, compat: Compat = Compat.NONE, step_ends: str = "host") -> Answer:
    """What each training step spent its time on; the last row is the average of all steps.

    Each moment of a step counts for one role: the first of kernel, memcpy, memset, communication, runtime, dataloader,
    cpu_exec that is active then, otherwise other. A row therefore sums to the length of the step. Kernels are those
    that do not communicate; communication is NCCL's kernels, recognized by names or arguments, and host ranges such as
    "nccl:all_reduce" and "gloo:broadcast".

    Options:
    - step_ends: "host" takes the steps as the host saw them ("ProfilerStep#N"). "device" applies the plug-in's rule:
      the end of each step moves to the last GPU activity that it launched, its start to the end of the step before, and
      steps at the end whose GPU work may be missing are left out.

    compat=plugin: steps end on the device, GPU ranges can be steps and cpu_exec, only ten collectives are
    communication, and driver calls do not count. Once the roles so far fill all steps, the next role counts as a whole,
    so that rows may sum to more than the step. Percentages have two digits.
    """
    found, notes = chosen_breakdown(context, compat, step_ends)
    count = len(found.steps)
    if not count:
        return Answer({name: [] for name in ("step", "start_ns", "total_us", *(row[0] for row in _SHARES))}, notes)
    total, shares = found.lengths_us(), found.shares_us()
    total = np.append(total, total.mean())
    shares = np.column_stack([shares, shares.mean(axis=1)])
    values: dict[str, object] = {
        "step": [*found.steps.name, AVERAGE],
        "start_ns": [*found.steps.clock.unix_ns(found.steps.start).tolist(), None],
        "total_us": total,
    }
    for role, share in zip((*ROLES, OTHER), shares, strict=True):
        percent = np.divide(100 * share, total, out=np.zeros_like(total), where=total > 0)
        values[f"{role}_us"] = share
        values[f"{role}_pct"] = rounded(percent, 2) if compat is Compat.PLUGIN else percent
    return Answer(values, notes)


def chosen_gpus(context: Context, compat: Compat) -> list[GpuFigures]:
    """Returns the figures of each GPU."""
    return context.get(plugin_gpu_figures if compat is Compat.PLUGIN else gpu_figures)


_GPU_NOTE = "the trace has no GPU activity"


@view(
    "gpu_summary",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("name", "text", "", "its name"),
        ("memory_bytes", "int", "bytes", "memory of the GPU"),
        ("compute_capability", "text", "", "compute capability of the GPU"),
        ("kernels", "int", "", "number of kernels that ran on it"),
        ("kernel_us", "float", "us", "sum of their durations"),
        ("utilization_pct", "float", "%", "share of the time of all steps in which at least one kernel ran"),
        ("busy_pct", "float", "%", "share of the same time in which at least one kernel, copy or fill ran"),
        ("sm_efficiency_pct", "float", "%", "estimated share of its multiprocessors that held a block"),
        ("occupancy_pct", "float", "%", "estimated achieved occupancy of its kernels, weighted by duration"),
        ("tensor_core_pct", "float", "%", "share of the kernels' time in kernels that use tensor cores"),
        ("peak_memory_bytes", "int", "bytes", "maximum number of bytes that the allocator had handed out at any time"),
    ),
    compat=(Compat.PLUGIN,),
)
def gpu_summary(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """How busy each GPU was from the start of the first step to the end of the last one.

    Utilization counts the union of kernels only. SM efficiency is the mean of min(blocks per multiprocessor of all
    running kernels, 1); occupancy is the mean of the kernels' estimates weighted by their time. Both are estimates from
    launch shapes, not measurements. The tensor-core share covers all kernels, recognized by their names. The memory
    peak needs recorded allocations.

    compat=plugin: the figures use the plug-in's steps and its list of kernel names. Only kernels that it can attribute
    to an operator count for tensor cores. Percentages have two digits.
    """
    rows = chosen_gpus(context, compat)
    digits = 2 if compat is Compat.PLUGIN else None
    return Answer(
        {
            "device": [row.device for row in rows],
            "name": [row.name for row in rows],
            "memory_bytes": [row.memory_bytes for row in rows],
            "compute_capability": [row.compute_capability for row in rows],
            "kernels": [row.kernels for row in rows],
            "kernel_us": [row.kernel_ns / 1000 for row in rows],
            "utilization_pct": _percent([row.utilization for row in rows], digits),
            "busy_pct": _percent([row.busy for row in rows], digits),
            "sm_efficiency_pct": _percent([row.sm_efficiency for row in rows], digits),
            "occupancy_pct": _percent([row.occupancy / 100 for row in rows], digits),
            "tensor_core_pct": _percent([row.tensor_cores for row in rows], digits),
            "peak_memory_bytes": [row.peak_memory_bytes for row in rows],
        },
        [] if rows else [_GPU_NOTE],
    )


def _percent(shares: list[float], digits: int | None) -> npt.NDArray[np.float64]:
    percent = 100 * np.array(shares, np.float64)
    return percent if digits is None else rounded(percent, digits)


def _mean(values: list[float]) -> float:
    """Returns the mean of the known values; NaN if there are none."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


@view(
    "overview",
    columns(
        ("steps", "int", "", "number of steps"),
        ("step_us", "float", "us", "mean length of a step"),
        *((f"{role}_pct", "float", "%", f"share of the mean step: {title}") for role, title in _TITLES.items()),
        ("gpus", "int", "", "number of GPUs that ran kernels"),
        ("gpu_name", "text", "", "names of these GPUs"),
        ("utilization_pct", "float", "%", "mean over the GPUs: share of the steps' time in which a kernel ran"),
        ("sm_efficiency_pct", "float", "%", "mean over the GPUs: estimated SM efficiency"),
        ("occupancy_pct", "float", "%", "mean over the GPUs: estimated achieved occupancy"),
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
    compat=(Compat.PLUGIN,),
)
def overview(context: Context, *, compat: Compat = Compat.NONE, step_ends: str = "host") -> Answer:
    """The headline figures of a trace in one row: the average step, and how well its GPUs were used.

    The parts of the step and the option step_ends are those of step_breakdown, the GPU figures those of gpu_summary,
    and the tensor-core figures those of tensor_core_use.
    """
    found, notes = chosen_breakdown(context, compat, step_ends)
    gpus = [gpu for gpu in chosen_gpus(context, compat) if gpu.kernels]
    use = context.get(plugin_tensor_use if compat is Compat.PLUGIN else tensor_use)
    digits = 2 if compat is Compat.PLUGIN else None
    percent = _percent([found.average(role) for role in (*ROLES, OTHER)], digits)
    names = dict.fromkeys(gpu.name for gpu in gpus if gpu.name)
    return Answer(
        {
            "steps": [len(found.steps)],
            "step_us": [found.lengths_us().mean() if len(found.steps) else None],
            **{f"{role}_pct": percent[number : number + 1] for number, role in enumerate((*ROLES, OTHER))},
            "gpus": [len(gpus)],
            "gpu_name": [", ".join(names) or None],
            "utilization_pct": _percent([_mean([gpu.utilization for gpu in gpus])], digits),
            "sm_efficiency_pct": _percent([_mean([gpu.sm_efficiency for gpu in gpus])], digits),
            "occupancy_pct": _percent([_mean([gpu.occupancy / 100 for gpu in gpus])], digits),
            "tensor_core_pct": _percent([use.kernel_share], digits),
            "tensor_core_eligible_pct": _percent([use.eligible_share], digits),
            "kernels": [sum(gpu.kernels for gpu in gpus)],
            "kernel_us": [sum(gpu.kernel_ns for gpu in gpus) / 1000],
        },
        [*notes, *([] if gpus else ["the trace has no kernels"])],
    )


@view(
    "gpu_utilization",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("start_ns", "int", "ns", "start of the bucket, Unix time"),
        ("duration_us", "float", "us", "length"),
        ("utilization_pct", "float", "%", "share of the bucket in which at least one kernel ran"),
    ),
    compat=(Compat.PLUGIN,),
)
def gpu_utilization(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """How busy each GPU was over the recording, in 10 to 100 buckets of equal length, a power of ten of µs.

    The recording spans the profiler's own range if the file has it, otherwise the time from the first to the last
    event. The last bucket takes what is left over.

    compat=plugin: the same figures apart from the precision of the times.
    """
    clock = context.get(plugin_clock) if compat is Compat.PLUGIN else UNIX_NS
    low, high = profiler_span(context) if compat is Compat.PLUGIN else recording_span(context)
    start, end = clock.times(context.trace.table("kernel"))
    courses = {
        device: utilization_course(union(start[rows], end[rows]), low, high, clock.per_us)
        for device, rows in context.get(plugin_kernel_rows if compat is Compat.PLUGIN else kernel_rows).items()
    }
    return Answer(
        {
            "device": [device for device, course in courses.items() for _ in course.start],
            "start_ns": _starts(clock, courses),
            "duration_us": clock.us(_joined([course.end - course.start for course in courses.values()])),
            "utilization_pct": 100 * _joined([course.value for course in courses.values()]),
        },
        [] if courses else [_GPU_NOTE],
    )


@view(
    "sm_efficiency",
    columns(
        ("device", "int", "", "GPU index in the process"),
        ("start_ns", "int", "ns", "start of the stretch, Unix time"),
        ("duration_us", "float", "us", "length"),
        ("sm_efficiency_pct", "float", "%", "estimated share of the multiprocessors that held a block"),
    ),
    compat=(Compat.PLUGIN,),
)
def sm_efficiency(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """The estimated SM efficiency of each GPU over time: one row per stretch in which the same kernels run.

    The estimate is min(sum of the running kernels' blocks per multiprocessor, 1). There are no rows for times without
    kernels.

    compat=plugin: only launch figures that the file states count, and a few more rows of about 0 % appear between
    kernels, because the plug-in adds with doubles.
    """
    plugin = compat is Compat.PLUGIN
    clock = context.get(plugin_clock) if plugin else UNIX_NS
    figures = context.get(plugin_launch_figures if plugin else launch_figures)
    start, end = clock.times(context.trace.table("kernel"))
    course_of = plugin_efficiency_course if plugin else efficiency_course
    courses = {
        device: course_of(figures.blocks_per_sm[rows], start[rows], end[rows])
        for device, rows in context.get(plugin_kernel_rows if plugin else kernel_rows).items()
    }
    counts = [len(course.start) for course in courses.values()]
    return Answer(
        {
            "device": np.repeat(np.array(list(courses), np.int64), counts),
            "start_ns": _starts(clock, courses),
            "duration_us": clock.us(_joined([course.end - course.start for course in courses.values()])),
            "sm_efficiency_pct": 100 * _joined([course.value for course in courses.values()]),
        },
        [] if sum(counts) else ["no kernel has a launch shape and a GPU with known properties"],
    )


def _starts(clock: TickClock, courses: Mapping[int, Course]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *(clock.unix_ns(course.start) for course in courses.values())])


def _joined(parts: list[npt.NDArray[np.int64]] | list[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    joined: npt.NDArray[np.float64] = np.concatenate([np.zeros(0, np.int64), *parts])
    return joined
