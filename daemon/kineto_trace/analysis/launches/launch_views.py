"""Launches: how long calls take, how long their work waits to start."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
NO_LAUNCHES = "no GPU activity of the trace has its launch in the trace"


@dataclass(frozen=True, slots=True)
class Launches:
    """One value per launched GPU activity. Durations are in ns."""

    correlation: Ints
    call: npt.NDArray[np.int32]
    activity: npt.NDArray[np.int32]
    cpu: Ints
    gpu: Ints
    delay: Ints

    def flags(self, runtime_cutoff: float, launch_delay_cutoff: float) -> tuple[Flags, Flags, Flags]:
        """Whether each is a short activity, a long call, a long delay."""
        cpu = self.cpu / 1000
        short = (cpu <= runtime_cutoff) & (self.gpu < self.cpu)
        return short, cpu > runtime_cutoff, self.delay / 1000 > launch_delay_cutoff


@view(
    "launch_stats",
    columns(
        ("correlation", "int", "", "correlation id, which joins the call with the activity"),
        ("call", "text", "", "name of the call"),
        ("activity", "text", "", "name of the kernel, copy or fill"),
        ("cpu_us", "float", "us", "duration of the call"),
        ("gpu_us", "float", "us", "duration of the activity"),
        (
            "launch_delay_us",
            "float",
            "us",
            "from the end of the call to the start of the activity; 0 if the activity started earlier",
        ),
        ("short_activity", "bool", "", "whether the call took longer than the activity, without being long"),
        ("long_call", "bool", "", "whether the call took longer than runtime_cutoff"),
        ("long_delay", "bool", "", "whether the delay is longer than launch_delay_cutoff"),
    ),
    nothing=NO_LAUNCHES,
)
def launch_stats(
    context: Context,
    *,
    runtime_cutoff: float = 50,
    launch_delay_cutoff: float = 100,
    include_memory: bool = True,
) -> Answer:
    """The call, the activity and the delay of every launch whose call and activity are both in the trace.

    A graph launch has one row for each of its kernels.

    Options:
    - runtime_cutoff: calls longer than this (us) are long.
    - launch_delay_cutoff: delays longer than this (us) are long.
    - include_memory: include copies and fills.
    """
    return launch_columns(context, _exact_launches(context, include_memory), runtime_cutoff, launch_delay_cutoff)


def launch_columns(context: Context, found: Launches, runtime_cutoff: float, launch_delay_cutoff: float) -> Answer:
    """The columns of the view launch_stats."""
    short, long_call, long_delay = found.flags(runtime_cutoff, launch_delay_cutoff)
    names = context.trace.strings
    return Answer(
        {
            "correlation": found.correlation,
            "call": texts(names, found.call),
            "activity": texts(names, found.activity),
            "cpu_us": found.cpu / 1000,
            "gpu_us": found.gpu / 1000,
            "launch_delay_us": found.delay / 1000,
            "short_activity": short,
            "long_call": long_call,
            "long_delay": long_delay,
        }
    )


@view(
    "launch_summary",
    columns(
        ("launches", "int", "", "number of launched activities"),
        ("short_activities", "int", "", "activities shorter than their call, which was not long"),
        ("long_calls", "int", "", "activities whose call took longer than runtime_cutoff"),
        ("long_delays", "int", "", "activities that waited longer than launch_delay_cutoff"),
        ("cpu_us", "float", "us", "sum of the calls' durations"),
        ("gpu_us", "float", "us", "sum of the activities' durations"),
        ("mean_delay_us", "float", "us", "mean delay"),
        ("median_delay_us", "float", "us", "median delay"),
        ("max_delay_us", "float", "us", "longest delay"),
    ),
)
def launch_summary(
    context: Context,
    *,
    runtime_cutoff: float = 50,
    launch_delay_cutoff: float = 100,
    include_memory: bool = True,
) -> Answer:
    """The number of conspicuous launches: activities shorter than their call, long calls, long delays.

    The options are those of launch_stats. A graph launch counts its call once for each kernel. If no
    launch has both its call and its activity in the trace, all figures are missing, not zero.
    """
    answer = summary_columns(_exact_launches(context, include_memory), runtime_cutoff, launch_delay_cutoff)
    work = context.get(gpu)
    if (work.call >= 0).any():
        return answer
    return Answer({name: [None] for name in answer.values}, [NO_LAUNCHES if len(work) else NO_GPU])


def summary_columns(found: Launches, runtime_cutoff: float, launch_delay_cutoff: float) -> Answer:
    """The columns of the view launch_summary."""
    short, long_call, long_delay = found.flags(runtime_cutoff, launch_delay_cutoff)
    delay = found.delay / 1000
    some = len(delay) > 0
    return Answer(
        {
            "launches": [len(delay)],
            "short_activities": [int(short.sum())],
            "long_calls": [int(long_call.sum())],
            "long_delays": [int(long_delay.sum())],
            "cpu_us": [float(found.cpu.sum()) / 1000],
            "gpu_us": [float(found.gpu.sum()) / 1000],
            "mean_delay_us": [float(delay.mean()) if some else None],
            "median_delay_us": [float(np.median(delay)) if some else None],
            "max_delay_us": [float(delay.max()) if some else None],
        }
    )


def _exact_launches(context: Context, include_memory: bool) -> Launches:
    """Returns the launches by the start of the call."""
    work, called = context.get(gpu), context.get(calls)
    rows = np.flatnonzero((work.call >= 0) & (include_memory | (work.kind == 0)))
    call = work.call[rows]
    rows = rows[np.argsort(called.start[call], kind="stable")] if len(rows) else rows
    call = work.call[rows]
    return launches_of(
        work.correlation[rows].astype(np.int64),
        (called.name[call], called.start[call], called.end[call]),
        (work.name[rows], work.start[rows], work.end[rows]),
    )


def launches_of(
    correlation: Ints,
    call: tuple[npt.NDArray[np.int32], Ints, Ints],
    work: tuple[npt.NDArray[np.int32], Ints, Ints],
) -> Launches:
    """Launches from the name, start and end of their calls and of their activities."""
    delay = np.maximum(work[1] - call[2], 0)
    return Launches(correlation, call[0], work[0], call[2] - call[1], work[2] - work[1], delay)
