"""When the host released the pageable memory of a batch that it had copied to the GPU.

Theory of operation
    `batch = batch.to(device)` gives up the batch on the host once it is copied. What a worker of the DataLoader made is
    shared memory, which the kernel takes page by page: a batch of 100 MB takes 20 ms. With pin_memory=True the loader's
    own thread copies and releases it, ahead; without, the training thread does, with no operator and no call.

    So that is the time from the operator of such a copy to the next operator or call of the training thread, if

    - the DataLoader makes the batches;
    - the thread is in the same call of a function all the time, and runs;
    - it is no longer than it takes to release so many bytes, even slowly;
    - samples saw that function, at a line that copies, outside of the copying method and of any other call; at least as
      many as that time has.
"""

import re

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.kernel_traits.kernel_types import data_loading_names, matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import MEMCPY, calls, gpu, ops
from kineto_trace.structure.python.callees import callee_samples
from kineto_trace.structure.python.python_frames import PythonFrames, python_frames
from kineto_trace.structure.python.python_samples import line_samples
from kineto_trace.structure.training_thread import training_thread

SLOWEST = 2.0  # bytes per ns that are released at least: 6 were measured
LEAST_NS = 1_000_000
LEAST_SAMPLES = 3
NORMAL_95 = 1.96  # deviations
_TO_DEVICE = re.compile(r"Pageable -> Device|HtoD.*Pageable", re.IGNORECASE)
_COPIES = re.compile(r".*\.(?:to|cuda|copy_|xpu|npu)")

Ints = npt.NDArray[np.int64]
_NEVER = Union(np.empty(0, np.int64), np.empty(0, np.int64))


def pageable_releases(context: Context) -> Union:
    """Returns when the training thread did that (Unix ns); nothing without all of the evidence."""
    frames = context.get(python_frames)
    if not frames.samples or not context.get(data_loading_names).any():
        return _NEVER
    start, end, size = _after_copies(context)
    place = frames.innermost(np.full(len(start), context.get(training_thread), np.uint32), start)
    stays = (place >= 0) & (place == frames.innermost(np.full(len(end), context.get(training_thread), np.uint32), end))
    chosen = stays & (end - start >= LEAST_NS) & (end - start <= size / SLOWEST)
    name = np.append(frames.name, -1)[place]
    for function in unique_values(name[chosen]).tolist():
        own = chosen & (name == function)
        seen = _outside_of_calls(context, frames, function)
        expected = int((end - start)[own].sum()) / frames.period_ns
        if seen < LEAST_SAMPLES or expected > seen + NORMAL_95 * np.sqrt(seen):
            chosen &= ~own
    return union(start[chosen], end[chosen])


def _after_copies(context: Context) -> tuple[Ints, Ints, Ints]:
    """For copies from pageable memory: end of their operator, beginning of what the thread ran next, and bytes."""
    activity, called, tree, main = context.get(gpu), context.get(calls), context.get(ops), context.get(training_thread)
    names = matches(context.trace.strings, _TO_DEVICE)
    copies = np.flatnonzero((activity.kind == MEMCPY) & (activity.call >= 0) & names[activity.name])
    copies = copies[called.thread[activity.call[copies]] == main]
    of_thread = tree.nested.of_thread(main)
    outermost = of_thread.tree.parent < 0
    mine = called.thread == main
    work = union(
        np.concatenate([of_thread.events.start[outermost], called.start[mine]]),
        np.concatenate([of_thread.tree.end[outermost], called.end[mine]]),
    )
    at = np.searchsorted(work.start, called.start[activity.call[copies]], side="right") - 1
    within, last = np.unique(at, return_index=True)
    known = (within >= 0) & (within + 1 < len(work.start))
    within, rows = within[known], activity.row[copies[last[known]]]
    return work.end[within], work.start[within + 1], context.trace.table("gpu_memcpy")["bytes"][rows].astype(np.int64)


def _outside_of_calls(context: Context, frames: PythonFrames, function: int) -> int:
    """Counts a function's samples at lines that copy, without those in the copying methods and other calls."""
    names = context.trace.table("python_function")["name"]
    lines, callees = line_samples(context.trace), callee_samples(context.trace)
    mine, inner = names[lines.row] == function, names[callees.row] == function
    copying = np.array([_COPIES.fullmatch(name) is not None for name in callees.names], np.bool_)
    at = unique_values(callees.line[inner & copying[callees.name]]) if len(callees.names) else callees.line
    seen = int(lines.busy[mine & np.isin(lines.line, at)].sum())
    return seen - int(callees.counts[inner & np.isin(callees.line, at)].sum())
