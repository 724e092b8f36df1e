"""Where the time of the steps goes, for one rank and for all: views of the time causes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.gpu_time_views import NO_GPU
from kineto_trace.analysis.host_time.moment_classes import MomentClass, moment_classes
from kineto_trace.analysis.host_time.step_phase_views import OTHER, STEP_PHASES, step_phases
from kineto_trace.analysis.host_time.user_calls import commonest_place, host_steps, moments
from kineto_trace.analysis.idle_gaps import MeasuredSteps, idle_gaps, idle_window, measured_steps
from kineto_trace.analysis.idle_pieces import IDLE_CAUSES, PAGEABLE, REASONS, idle_pieces
from kineto_trace.arrays.intervals import Union, active_sets, cut, intersection, union
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Ints, UInts8
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.kernel_traits.precisions import uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import KERNEL, MEMCPY, gpu
from kineto_trace.structure.library_calls import code_place
from kineto_trace.structure.nesting import unrecorded
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

GPU_CAUSES = (
    "matrix_products", "elementwise", "other_kernels", "communication", "pageable_copies", "pinned_copies",
    "device_copies", "other_copies", "fills", "unrecorded",
)  # fmt: skip
UNRECORDED = GPU_CAUSES.index("unrecorded")
CAUSES = (*GPU_CAUSES, *IDLE_CAUSES)
TITLES: Mapping[str, str] = {
    "matrix_products": "GPU computes: matrix products, convolutions, attention",
    "elementwise": "GPU computes: elementwise kernels",
    "other_kernels": "GPU computes: other kernels",
    "communication": "communication on the GPU that no computation hides (transfer, or waiting for other ranks)",
    "pageable_copies": "copies from or to pageable memory, while no kernel runs",
    "pinned_copies": "copies from or to pinned memory, while no kernel runs",
    "device_copies": "copies on or between GPUs, while no kernel runs",
    "other_copies": "copies whose type of memory is not in the trace, while no kernel runs",
    "fills": "memory fills, while nothing else runs",
    "unrecorded": "time in which the GPU's activities were not recorded",
    "data_loading": "GPU idle: waiting for the next batch, or building it",
    "host_communication": "GPU idle: the host waits in a collective",
    "allocation": "GPU idle: the runtime allocates or releases memory",
    "synchronisation": "GPU idle: the host waited for the GPU before it launched new work",
    "operators": "GPU idle: the host runs operators and launches work",
    "python": "GPU idle: the host runs Python code outside any operator",
    "gil": "GPU idle: the host waits for Python's global lock (GIL)",
    "blocked": "GPU idle: the host is off the CPU in Python code (sleep, lock or I/O)",
    "lock": "GPU idle: the host waits for a lock, a queue or another thread",
    "sleep": "GPU idle: the host sleeps",
    "input_output": "GPU idle: the host reads, writes or waits for a file, socket or process",
    "garbage_collection": "GPU idle: the host collects garbage",
    "logging": "GPU idle: the host prints or logs",
    "staging": "GPU idle: the host copies from or to pageable memory, or frees that memory",
    "annotation": "GPU idle: the host is in an annotated range, outside any operator",
    "launch_latency": "GPU idle: from the launch call to the start of the launched work",
    "kernel_gaps": "GPU idle: short gaps between activities that were launched ahead of time",
    "queued": "GPU idle: launched work waits in its queue for an event, another stream or the launch itself",
    "unknown": "GPU idle: the trace does not show why",
}
_MATRIX = re.compile(
    r"(?<!fb)gemm|gemv|Gemm|wgrad|dgrad|fprop|convolve|conv\d?d|Conv(?!ert)|winograd|implicit|fft2d|[shi]cudnn_"
    r"|cudnn.{0,500}(?:ampere|volta|hopper)|attention|[fF]mha|flash_|(?:attn|sage)_[fb]wd|cutlass|nvjet|Cijk_|dot_kernel|splitK"
    r"|matmul|^bmm_|gen\d*_conv|_convolution|sdpa|xetla"
)  # excludes FBGEMM's kernels for embeddings, which have its name
_NO_MATRIX = re.compile(
    r"[eE]lementwise|conv_reorder|batch_?norm|layer_?norm|compute\w{0,100}Offsets|nchwToNhwc|nhwcToNchw|softmax|pool|[Ii]m2(?:d2)?[Cc]ol"
    r"|reshape_and_cache|finalize_matmul|triton_(?:poi|per|red)_"
)
ELEMENTWISE = re.compile(
    r"elementwise_kernel|CatArrayBatchedCopy|index_elementwise|multi_tensor_apply|triton_poi_"
    r"|xpu::\w*(?:Elementwise\w*Kernel|MultiTensorApply)"
)
_PINNED = re.compile(r"Pinned", re.IGNORECASE)
_ON_DEVICE = re.compile(r"DtoD|PtoP|Device -> Device|DeviceToDevice|PeerToPeer", re.IGNORECASE)
_FIRST = np.array([(mask & -mask).bit_length() - 1 for mask in range(1 << len(GPU_CAUSES))])  # lowest bit of a mask
OTHERS = "others"
OF_THE_HOST = f"{NO_GPU}: these are the parts of the host's steps"
NOTED = 0.01  # A note reports unknown time from this share on.
HOST_TITLES: Mapping[str, str] = {
    "host_loading": "waiting for the next batch, or building it",
    "host_forward": "forward pass, on the CPU",
    "host_backward": "backward pass, on the CPU",
    "host_optimizer": "optimizer step and zero_grad, on the CPU",
    "host_other": "everything else: your own Python code, or waits in it",
}
HOST_CAUSES = tuple(HOST_TITLES)
_CLASS = {  # How each cause is classified.
    "host_loading": MomentClass.LOADING,
    "host_forward": MomentClass.FORWARD,
    "host_backward": MomentClass.BACKWARD,
    "host_optimizer": MomentClass.OPTIMIZER,
    "host_other": MomentClass.OTHER,
}
_PHASES = (*STEP_PHASES, OTHER)
_TITLES = {**TITLES, **HOST_TITLES}


# Where every nanosecond of the steps goes: for each GPU one cause at each moment, so that they sum to the whole.
#
# Theory of operation
# While the GPU has work, the most useful kind of it counts (GPU_CAUSES, in this order): communication and copies thus
# count only where no computation hides them. On one rank a collective's waiting for other ranks cannot be separated
# from its transfer. Time without a recording of the GPU's activities is unknown. While the GPU is idle, the activity
# of the host counts (idle_pieces.py).
#
# Both together tile the window of each GPU without holes or overlaps. The steps are cut out of it.
#
# The ranges over which figures are averaged: complete steps that show the pace, or the window without warm-up.
# structure/step_pace.py has the rules by which first steps are left out.
#
# A trace without complete steps has one range, the whole window. There, a gap of a GPU (the time before its first
# activity too) of at least 100 ms that takes more than a quarter of the window, in the first half of the GPU's
# activities and longer than all gaps after these together, is a one-time event, such as initialising CUDA or loading
# modules: the window up to its end is warm-up, and the rest is searched in the same way.


class Detail(NamedTuple):
    """A part of a cause.

    name: number into Trace.strings, or NOTHING.
    line: executing line of a Python function, or 0.
    frame: row of python_function, or NOTHING.
    reason: number into REASONS of idle_pieces.
    """

    device: int
    cause: int
    name: int
    line: int
    frame: int
    reason: int
    time_ns: int
    pieces: int


class _Tiles(NamedTuple):
    """Causes of a GPU's time, without holes: from each start to the next one. piece: place in IdlePieces."""

    start: Ints
    end: Ints
    cause: Ints
    piece: Ints


