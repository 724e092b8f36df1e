"""Where the time of the steps goes, for one rank and for all: views of the time causes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.gpu_time_views import NO_GPU
from kineto_trace.analysis.host_time.host_moments import host_steps, moments
from kineto_trace.analysis.host_time.moment_classes import MomentClass, moment_classes
from kineto_trace.analysis.host_time.step_phase_views import OTHER, STEP_PHASES, step_phases
from kineto_trace.analysis.host_time.user_calls import commonest_place
from kineto_trace.analysis.idle_pieces import REASONS
from kineto_trace.analysis.time_causes import CAUSES, TITLES, Detail, TimeCauses, time_causes
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.library_calls import code_place
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

OTHERS = "others"
OF_THE_HOST = f"{NO_GPU}: these are the parts of the host's steps"
NOTED = 0.01  # A note reports unknown time from this share on.
HOST_TITLES: Mapping[str, str] = {
    "host_loading": "the host waits for the next batch, or makes it",
    "host_forward": "the host computes forward: operators that have a backward",
    "host_backward": "the host computes backward: operators that autograd runs",
    "host_optimizer": "the host is in the optimizer's step and zero_grad",
    "host_other": "the host runs the program's own code, or waits in it: all else",
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
    return HostCauses(tuple(ordered), len(window.start) if window.told else 0)


@view(
    "time_causes",
    columns(
        ("device", "int", "", "GPU; missing in a trace without GPU activity"),
        ("share_pct", "float", "%", "share of the time of all measured steps (or of the trace)"),
        ("step_us", "float", "us", "mean per measured step; missing without steps"),
        ("meaning", "text", "", "what the GPU, or while it was idle the host, did"),
        ("what", "text", "", "operator, call, annotation or Python function with most of it; of unknown time, why"),
        ("part_us", "float", "us", "time of that; missing without GPU activity"),
        ("total_us", "float", "us", "sum over all measured steps"),
        ("cause", "text", "", f"short name of the cause: {', '.join((*CAUSES, *HOST_CAUSES))}, or {OTHERS}"),
    ),
)
def time_causes_view(context: Context, *, detail: bool = False, warm_up: bool = False, least: float = 0.0) -> Answer:
    """Where every nanosecond of the steps goes: the causes of each GPU sum to 100 %.

    While a GPU has work, the kind of work counts. Computation comes first, so communication and copies only count where
    no computation hides them. While the GPU is idle, also before its first and after its last activity in a step, the
    activity of the host counts: it waited for data, for the GPU, in a collective or for memory; it was in an operator
    or a launching call; it ran a Python function, slept, logged, or waited for a lock, the GIL or a file; or the
    launched work waited in its queue. What the trace does not show is called unknown, with the reason. The first steps
    are left out if they do not show the pace of the program (warm-up, or the host ran ahead of the GPU).
    kineto_trace.analysis.idle_pieces describes the rules in full. In a trace without GPU activity each moment of the
    host's steps is in one part, as in view step_phases: loading, forward, backward, optimizer, or the program's own
    code.

    Options:
    - detail: one row for each operator, function and so on of the GPU's idle time.
    - warm_up: count the first steps that are left out too.
    - least: causes with less than this share (in %) are one row together.
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
    return Answer({name: [getattr(row, name) for row in rows] for name in _Row._fields}, notes)


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


def detail_text(context: Context, detail: Detail) -> str | None:
    """Returns the detail as text: a Python function with file and line, a name, or why it is unknown."""
    if detail.name < 0:
        return REASONS[detail.reason] or None
    name = context.trace.strings[detail.name]
    return str(code_place(name, detail.line)) if detail.frame >= 0 else name


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
    rows: dict[str, list[object]] = {column.name: [] for column in rank_time_causes.columns}
    for group in groups:
        total = sum(time[cause] for cause in group)
        shares = {rank: part.share(group) for rank, part in ranks.items()}
        low, high = min(shares, key=lambda rank: shares[rank]), max(shares, key=lambda rank: shares[rank])
        known = [part.what[group[0]] for part in ranks.values() if group[0] in part.what] if len(group) == 1 else []
        row = {
            "share_pct": 100 * total / whole,
            "step_us": total / 1e3 / steps if steps else None,
            "least_pct": shares[low],
            "least_rank": low,
            "most_pct": shares[high],
            "most_rank": high,
            "meaning": _TITLES[group[0]] if len(group) == 1 else f"{len(group)} other causes",
            "what": max(known, key=lambda entry: entry[1])[0] if known else None,
            "total_us": total / 1e3,
            "cause": group[0] if len(group) == 1 else OTHERS,
        }
        for name, value in row.items():
            rows[name].append(value)
    notes = [f"rank {rank}: {NO_GPU}" for rank, _ in partials if rank not in ranks]
    notes += [OF_THE_HOST] if any(part.on_host for part in ranks.values()) else []
    return Answer(rows, [*notes, *(f"rank {rank}: {part.note}" for rank, part in ranks.items() if part.note)])


@view(
    "rank_time_causes",
    columns(
        ("share_pct", "float", "%", "share of the time of all GPUs of all ranks, over their measured steps"),
        ("step_us", "float", "us", "mean per measured step of a GPU (or host); missing if a rank has no steps"),
        ("least_pct", "float", "%", "share on the rank with least of it"),
        ("least_rank", "int", "", "that rank"),
        ("most_pct", "float", "%", "share on the rank with most of it"),
        ("most_rank", "int", "", "that rank"),
        ("meaning", "text", "", "what the GPU, or while it was idle the host, did"),
        ("what", "text", "", "operator, call, annotation or Python function with most of it on one rank"),
        ("total_us", "float", "us", "sum over the GPUs of all ranks"),
        ("cause", "text", "", f"short name of the cause, as in time_causes, or {OTHERS}"),
    ),
    reduce=_over_ranks,
)
def rank_time_causes(context: Context) -> RankCauses:
    """Where the time of all ranks' steps goes, by the causes of time_causes; they sum to 100 %.

    The shares of a rank are those over all its GPUs. The ranks with the least and the most of a cause show whether it
    affects the whole job or single ranks; time_causes has the causes of each rank and GPU. If no rank has GPU activity,
    the causes are the parts of the host's steps.

    Options:
    - least: causes with less than this share (in %) on every rank are one row together.
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
