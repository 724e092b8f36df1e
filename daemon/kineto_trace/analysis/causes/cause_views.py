"""The view of what the steps' time went to, by named causes that sum to 100 %."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kineto_trace.analysis.causes.host_causes import HOST_CAUSES, HOST_TITLES, HostCauses, host_causes
from kineto_trace.analysis.causes.time_causes import CAUSES, TITLES, Detail, TimeCauses, time_causes
from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU
from kineto_trace.analysis.idle.idle_pieces import REASONS
from kineto_trace.model.context import Context
from kineto_trace.structure.python.code_places import code_place
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

OTHERS = "others"
OF_THE_HOST = f"{NO_GPU}: these are the parts of the host's steps"
NOTED = 0.01  # unknown time from this share on is told in a note


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
    """What every nanosecond of the steps went to: the causes of each GPU sum to 100 %.

    While a GPU has work, the kind of work counts: computation first, so that communication and copies are those that no
    computation hides. While it is idle, also before its first and after its last activity in a step, what the host did
    counts: it waited for data, for the GPU, in a collective or for memory; it was in an operator or a launching call;
    it ran a Python function, slept, logged, or waited for a lock, the GIL or a file; or the launched work waited in its
    queue. What the trace does not show is called unknown, with the reason. First steps that do not show the pace of the
    program (warm-up, and those in which the host ran ahead of the GPU) are left out.
    kineto_trace.analysis.idle.idle_pieces describes the rules in full. In a trace without GPU activity each moment of
    the host's steps is in one part, as in view step_phases: loading, forward, backward, optimizer, or the program's own
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


def _rows(
    context: Context, found: TimeCauses, place: int, device: int, *, detail: bool, warm_up: bool
) -> Iterator[_Row]:
    """The rows of one GPU, by their time."""
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
            what=what(context, top) if top else None,
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
    """One row for several causes of a GPU."""
    if not rows:
        return []
    share, total = sum(row.share_pct for row in rows), sum(row.total_us for row in rows)
    steps = [row.step_us for row in rows if row.step_us is not None]
    meaning = f"{len(rows)} other causes" if len(rows) > 1 else rows[0].meaning
    return [_Row(rows[0].device, share, sum(steps) if steps else None, meaning, None, None, total, OTHERS)]


def _unknown(found: TimeCauses) -> list[str]:
    """Says why time is unknown, and which option would show it."""
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


def what(context: Context, detail: Detail) -> str | None:
    """Returns what shows the cause as text: a Python function with file and line, a name, or why it is unknown."""
    if detail.name < 0:
        return REASONS[detail.reason] or None
    name = context.trace.strings[detail.name]
    return str(code_place(name, detail.line)) if detail.frame >= 0 else name