@dataclass(frozen=True, slots=True)
class TimeCauses:
    """time_ns: [device, cause, step], by the places in `devices`, CAUSES and the ranges of `steps`.

    details: parts of the time of measured steps, largest first; without names of kernels.
    """

    steps: MeasuredSteps
    devices: tuple[int, ...]
    time_ns: Ints
    details: tuple[Detail, ...]

    def measured(self) -> Ints:
        """Returns the time of the measured steps: [device, cause], in ns."""
        found: Ints = self.time_ns[:, :, ~self.steps.left_out].sum(axis=2)
        return found

    def total(self, *causes: str) -> int:
        """Returns the time of these causes in the measured steps, as the mean of the GPUs, in ns."""
        chosen = [CAUSES.index(cause) for cause in causes]
        return int(self.measured()[:, chosen].sum()) // max(len(self.devices), 1)


def gpu_causes(context: Context) -> UInts8:
    """Returns for each GPU activity the number of its cause in GPU_CAUSES."""
    activity, strings = context.get(gpu), context.trace.strings
    matrix = (matches(strings, _MATRIX) & ~matches(strings, _NO_MATRIX)) | context.get(uses_tensor_cores)
    pointwise = matches(strings, ELEMENTWISE)
    pageable, pinned, on_device = (matches(strings, pattern) for pattern in (PAGEABLE, _PINNED, _ON_DEVICE))
    of_kernel = np.select([pointwise, matrix], [1, 0], 2)
    of_copy = np.select([pageable, pinned, on_device], [4, 5, 6], 7)
    name, kind = activity.name, activity.kind
    found = np.select([activity.communication, kind == KERNEL, kind == MEMCPY], [3, of_kernel[name], of_copy[name]], 8)
    return found.astype(np.uint8)


