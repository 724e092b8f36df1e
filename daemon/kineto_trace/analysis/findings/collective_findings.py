"""Findings about how collectives are called: many small ones in place of few large ones.

Theory of operation
    A collective costs the host about the same whatever its size: the operator, the events between streams and the
    launch. If a step has many small ones while the GPU waits for the host, fewer and larger ones would save most of
    that time: as many as their bytes need at BUCKET_BYTES each, which is what DistributedDataParallel does by default.
"""

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from kineto_trace.analysis.causes.time_causes import time_causes
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.measured_work import called_in, function_at, heaviest_op
from kineto_trace.arrays.intervals import containing, union
from kineto_trace.base.quantities import ms
from kineto_trace.collectives.rank_matching import rank_collectives
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu

SMALL_COLLECTIVES = "small_collectives"
BUCKET_BYTES = 25 << 20  # what DistributedDataParallel puts into one all_reduce
SMALL_BYTES = 4 << 20
MANY = 16  # small ones in a step
_OPERATORS = re.compile(r"^(?:c10d|_c10d_functional)::|^record_param_comms$")
_CAUSES = ("operators", "launch_latency", "host_communication")


def small_collectives(context: Context) -> Iterator[Finding]:
    """The host calls many small collectives, and the GPU waits for it."""
    times, found = context.get(time_causes), context.get(rank_collectives)
    steps, idle = times.steps, times.total(*_CAUSES)
    if not steps.steps or not idle or not len(found):
        return
    measured = union(steps.start[~steps.left_out], steps.end[~steps.left_out])
    size = np.array([description.bytes or 0 for description in found.descriptions])[found.description]
    rows = np.flatnonzero((containing(*measured, found.launch) >= 0) & (size > 0) & (size < SMALL_BYTES))
    each = len(rows) / steps.steps
    if each < MANY:
        return
    table = context.trace.table("cpu_op")
    ops = np.flatnonzero(matches(context.trace.strings, _OPERATORS)[table["name"]])
    ops = ops[containing(*measured, table["start"][ops].astype(np.int64)) >= 0]
    inside = np.sort(found.launch[rows])
    start, end = table["start"][ops].astype(np.int64), table.end()[ops].astype(np.int64)
    own = np.searchsorted(inside, end) > np.searchsorted(inside, start)  # that call a small one
    took = union(start[own], end[own]).length()
    needed = np.ceil(size[rows].sum() / steps.steps / BUCKET_BYTES)
    saving = min(int(took * (1 - needed / each)), idle)
    kind = Counter(found.descriptions[number].collective for number in found.description[rows].tolist()).most_common(1)
    frame = _caller(context, inside)
    yield Finding(
        name=SMALL_COLLECTIVES,
        title=f"The host calls many small collectives, most of them {kind[0][0]}, and the GPU waits for it"
        f"{called_in(context, frame)}",
        saving_ns=saving,
        advice="Put small tensors together: larger buckets (DistributedDataParallel(bucket_cap_mb=…)), gradients that "
        "are reduced in buckets during the backward, one collective of a flattened tensor or of several at once "
        "(torch.distributed._coalescing_manager), metrics that are reduced together every so many steps.",
        evidence=f"{each:.0f} collectives of less than {SMALL_BYTES >> 20} MiB in each step, of "
        f"{size[rows].mean() / 1024:.4g} KiB on average; the host was in their operators for {ms(took)}, of which "
        f"{needed:.0f} in each step would be left",
        causes=_CAUSES,
        op=heaviest_op(context, ops[own], end[own] - start[own]),
        frame=frame,
    )


def _caller(context: Context, launch: np.ndarray) -> int:
    """A row of python_function: the user's function that calls most of the collectives; -1: unknown."""
    activity, called = context.get(gpu), context.get(calls)
    call = activity.call[activity.communication & (activity.call >= 0)]
    call = call[np.isin(called.start[call], launch)]
    return function_at(context, called.thread[call], called.start[call], np.ones(len(call)))
