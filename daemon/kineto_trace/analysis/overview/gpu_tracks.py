"""How busy each GPU was, as counters for a viewer: the figures of the views gpu_utilization and sm_efficiency."""

import numpy as np

from kineto_trace.analysis.kernels.launch_occupancy import launch_figures
from kineto_trace.analysis.overview.gpu_figures import kernel_rows, unix_times
from kineto_trace.analysis.overview.gpu_utilization import Course, sm_efficiency, utilization_course
from kineto_trace.arrays.intervals import union
from kineto_trace.formats.chrome.counter_tracks import CounterTrack
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.recorded_time import unrecorded

UTILIZATION, SM_EFFICIENCY = "GPU utilization (computed)", "SM efficiency (estimated)"


def gpu_tracks(context: Context, start_ns: int, end_ns: int) -> list[CounterTrack]:
    """Returns the tracks of each GPU that ran kernels between these times (Unix ns); none if none did.

    SM efficiency has a track where launch shapes and the GPU's properties are known; it is 0 between kernels. A stretch
    that the GPU's source did not record has no utilization.
    """
    start, end = (times.clip(start_ns, end_ns) for times in unix_times(context.trace.table("kernel")))
    blocks, missing = context.get(launch_figures).blocks_per_sm, unrecorded(context.trace, GPU_TABLES)
    found = []
    for device, rows in context.get(kernel_rows).items():
        busy = union(start[rows], end[rows])
        found.append(_track(device, UTILIZATION, utilization_course(busy, start_ns, end_ns, missing=missing)))
        efficiency = sm_efficiency(blocks[rows], start[rows], end[rows])
        if len(efficiency.start):
            found.append(_track(device, SM_EFFICIENCY, _without_gaps(efficiency)))
    return found


def _without_gaps(course: Course) -> Course:
    """The course with 0 after each stretch that no other one follows at once."""
    last = np.flatnonzero(np.append(course.start[1:] != course.end[:-1], True))
    return Course(
        np.insert(course.start, last + 1, course.end[last]),
        np.insert(course.end, last + 1, np.append(course.start[1:], course.end[-1:])[last]),
        np.insert(course.value, last + 1, 0.0),
    )


def _track(device: int, name: str, course: Course) -> CounterTrack:
    known = np.isfinite(course.value)
    return CounterTrack(device=device, name=name, time=course.start[known], value=100 * course.value[known])