def _tiles(context: Context, device: int) -> _Tiles:
    activity, cause = context.get(gpu), context.get(gpu_causes)
    low, high = context.get(idle_window)
    own = (activity.device == device) & (activity.start < high) & (activity.end > low)
    start, end = np.maximum(activity.start[own], low), np.minimum(activity.end[own], high)
    ran = [union(start[cause[own] == n], end[cause[own] == n]) for n in range(UNRECORDED)]
    lost = unrecorded(context.trace, GPU_TABLES)
    found = active_sets([*ran, intersection(lost, Union(np.array([low]), np.array([high])))])
    length = np.diff(found.time, append=found.time[-1:])
    busy = (found.mask != 0) & (length > 0)
    pieces, gaps = context.get(idle_pieces), context.get(idle_gaps)
    idle = np.flatnonzero(gaps.device[pieces.gap] == device)
    starts = np.concatenate([found.time[busy], pieces.start[idle]])
    order = np.argsort(starts, kind="stable")
    return _Tiles(
        starts[order],
        np.concatenate([(found.time + length)[busy], pieces.end[idle]])[order],
        np.concatenate([_FIRST[found.mask[busy]], pieces.cause[idle] + len(GPU_CAUSES)])[order],
        np.concatenate([np.full(np.count_nonzero(busy), NOTHING), idle])[order],
    )


def time_causes(context: Context) -> TimeCauses:
    """Returns the time of every cause in every step of every GPU."""
    ranges = context.get(measured_steps)
    devices = tuple(context.get(idle_gaps).windows)
    time = np.zeros((len(devices), len(CAUSES), len(ranges.start)), np.int64)
    details: list[Detail] = []
    for place, device in enumerate(devices):
        tiles = _tiles(context, device)
        parts = cut(ranges.start, ranges.end, tiles.start)
        tile = np.searchsorted(tiles.start, parts.start, side="right") - 1
        cause, length = tiles.cause[tile], parts.end - parts.start
        np.add.at(time[place], (cause, parts.owner), length)
        measured = ~ranges.left_out[parts.owner]
        details += _details(context, device, cause[measured], tiles.piece[tile][measured], length[measured])
    details.sort(key=lambda detail: -detail.time_ns)
    return TimeCauses(ranges, devices, time, tuple(details))


def _details(context: Context, device: int, cause: Ints, piece: Ints, length: Ints) -> list[Detail]:
    idle = piece >= 0
    cause, piece, length = cause[idle], piece[idle], length[idle]
    if not len(piece):
        return []
    pieces, lines = context.get(idle_pieces), context.trace.table("python_function")["line"]
    name, frame, reason = pieces.name[piece], pieces.frame[piece], pieces.reason[piece].astype(np.int64)
    line = np.append(lines, 0)[frame].astype(np.int64)
    found = group([cause, name, line, reason])
    time, count = found.sums(length), np.bincount(found.number, minlength=len(found))
    first = found.first
    columns = (cause[first], name[first], line[first], frame[first], reason[first], time, count)
    return [Detail(device, *values) for values in zip(*(column.tolist() for column in columns), strict=True)]


