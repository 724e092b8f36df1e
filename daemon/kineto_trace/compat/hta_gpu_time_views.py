"""HTA's figures of GPU time: kernels, idle time, annotations, steps, overlap, bandwidth and stragglers.

These are temporal_breakdown, comm_comp_overlap, kernel_type_breakdown, kernel_breakdown, memory_bandwidth and
memory_bandwidth_summary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kineto_trace.analysis.annotation_views import (
    TakenOn,
    allowed_names,
    annotation_columns,
    gpu_annotations,
    kernels_with_annotations,
    no_annotations,
    tracks_of,
)
from kineto_trace.analysis.distributed.distributed_views import Steps, parse_steps, stragglers
from kineto_trace.analysis.gpu_time_views import (
    COPY_TABLES,
    NO_GPU,
    Bandwidths,
    GpuEvents,
    bandwidth_columns,
    comm_comp_overlap,
    kernel_breakdown,
    kernel_type_breakdown,
    kernel_types,
    kinds_of,
    lengths_by_types,
    memory_bandwidth,
    memory_bandwidth_summary,
    statistics_rows,
    summary_columns,
    summed_bandwidths,
    temporal_breakdown,
    temporal_columns,
    temporal_row,
    total_times,
    type_columns,
)
from kineto_trace.analysis.idle_views import (
    CATEGORIES,
    OTHER,
    categorized_gaps,
    idle_breakdown,
    idle_columns,
    idle_row,
    tracks,
)
from kineto_trace.analysis.overview.step_breakdown import NO_STEPS, profiler_steps, step_values
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Merged, innermost_spans, merge, sweep
from kineto_trace.arrays.row_groups import as_hta, group
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints
from kineto_trace.compat.hta_frame import KIND, KINDS, HtaFrame, hta_events, hta_frame, step_numbers
from kineto_trace.errors import ViewError
from kineto_trace.kernel_traits.kernel_types import HTA_COMMUNICATION, HTA_COMPUTATION, HTA_MEMORY, HTA_TYPES
from kineto_trace.model.context import Context
from kineto_trace.structure.event_arguments import argument
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, Compat

_STATED = "memory bandwidth (GB/s)"
_HTA_PREFIX = "ncclKernel"  # not ncclDevKernel: HTA finds no stragglers in traces of newer versions of NCCL
_SHARE = 0.01  # of an iteration: shorter kernels cannot make a rank late


@dataclass(frozen=True, slots=True)
class HtaRank:
    """HTA's candidates of one rank: communication kernels in steps. Times in µs.

    steps: numbers of the steps in the trace.
    first, last: per number of `iterations`, of all events in it.
    """

    steps: tuple[int, ...]
    iterations: Ints
    first: Floats
    last: Floats
    name: tuple[str, ...]
    stream: Ints
    iteration: Ints
    start: Floats
    duration: Floats


def _merged(context: Context, events: GpuEvents, chosen: Flags) -> Merged:
    """Returns the time in which any of the chosen events ran."""
    start = events.start[chosen]
    return merge(start, events.end[chosen], context.get(hta_frame).order(start))


@temporal_breakdown.variant(Compat.HTA)
def hta_temporal_breakdown(context: Context) -> Answer:
    """compat=hta: the figures of get_temporal_breakdown.

    There is one row for all devices together. cuda_sync events count as busy time, HTA's patterns decide on kernel
    types, percentages have two digits, and HTA's loading rules apply (last step dropped, whole microseconds).
    """
    events = context.get(hta_events)
    if not len(events):
        return temporal_columns([])
    ran = _merged(context, events, np.ones(len(events), np.bool_))
    compute = _merged(context, events, events.type == HTA_COMPUTATION).length()
    return temporal_columns([temporal_row(None, int(ran.end[-1] - ran.start[0]), ran.length(), compute, digits=2)])


@comm_comp_overlap.variant(Compat.HTA)
def hta_comm_comp_overlap(context: Context) -> Answer:
    """compat=hta: the figures of get_comm_comp_overlap.

    Kernel types follow HTA's patterns, which miss ncclDevKernel in the middle of a name and match all names that begin
    with hip. Without GPU events there is one row with zeros, as in HTA.
    """
    events = context.get(hta_events)
    communication = _merged(context, events, events.type == HTA_COMMUNICATION)
    computation = _merged(context, events, events.type == HTA_COMPUTATION)
    running = sweep([(1, communication), (2, computation)], one_by_one=False)
    length, both = communication.length(), int(running.lengths()[running.running == 3].sum())
    share = float(np.round(100 * both / length, 2)) if length else None
    return comm_comp_overlap.answer([[None, length / 1000, both / 1000, share]], () if len(events) else (NO_GPU,))


def _all_ranks(partials: Sequence[tuple[int, dict[str, int]]]) -> Answer:
    return type_columns([(None, total_times(partials))], digits=1)


@kernel_type_breakdown.variant(Compat.HTA, reduce=_all_ranks)
def hta_kernel_type_breakdown(context: Context, *, include_memory: bool = True) -> dict[str, int]:
    """compat=hta: the first table of get_gpu_kernel_breakdown.

    It has the sums over all ranks, types by HTA's patterns, and shares with one digit.
    """
    events = context.get(hta_events)
    merged = [_merged(context, events, events.type == number) for number in kernel_types(include_memory)]
    return lengths_by_types(sweep([(1 << place, each) for place, each in enumerate(merged)], one_by_one=True))


@kernel_breakdown.variant(Compat.HTA)
def hta_kernel_breakdown(
    context: Context, *, duration_ratio: float = 0.8, num_kernels: int = 10, include_memory: bool = True
) -> Answer:
    """compat=hta: the second table of get_gpu_kernel_breakdown.

    Rows are sorted by type and name. The quantile of running sums decides which kernels become one row, whose
    statistics are then those of the sums.
    """
    events = context.get(hta_events)
    duration = (events.end - events.start) / 1000
    rows: list[dict[str, Any]] = []
    for number in sorted(kernel_types(include_memory), key=lambda type_: HTA_TYPES[type_]):
        chosen = events.type == number
        group = events.name[chosen].astype(np.int64)
        table = as_hta(group, duration[chosen], context.trace.strings, ratio=duration_ratio, limit=num_kernels)
        found = [{"kernel_type": HTA_TYPES[number], **row} for row in statistics_rows(table)]
        rows += sorted(found, key=lambda row: str(row["name"]))
    return kernel_breakdown.answer(rows)


@memory_bandwidth.variant(Compat.HTA)
def hta_memory_bandwidth(context: Context) -> Answer:
    """compat=hta: the figures of get_memory_bw_time_series: the bandwidth that the file states, over rounded times."""
    return bandwidth_columns(context.get(hta_bandwidths))


@memory_bandwidth_summary.variant(Compat.HTA)
def hta_memory_bandwidth_summary(context: Context) -> Answer:
    """compat=hta: the figures of get_memory_bw_summary."""
    return summary_columns(context.get(hta_bandwidths))


def hta_bandwidths(context: Context) -> Bandwidths:
    """Returns the bandwidths as HTA sums them.

    It does not distinguish devices, uses the bandwidth stated in the file, lets copies of 0 us last 1 us, and keeps the
    rounding errors of its sums when nothing runs any more.
    """
    frame, events = context.get(hta_frame), context.get(hta_events)
    rows = np.flatnonzero(events.type == HTA_MEMORY)
    kinds, kind = kinds_of(context, events.name[rows])
    value = np.zeros(len(rows))
    for table_kind in COPY_TABLES:
        chosen = np.flatnonzero(frame.kind[events.row[rows]] == KINDS.index(table_kind))
        value[chosen] = _stated(context, table_kind)[frame.row[events.row[rows[chosen]]]]
    start, end = events.start[rows], events.end[rows]
    end = np.where(end == start, start + 1000, end)
    time = np.concatenate([start, end])
    order = np.argsort((time - frame.origin_ns).astype(np.float64), kind="quicksort")
    kind = np.tile(kind, 2)[order]
    order, kind = order[by_kind := np.argsort(kind, kind="stable")], kind[by_kind]
    device = np.full(len(order), -1, np.int64)
    found = summed_bandwidths(time[order], device, kind, kinds, np.concatenate([value, -value])[order], frame.origin_ns)
    return replace(found, by_device=False)


def _stated(context: Context, kind: str) -> Floats:
    """Returns the bandwidths stated in a file; for captures, those that the exporter would state."""
    table = context.trace.table(kind)
    computed: Floats = table["bytes"] / np.maximum(table["duration"], 1)
    if not table.origin:
        return computed
    stated: Floats = np.nan_to_num(argument(context, kind, _STATED))
    return stated


@idle_breakdown.variant(Compat.HTA)
def hta_idle_breakdown(
    context: Context, *, consecutive_kernel_delay: float = 30, streams: Sequence[int] = ()
) -> Answer:
    """compat=hta: the figures of get_idle_time_breakdown.

    A gap begins at the end of the activity that started before, so it is negative where activities overlap. The first
    activity of a stream counts as "other" without a gap, and categories without activities have no row. The share and
    the statistics have two digits. For MTIA, the events mtia_ccp_events count. (HTA documents the delay in ns, but
    interprets it as us.)
    """
    events, order = context.get(hta_events), context.get(hta_frame).order
    parts = sorted(tracks(events, events.stream), key=lambda part: int(part[0]))  # by the streams' first rows
    rows = []
    for part in parts:
        by_start = part[order(events.start[part])]
        delay_ns = round(consecutive_kernel_delay * 1000)
        gaps, category = categorized_gaps(events, by_start, events.end[by_start][:-1], delay_ns)
        rows += [
            idle_row(None, int(events.stream[part[0]]), number, gaps, category, digits=2)
            for number in range(len(CATEGORIES))
            if number == OTHER or (category == number).any()
        ]
    return idle_columns(events, parts, rows, streams)


@gpu_annotations.variant(Compat.HTA)
def hta_annotations(
    context: Context,
    *,
    on: TakenOn = "gpu",
    duration_ratio: float = 0.8,
    num_kernels: int = 1000,
    allowlist: Sequence[str] = (),
) -> Answer:
    """compat=hta: the figures of get_gpu_user_annotation_breakdown.

    Rows are sorted by name. The quantile of running sums decides which annotations become one row, whose statistics
    are then those of the sums.
    """
    frame = context.get(hta_frame)
    chosen = frame.exact & (frame.kind == KIND["gpu_user_annotation" if on == "gpu" else "user_annotation"])
    name, duration = frame.name[chosen], frame.duration[chosen] / 1000
    strings, kept = context.trace.strings, allowed_names(context, name, allowlist)
    found = as_hta(name.astype(np.int64), duration, strings, ratio=duration_ratio, limit=num_kernels, kept=kept)
    return annotation_columns(found, on, by_name=True)


@kernels_with_annotations.variant(Compat.HTA)
def hta_kernels_with_annotations(context: Context) -> Answer:
    """compat=hta: the figures of get_gpu_kernels_with_user_annotations.

    Every activity gets the shortest annotation of its stream that overlaps it; activities of other streams with exactly
    the same times get it too. Those of 0 us get none at its edges (with pandas 3, HTA gives them none at all). HTA
    fails if rounding made an activity end before it starts; here such activities have no annotation. Synchronisations
    count as activities.
    """
    frame = context.get(hta_frame)
    spans = np.flatnonzero(frame.exact & (frame.kind == KIND["gpu_user_annotation"]))
    if not len(spans):
        return kernels_with_annotations.answer([], (no_annotations("gpu"),))
    rows = np.flatnonzero((frame.stream >= 0) & (frame.correlation >= 0) | (frame.kind == KIND["cuda_sync"]))
    spans = spans[np.argsort(-frame.duration[spans], kind="stable")]
    order = _writing_order(frame, spans)
    found = innermost_spans(
        tracks_of(frame.pid[rows], frame.tid[rows]),
        (frame.start[rows], frame.end[rows]),
        tracks_of(frame.pid[spans], frame.tid[spans]),
        (frame.start[spans], frame.end[spans]),
        order,
    )
    written = np.where(found >= 0, order[found], NOTHING)
    same = group([frame.start[rows], frame.duration[rows]])
    last = np.full(len(same), NOTHING, np.int64)
    np.maximum.at(last, same.number, written)
    written = last[same.number]
    at = np.empty(len(spans), np.int64)
    at[order] = frame.name[spans]
    name = np.where((written >= 0) & (frame.duration[rows] >= 0), at[written], NOTHING)
    broken = bool((frame.duration[rows] < 0).any())
    notes = ["HTA fails on this trace: its rounding makes some activities end before they start"] if broken else []
    values = {
        "name": texts(context.trace.strings, frame.name[rows]),
        "device": frame.pid[rows],
        "stream": frame.tid[rows],
        "start_ns": frame.start[rows],
        "duration_us": frame.duration[rows] / 1000,
        "annotation": texts(context.trace.strings, name),
    }
    return Answer(values, notes)


def _writing_order(frame: HtaFrame, spans: Ints) -> Ints:
    """Returns when HTA writes each annotation, given from long to short: stream by stream, in order of appearance."""
    _, first, track = np.unique(tracks_of(frame.pid[spans], frame.tid[spans]), return_index=True, return_inverse=True)
    order = np.lexsort((np.arange(len(spans)), first[track]))
    place = np.empty(len(spans), np.int64)
    place[order] = np.arange(len(spans))
    return place


@profiler_steps.variant(Compat.HTA)
def hta_steps(context: Context) -> Answer:
    """compat=hta: the steps of get_profiler_steps.

    These are the numbers of the steps that remain after HTA has dropped the last one (if there are at least two), each
    once and in ascending order. Where a step appears twice, its first row counts.
    """
    values = step_values(context)
    left = unique_values(step_numbers(context.trace.strings, context.get(hta_frame).name))
    first = {number: row for row, number in reversed(list(enumerate(values["step"].tolist())))}
    rows = [first[number] for number in left[left >= 0].tolist() if number in first]
    return Answer({name: column[rows] for name, column in values.items()}, () if rows else (NO_STEPS,))


def _rank(context: Context) -> HtaRank:
    frame, texts = context.get(hta_frame), context.trace.strings
    iterations, group = np.unique(frame.iteration, return_inverse=True)
    first, last = np.full(len(iterations), np.inf), np.full(len(iterations), -np.inf)
    np.minimum.at(first, group, frame.start / 1000.0)
    np.maximum.at(last, group, frame.end / 1000.0)
    communicates = np.array([text.startswith(_HTA_PREFIX) for text in texts], np.bool_)
    rows = np.flatnonzero(communicates[frame.name] & (frame.stream > 0) & (frame.iteration > 0))
    numbers = [
        texts[number][len("ProfilerStep") :]
        for number in unique_values(frame.name).tolist()
        if texts[number].startswith("ProfilerStep")
    ]
    return HtaRank(
        steps=tuple(int(text.strip(" #")) for text in numbers if len(text) < 20 and text.strip(" #").isdecimal()),
        iterations=iterations,
        first=first,
        last=last,
        name=tuple(texts[number] for number in frame.name[rows].tolist()),
        stream=frame.stream[rows],
        iteration=frame.iteration[rows],
        start=frame.start[rows] / 1000.0,
        duration=frame.duration[rows] / 1000.0,
    )


def _last_kernels(
    partials: Sequence[tuple[int, HtaRank]], valid: set[int], begin: float, mean: float
) -> dict[tuple[int, str, int], dict[int, tuple[float, float]]]:
    """Returns by (stream, kernel, iteration) each rank's last long kernel: start and duration, in mean iterations."""
    last: dict[tuple[int, str, int], dict[int, tuple[float, float]]] = {}
    for rank, part in partials:
        rows = np.flatnonzero(np.isin(part.iteration, list(valid)) & (part.duration >= _SHARE * mean))
        names, name = np.unique(np.array(part.name, object)[rows].astype(str), return_inverse=True)
        keys = np.stack([part.stream[rows], name, part.iteration[rows]])[:, ::-1]
        found, at = np.unique(keys, axis=1, return_index=True)  # the first of the reversed rows: the last one
        for (stream, number, iteration), row in zip(found.T.tolist(), rows[::-1][at].tolist(), strict=True):
            entry = ((float(part.start[row]) - begin) / mean, float(part.duration[row]) / mean)
            last.setdefault((stream, str(names[number]), iteration), {})[rank] = entry
    return last


