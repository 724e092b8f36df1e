"""HTA's events in the views diff_event_names, frequent_sequences and counters_with_operators."""

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.diff.event_diff_views import EventsOn, diff_event_names, side_of
from kineto_trace.analysis.diff.name_totals import Side
from kineto_trace.analysis.kernels.counter_views import counter_columns, counters_with_operators
from kineto_trace.analysis.kernels.kernel_sequence_views import (
    Launched,
    exact_launched,
    fitting,
    frequent_sequences,
    sequence_columns,
)
from kineto_trace.compat.hta.hta_call_stacks import hta_stacks
from kineto_trace.compat.hta.hta_frame import KIND, NOTHING, HtaError, hta_frame, hta_rows, step_numbers
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat

Ints = npt.NDArray[np.int64]


@diff_event_names.variant(Compat.HTA)
def hta_event_names(
    context: Context, *, device: EventsOn = "all", step: int | None = None, short_names: bool = False
) -> Side:
    """compat=hta: the figures of TraceDiff.compare_traces and TraceDiff.ops_diff.

    All rows that HTA keeps count, including Python functions (and here those of the last step), with HTA's rounding.
    Without `step` it compares the first step.
    """
    return side_of(context, *_of_step(context, device, step), short_names)


def _of_step(context: Context, device: EventsOn, step: int | None) -> tuple[npt.NDArray[np.int32], Ints]:
    frame = context.get(hta_rows)
    if step is None:
        numbers = step_numbers(context.trace.strings, np.arange(len(context.trace.strings), dtype=np.int32))
        known = numbers[numbers >= 0]
        if not len(known):
            raise ViewError("view diff_event_names: HTA compares one step, and the trace has none (ProfilerStep#N)")
        step = int(known.min())
    chosen = frame.iteration == step
    if device != "all":
        chosen &= (frame.stream != NOTHING) == (device == "gpu")
    return frame.name[chosen], frame.duration[chosen]


@frequent_sequences.variant(Compat.HTA)
def hta_sequences(context: Context, *, op: str = "aten::", min_pattern_len: int = 3) -> Answer:
    """compat=hta: the figures of get_frequent_cuda_kernel_sequences.

    All sequences are listed (HTA uses top_k only for its pictures). Of the events whose names match, only those count
    that are at the smallest depth of their call stack. Activities of the backward thread can belong to annotations of
    the other thread. Stream 0 does not count; synchronisations do. Where HTA fails, the figures are the exact ones (of
    all sequences).
    """
    try:
        return sequence_columns(context, _launched(context, op), op, min_pattern_len, 0)
    except HtaError as exc:
        return sequence_columns(context, exact_launched(context, op), op, min_pattern_len, 0, [exc.note])


def _launched(context: Context, op: str) -> Launched:
    """Raises HtaError."""
    frame, stacks = context.get(hta_frame), context.get(hta_stacks)
    empty = np.empty(0, np.int64)
    fits = fitting(context, op)
    candidates = np.flatnonzero(fits[frame.name]) if len(fits) else empty
    if not len(candidates):
        return Launched(empty, empty.astype(np.int32), empty, empty.astype(np.int32), empty)
    depth = int(stacks.depth[candidates].min())
    places = stacks.place[candidates[stacks.depth[candidates] == depth]]
    roots = np.sort(places[places >= 0])
    rows = np.flatnonzero((frame.stream > 0) & (frame.link != NOTHING))
    rows = rows[stacks.place[frame.link[rows]] >= 0]
    root = stacks.among(stacks.place[frame.link[rows]], roots)
    rows, root = rows[root >= 0], root[root >= 0]
    order = np.lexsort((frame.start[rows], root))
    rows = rows[order]
    top = stacks.row[roots]
    return Launched(root[order], frame.name[rows], frame.duration[rows], frame.name[top], frame.duration[top])


@counters_with_operators.variant(Compat.HTA)
def hta_counters(context: Context) -> Answer:
    """compat=hta: the figures of get_cupti_counter_data_with_operators: the same without those of the last step."""
    frame = context.get(hta_frame)
    ranges, launches = (frame.row[frame.kind == KIND[kind]] for kind in ("other", "cuda_runtime"))
    return counter_columns(context, ranges, launches)