class HostCause(NamedTuple):
    """One cause on the host.

    total_ns: sum over all steps, in ns.
    what: function and line of the program with most samples of the cause; None if unknown.
    """

    cause: str
    total_ns: int
    what: str | None


class HostCauses(NamedTuple):
    """The causes on the host.

    causes: those that take time, largest first; empty if the trace has GPU activity or no data about the host.
    steps: number of completely recorded steps; 0 if there are none, and the whole trace counts.
    """

    causes: tuple[HostCause, ...]
    steps: int


class _Row(NamedTuple):
    """One row of the view."""

    device: int | None
    share_pct: float
    step_us: float | None
    meaning: str
    what: str | None
    part_us: float | None
    total_us: float
    cause: str


class RankCauses(NamedTuple):
    """What one rank contributes.

    time_ns: by cause, summed over its GPUs.
    gpu_steps: number of measured steps times number of GPUs.
    what: by cause, what has most of its idle time, and how much (ns).
    note: about warm-up steps; None if there are none.
    on_host: whether the rank has no GPU activity, so that these are causes on the host.
    """

    time_ns: Mapping[str, int]
    gpu_steps: int
    what: Mapping[str, tuple[str, int]]
    note: str | None
    on_host: bool = False

    def share(self, causes: Sequence[str]) -> float:
        """Returns the share of these causes in the rank's time, in %."""
        return 100 * sum(self.time_ns.get(cause, 0) for cause in causes) / (sum(self.time_ns.values()) or 1)


def host_causes(context: Context) -> HostCauses:
    """Returns the causes of a trace without GPU activity."""
    if len(context.get(gpu)):
        return HostCauses((), 0)
    window, found = context.get(host_steps), context.get(moments)
    if not window.total_ns or not (len(context.trace.table("cpu_op")) or len(found)):
        return HostCauses((), 0)
    kind = context.get(moment_classes).kind
    causes = []
    for cause, total in zip(HOST_CAUSES, context.get(step_phases).sum(axis=1).tolist(), strict=True):
        rows = np.flatnonzero(kind == _CLASS[cause])
        place = commonest_place(context, rows, found.weight[rows]) if len(rows) else None
        causes.append(HostCause(cause, total, str(place) if place is not None else None))
    ordered = sorted((cause for cause in causes if cause.total_ns), key=lambda cause: -cause.total_ns)
    return HostCauses(tuple(ordered), len(window.start) if window.whole else 0)


@view(
    "time_causes",
    columns(
        ("device", "int", "", "GPU; missing in a trace without GPU activity"),
        ("share_pct", "float", "%", "share of the time of all measured steps (or of the trace)"),
        ("step_us", "float", "us", "mean per measured step; missing without steps"),
        ("meaning", "text", "", "what the GPU did, or the host while the GPU was idle"),
        ("what", "text", "", "operator, call, annotation or function that took the most time, or why it is unknown"),
        ("part_us", "float", "us", "time of `what`; missing without GPU activity"),
        ("total_us", "float", "us", "sum over all measured steps"),
        ("cause", "text", "", f"short name of the cause: {', '.join((*CAUSES, *HOST_CAUSES))}, or {OTHERS}"),
    ),
)
def time_causes_view(context: Context, *, detail: bool = False, warm_up: bool = False, least: float = 0.0) -> Answer:
    """Where every nanosecond of the steps goes: the causes of each GPU sum to 100 %.

    While a GPU has work, the kind of work counts. Computation comes first, so communication and copies only count where
    no computation hides them. While the GPU is idle (also before its first and after its last activity in a step), what
    the host did counts: it waited for data, for the GPU, in a collective or for memory; it was in an operator or a
    launch call; it ran a Python function, slept, logged, or waited for a lock, the GIL or a file; or the launched work
    waited in its queue. Time that the trace does not explain is called unknown, with the reason. The first steps are
    left out if they do not show the pace of the program (warm-up, or the host ran ahead of the GPU).
    kineto_trace.analysis.idle_pieces describes the rules in full. In a trace without GPU activity, each moment of the
    host's steps belongs to one part, as in view step_phases: loading, forward, backward, optimizer, or the program's
    own code.

    Options:
    - detail: one row for each operator, function and so on in the GPU's idle time.
    - warm_up: also count the first steps that are otherwise left out.
    - least: causes with less than this share (in %) are merged into one row.
    """
    found = context.get(time_causes)
    host = context.get(host_causes)
    parts = [
        list(_rows(context, found, place, device, detail=detail, warm_up=warm_up))
        for place, device in enumerate(found.devices)
    ]
    rows: list[_Row] = []
    for own in parts or [list(_host_rows(host))]:
        rows += [row for row in own if row.share_pct >= least]
        rows += _together([row for row in own if row.share_pct < least])
    notes = [] if found.devices else [OF_THE_HOST if host.causes else NO_GPU]
    note = found.steps.note()
    if note is not None and not warm_up and not host.causes:
        notes.append(note)
    notes += _unknown(found)
    return time_causes_view.answer(rows, notes)