def _rows(partials: Sequence[tuple[int, HtaRank]], *, steps: Steps = None, num_candidates: int = 2) -> Answer:
    wanted, candidates = parse_steps(steps), max(1, num_candidates)
    available = {number for _, part in partials for number in part.steps}
    valid = available if wanted is None else wanted & available
    if not valid and wanted is None:
        return stragglers.answer([], ["HTA fails here: the traces have no steps (ProfilerStep#N)"])
    if not valid:
        raise ViewError(f"HTA loads none of the steps {sorted(wanted or ())}, only {sorted(available)}")
    spans = [
        (part.first[at], part.last[at], part.iterations[at])
        for _, part in partials
        for at in np.flatnonzero(np.isin(part.iterations, list(valid))).tolist()
    ]
    begin = min((low for low, _, _ in spans), default=0.0)
    mean = (max((high for _, high, _ in spans), default=0.0) - begin) / max(1, len({number for _, _, number in spans}))
    last = _last_kernels(partials, valid, begin, mean)
    spread: dict[tuple[int, str], list[float]] = {}
    for (stream, name, _), of_ranks in last.items():
        if len(of_ranks) > 1:
            spread.setdefault((stream, name), []).append(float(np.std([d for _, d in of_ranks.values()], ddof=1)))
    if not spread:
        return stragglers.answer(
            [],
            [
                "HTA finds no stragglers here: it looks for kernels called ncclKernel… that take at least 1 % of an "
                "iteration on several ranks"
            ],
        )
    chosen = max(sorted(spread), key=lambda key: float(np.mean(spread[key])))
    times = {number: of_ranks for (stream, name, number), of_ranks in last.items() if (stream, name) == chosen}
    late = dict.fromkeys(sorted({rank for of_ranks in times.values() for rank in of_ranks}), 0)
    for of_ranks in times.values():
        threshold = sorted((start for start, _ in of_ranks.values()), reverse=True)[min(candidates, len(of_ranks)) - 1]
        for rank, (start, _) in of_ranks.items():
            late[rank] += start >= threshold
    ordered = sorted(late, key=lambda rank: -late[rank])
    values: dict[str, Any] = {
        "rank": ordered,
        "candidate": [place < candidates for place in range(len(ordered))],
        "late_steps": [late[rank] for rank in ordered],
        "late_collectives": [None] * len(ordered),
        "caused_us": [None] * len(ordered),
        "mean_late_us": [None] * len(ordered),
        "uncertainty_us": [None] * len(ordered),
    }
    return Answer(values, [f"based on the starts of {chosen[1]} on stream {chosen[0]}"])


@stragglers.variant(Compat.HTA, reduce=_rows)
def hta_stragglers(context: Context) -> HtaRank:
    """compat=hta: the figures of get_potential_stragglers.

    HTA evaluates kernels whose names begin with ncclKernel (not ncclDevKernel) and that last at least 1 % of a mean
    iteration, and of these the last one per rank, stream, iteration and name. It keeps the stream and name whose
    durations differ most between ranks (standard deviation, averaged over iterations). In every iteration the
    num_candidates ranks that start this kernel last are late; the candidates are the ranks that are late in most
    iterations. HTA uses the clocks as they are, and leaves out the last step.
    """
    return context.get(_rank)