def _rows(
    context: Context, found: TimeCauses, place: int, device: int, *, detail: bool, warm_up: bool
) -> Iterator[_Row]:
    """Yields the rows of one GPU, by their time."""
    time = (found.time_ns[place].sum(axis=1) if warm_up else found.measured()[place]).tolist()
    whole = sum(time) or 1
    count = len(found.steps.number) if warm_up and found.steps.steps else found.steps.steps
    own = [entry for entry in found.details if entry.device == device] if not warm_up else []

    def row(number: int, ns: int, top: Detail | None) -> _Row:
        return _Row(
            device=device,
            share_pct=100 * ns / whole,
            step_us=ns / 1e3 / count if count else None,
            meaning=TITLES[CAUSES[number]],
            what=detail_text(context, top) if top else None,
            part_us=top.time_ns / 1e3 if top else None,
            total_us=ns / 1e3,
            cause=CAUSES[number],
        )

    for number in sorted(range(len(CAUSES)), key=lambda each: -time[each]):
        parts = [entry for entry in own if entry.cause == number]
        if time[number] and detail and parts:
            yield from (row(number, part.time_ns, part) for part in parts)
        elif time[number]:
            yield row(number, time[number], parts[0] if parts else None)


def _host_rows(host: HostCauses) -> Iterator[_Row]:
    whole = sum(cause.total_ns for cause in host.causes)
    for cause in host.causes:
        yield _Row(
            device=None,
            share_pct=100 * cause.total_ns / whole,
            step_us=cause.total_ns / 1e3 / host.steps if host.steps else None,
            meaning=HOST_TITLES[cause.cause],
            what=cause.what,
            part_us=None,
            total_us=cause.total_ns / 1e3,
            cause=cause.cause,
        )


def _together(rows: Sequence[_Row]) -> list[_Row]:
    """Merges several causes of a GPU into one row."""
    if not rows:
        return []
    share, total = sum(row.share_pct for row in rows), sum(row.total_us for row in rows)
    steps = [row.step_us for row in rows if row.step_us is not None]
    meaning = f"{len(rows)} other causes" if len(rows) > 1 else rows[0].meaning
    return [_Row(rows[0].device, share, sum(steps) if steps else None, meaning, None, None, total, OTHERS)]


def _unknown(found: TimeCauses) -> list[str]:
    """Returns notes on why time is unknown, and which option would show it."""
    number, whole = CAUSES.index("unknown"), found.steps.measured_ns * len(found.devices)
    time: dict[int, int] = {}
    for detail in found.details:
        if detail.cause == number:
            time[detail.reason] = time.get(detail.reason, 0) + detail.time_ns
    return [
        f"{100 * ns / whole:.1f} % of the time is unknown: {REASONS[reason]}"
        for reason, ns in sorted(time.items(), key=lambda entry: -entry[1])
        if ns >= NOTED * whole
    ]


def detail_text(context: Context, detail: Detail, *, short: bool = False) -> str | None:
    """Returns the detail as text: a Python function with file and line, a name, or why it is unknown.

    short: with the name of the file alone.
    """
    if detail.name < 0:
        return REASONS[detail.reason] or None
    name = context.trace.strings[detail.name]
    if detail.frame < 0:
        return name
    place = code_place(name, detail.line)
    return place.short if short else str(place)


def _over_ranks(partials: Sequence[tuple[int, RankCauses]], *, least: float = 0.0) -> Answer:
    """Adds up the causes of all ranks; if some ranks have GPU activity, of these only."""
    told = {rank: part for rank, part in partials if any(part.time_ns.values())}
    ranks = {rank: part for rank, part in told.items() if not part.on_host} or told
    time = {cause: sum(part.time_ns.get(cause, 0) for part in ranks.values()) for cause in _TITLES}
    ordered = sorted((cause for cause in _TITLES if time[cause]), key=lambda cause: -time[cause])
    small = [cause for cause in ordered if all(part.share([cause]) < least for part in ranks.values())]
    groups = [[cause] for cause in ordered if cause not in small] + ([small] if small else [])
    whole = sum(time.values())
    steps = sum(part.gpu_steps for part in ranks.values()) if all(part.gpu_steps for part in ranks.values()) else 0
    rows = []
    for causes in groups:
        total = sum(time[cause] for cause in causes)
        shares = {rank: part.share(causes) for rank, part in ranks.items()}
        low, high = min(shares, key=lambda rank: shares[rank]), max(shares, key=lambda rank: shares[rank])
        known = [part.what[causes[0]] for part in ranks.values() if causes[0] in part.what] if len(causes) == 1 else []
        rows.append(
            {
                "share_pct": 100 * total / whole,
                "step_us": total / 1e3 / steps if steps else None,
                "least_pct": shares[low],
                "least_rank": low,
                "most_pct": shares[high],
                "most_rank": high,
                "meaning": _TITLES[causes[0]] if len(causes) == 1 else f"{len(causes)} other causes",
                "what": max(known, key=lambda entry: entry[1])[0] if known else None,
                "total_us": total / 1e3,
                "cause": causes[0] if len(causes) == 1 else OTHERS,
            }
        )
    notes = [f"rank {rank}: {NO_GPU}" for rank, _ in partials if rank not in ranks]
    notes += [OF_THE_HOST] if any(part.on_host for part in ranks.values()) else []
    notes += [f"rank {rank}: {part.note}" for rank, part in ranks.items() if part.note]
    return rank_time_causes.answer(rows, notes)


@view(
    "rank_time_causes",
    columns(
        ("share_pct", "float", "%", "share of the time of all GPUs of all ranks, over their measured steps"),
        ("step_us", "float", "us", "mean per measured step of a GPU (or host); missing if a rank has no steps"),
        ("least_pct", "float", "%", "smallest share on any rank"),
        ("least_rank", "int", "", "that rank"),
        ("most_pct", "float", "%", "largest share on any rank"),
        ("most_rank", "int", "", "that rank"),
        ("meaning", "text", "", "what the GPU did, or the host while the GPU was idle"),
        ("what", "text", "", "operator, call, annotation or function that took the most time on a single rank"),
        ("total_us", "float", "us", "sum over the GPUs of all ranks"),
        ("cause", "text", "", f"short name of the cause, as in time_causes, or {OTHERS}"),
    ),
    reduce=_over_ranks,
)
def rank_time_causes(context: Context) -> RankCauses:
    """Where the time of all ranks' steps goes, by the causes of time_causes; they sum to 100 %.

    The shares of a rank cover all its GPUs. The ranks with the least and the most of a cause show whether it affects
    the whole job or only some ranks; time_causes has the causes of each rank and GPU. If no rank has GPU activity, the
    causes are the parts of the host's steps.

    Options:
    - least: causes with less than this share (in %) on every rank are merged into one row.
    """
    host = context.get(host_causes)
    if host.causes:
        shown = {each.cause: (each.what, each.total_ns) for each in host.causes if each.what is not None}
        return RankCauses({each.cause: each.total_ns for each in host.causes}, host.steps, shown, None, on_host=True)
    found = context.get(time_causes)
    measured = found.measured().sum(axis=0).tolist() if found.devices else [0] * len(CAUSES)
    most: dict[str, tuple[str, int]] = {}
    for detail in found.details:  # sorted by time, largest first
        text = detail_text(context, detail)
        if text is not None:
            most.setdefault(CAUSES[detail.cause], (text, detail.time_ns))
    times = {cause: ns for cause, ns in zip(CAUSES, measured, strict=True) if ns}
    return RankCauses(times, found.steps.steps * len(found.devices), most, found.steps.note())


assert tuple(f"host_{phase}" for phase in _PHASES) == HOST_CAUSES
