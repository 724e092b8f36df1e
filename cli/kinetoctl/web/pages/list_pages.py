"""The lists: captures, or the traces that the command line names, and processes, of which one can be traced."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from http import HTTPStatus
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration, shortened
from kineto_trace.store.upload_manifest import FLEET_LABEL

from kinetoctl.base.value_types import parse_positive_duration_ns
from kinetoctl.client import enum_names
from kinetoctl.client.tracing import has_ended
from kinetoctl.errors import CliError, UsageProblem
from kinetoctl.options.trace_arguments import CAPTURE_ID
from kinetoctl.output import units
from kinetoctl.output.capture_progress import summed, time_text
from kinetoctl.output.capture_summary import target_lines
from kinetoctl.output.listing import PROCESSES, ListColumn, commands, shown_columns, stored, traceable
from kinetoctl.output.units import NOTHING
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, WebSession, redirect
from kinetoctl.web.pages.page_context import (
    REFRESH_S,
    HostsFound,
    OfHost,
    PageContext,
    hosts_answer,
    json_answer,
    render,
    with_help,
)
from kinetoctl.web.pages.stacks_page import named_process, wholes

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


MAX_CAPTURES = 100
MAX_HOSTS = 300  # characters of their names
_MIXED = "PARTIAL"
_ELSEWHERE = ("analyse", "open with", "snapshot in")  # what is printed for terminals alone


def captures_page(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """The list of captures, newest first."""
    rows: list[dict[str, Any]] = []
    found, failure = None, ""
    if not context.files:
        try:
            found = context.daemons.captures(MAX_CAPTURES)
            rows = by_process(row_of(capture_id, parts) for capture_id, parts in listed(found.items)[:MAX_CAPTURES])
        except CliError as exc:
            failure = with_help(exc)
    return render(
        "captures.html",
        context,
        request,
        session,
        captures=rows,
        several=context.daemons.several,
        unanswered=found.unanswered if found else (),
        most_of_one=found.most_of_one if found else 0,
        failure=failure,
        traces=context.library.listed(),
        notes=context.library.notes(),
        looked=context.library.looked,
        command=context.command("report", *context.library.arguments)
        if context.files
        else context.command("captures", "list"),
        headers={} if context.library.looked else {"Refresh": REFRESH_S},
    )


def traces_json(context: PageContext, _request: WebRequest, _session: WebSession) -> WebAnswer:
    """The traces that the command line names, as JSON. Raises WebError if it names none."""
    if not context.files:
        raise WebError(HTTPStatus.NOT_FOUND, "this server shows captures, which are at /captures.json")
    return json_answer([asdict(trace) for trace in context.library.listed()])


def captures_json(context: PageContext, _request: WebRequest, _session: WebSession) -> WebAnswer:
    """The same as JSON: the messages of the daemons. Raises the client's errors."""
    found = context.daemons.captures(MAX_CAPTURES)
    newest = [part for _, parts in listed(found.items)[:MAX_CAPTURES] for part in parts]
    return hosts_answer(found._replace(items=newest), "captures", several=context.daemons.several)


def listed(found: "Sequence[OfHost[pb.Capture]]") -> "list[tuple[str, list[OfHost[pb.Capture]]]]":
    """The captures, newest first, each with its id and its parts: those of one capture of many hosts are together."""
    parts: dict[str, list[OfHost[pb.Capture]]] = {}
    for each in sorted(found, key=lambda each: (-each.item.created_ns, each.place.host)):
        fleet = each.item.spec.labels.get(FLEET_LABEL, "") if each.place.host else ""
        parts.setdefault(fleet if CAPTURE_ID.fullmatch(fleet) else each.item.id, []).append(each)
    return list(parts.items())


def status_of(parts: "Sequence[OfHost[pb.Capture]]") -> str:
    """The status of a capture: that of all its parts, or of one that has not ended."""
    running_parts = [part.item for part in parts if not has_ended(part.item)]
    found = {enum_names.capture_status(each.status) for each in running_parts or [part.item for part in parts]}
    return found.pop() if len(found) == 1 else _MIXED


def row_of(capture_id: str, parts: "Sequence[OfHost[pb.Capture]]") -> dict[str, Any]:
    """A capture in the list. Each host knows where its own part's time went: the first one that does is named."""
    first = parts[0].item
    told = next((part for part in parts if part.item.answer.cause), parts[0])
    cause, verdict = told.item.answer.cause, told.item.answer.verdict
    if len(parts) > 1:
        host = told.place.host
        cause = cause and cause + (f", on {host}" if cause.endswith(")") else f" (on {host})")
        verdict = verdict and f"On {host}: {verdict}"
    targets = [target for part in parts for target in part.item.targets]
    labels = dict(first.spec.labels)
    if capture_id != first.id:
        del labels[FLEET_LABEL]
    return {
        "id": capture_id,
        "hosts": list(dict.fromkeys(part.place.host for part in parts)),
        "status": status_of(parts),
        "age": units.age(first.created_ns),
        "age_s": max(0, time.time_ns() - first.created_ns) // 10**9,
        "pids": [target.pid for target in targets],
        "cause": cause,
        "verdict": verdict,
        "again": False,
        "process": (first.host, *((each.pid, each.start_time_ns) for each in first.targets)),
        "command": next((command for part in parts for command in commands(part.item)), ""),
        "job": next((target.process.job_id for target in targets if target.process.job_id), ""),
        "bytes": sum(stored(part.item) for part in parts),
        "labels": ", ".join(f"{key}={labels[key]}" for key in sorted(labels)),
    }


def by_process(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, those of the same processes below the newest of them, which are `again` for all others."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        group = groups.setdefault(row.pop("process"), [])
        group.append(row | {"again": bool(group)})
    return [row for group in groups.values() for row in group]


def facts(parts: "Sequence[OfHost[pb.Capture]]") -> list[tuple[str, str]]:
    """Figures of the whole capture."""
    captures = [part.item for part in parts]
    hosts = list(dict.fromkeys(part.place.host or part.item.host for part in parts))
    made_ns = min(each.created_ns for each in captures)
    found = [
        ("host" if len(hosts) == 1 else "hosts", shortened(", ".join(hosts), MAX_HOSTS)),
        ("created", units.moment(made_ns)),
        ("processes", units.count(sum(len(each.targets) for each in captures))),
        ("size", units.size(sum(map(stored, captures)))),
    ]
    if all(each.ended_ns for each in captures):
        found.append(("took", format_duration(max(each.ended_ns for each in captures) - made_ns)))
    labels = captures[0].spec.labels
    found += [(f"label {key}", labels[key]) for key in sorted(labels)]
    return found + ([("pinned", "yes")] if any(each.pinned for each in captures) else [])


def target_facts(parts: "Sequence[OfHost[pb.Capture]]") -> list[dict[str, Any]]:
    """Of each process: how far it is or its verdict, and the lines that `kinetoctl captures show` prints of it."""
    now_ns = time.time_ns()
    return [
        {
            "progress": _progress(target, part.item.spec, now_ns),
            "name": " ".join(filter(None, (part.place.host, enum_names.target(target)))),
            "command": " ".join(target.process.command),
            "state": _state(target),
            "lines": _grouped(target_lines(part.item, target, {}, remedies=True)),
        }
        for part in parts
        for target in part.item.targets
    ]


def running(parts: "Sequence[OfHost[pb.Capture]]") -> bool:
    """Whether a part of a capture has not ended."""
    return not all(has_ended(part.item) for part in parts)


def has_trace(parts: "Sequence[OfHost[pb.Capture]]") -> bool:
    """Whether there is anything to analyse."""
    return any(target.files for part in parts for target in part.item.targets)


def all_done(parts: "Sequence[OfHost[pb.Capture]]") -> bool:
    """Whether every process has a whole trace."""
    return all(target.verdict == pb.VERDICT_DONE for part in parts for target in part.item.targets)


def _progress(target: "pb.Target", spec: "pb.CaptureSpec", now_ns: int) -> str:
    if target.state == pb.TARGET_STATE_ENDED:
        return ""
    so_far = time_text(target, spec, max(0, now_ns - target.state_since_ns) / 1e9) if target.state_since_ns else ""
    return ", ".join(filter(None, (so_far, *summed([target]))))


def _state(target: "pb.Target") -> str:
    state = enum_names.target_state(target.state)
    return enum_names.verdict(target.verdict) if state == "ENDED" else state


def _grouped(lines: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """The lines by label; a line without one belongs to the label above it."""
    labelled, label = [], ""
    for name, text in lines:
        label = name or label
        if label not in _ELSEWHERE:
            labelled.append((label, text))
    return [(key, [text for _, text in group]) for key, group in groupby(labelled, key=lambda line: line[0])]


# The processes of the hosts, and the form that starts a capture of one of them.
DEFAULT_DURATION = "5s"

# Columns with figures: by what they are sorted.
FIGURES: Mapping[str, Callable[[pb.Process], float | None]] = {
    "PID": lambda process: process.pid,
    "RANK": lambda process: process.rank if process.HasField("rank") else None,
    "AGE": lambda process: -process.start_time_ns,
    "ITER": lambda process: process.iterations or None,
    "ITER/S": lambda process: 1e9 / process.iteration_ns if process.iteration_ns > 0 else None,
    "PARENT": lambda process: process.parent_pid or None,
}
LONG, TRACE, UNTRACEABLE = "COMMAND", "TRACE", "no"


class Cell(NamedTuple):
    """One cell of the list. kind: number, long, status or empty; value: the sort key."""

    text: str
    kind: str = ""
    value: float | None = None


class LiveRow(NamedTuple):
    """A process in the list. process: what pages and forms call it; can: whether it can be traced."""

    host: str
    process: str
    pid: int
    can: bool
    cells: list[Cell]


def live_page(context: PageContext, request: WebRequest, session: WebSession, problem: str = "") -> WebAnswer:
    """What `kinetoctl ps` lists; with all=1 what it lists with --all. problem: with the duration that was typed."""
    every, failure = _every(request), ""
    found: HostsFound[pb.Process] = HostsFound([])
    try:
        found = context.daemons.processes(every=every)
    except CliError as exc:
        failure = with_help(exc)
    shown = shown_columns([each.item for each in found.items], PROCESSES, wide=False)
    answer = render(
        "live.html",
        context,
        request,
        session,
        heads=[(column.title, column.title in FIGURES) for column, _ in shown],
        rows=[
            LiveRow(
                host=each.place.host,
                process=_process(each, several=context.daemons.several),
                pid=each.item.pid,
                can=not traceable(each.item).startswith(UNTRACEABLE),
                cells=_cells(each.item, shown, number),
            )
            for number, each in enumerate(found.items)
        ],
        several=context.daemons.several,
        wholes=wholes([each.item for each in found.items]),
        unanswered=found.unanswered,
        every=every,
        failure=failure,
        duration=request.first("duration", DEFAULT_DURATION),
        problem=problem,
        command=context.command("ps", *(["--all"] if every else [])),
        json="/live.json" + ("?all=1" if every else ""),
    )
    return replace(answer, status=HTTPStatus.BAD_REQUEST) if problem else answer


def live_json(context: PageContext, request: WebRequest, _session: WebSession) -> WebAnswer:
    """The same as JSON. Raises the client's errors."""
    found = context.daemons.processes(every=_every(request))
    return hosts_answer(found, "processes", several=context.daemons.several)


def trace_form(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """Starts a capture and shows it, or the form again. Raises WebError, and the client's errors."""
    try:
        duration_ns = parse_positive_duration_ns(request.first("duration"))
    except ValueError:
        return live_page(context, request, session, "Use a duration such as 500ms, 5s or 1min")
    try:
        selector, at = named_process(request.first("pid"))
    except ValueError as exc:
        raise WebError(HTTPStatus.BAD_REQUEST, str(exc)) from exc
    spec = pb.CaptureSpec(selector=selector, duration_ns=duration_ns)
    try:
        return redirect(f"/c/{context.daemons.create(at, spec).id}")
    except UsageProblem as exc:
        field, _, problem = str(exc).partition("spec.duration_ns: ")
        if field or not problem:
            raise
        return live_page(context, request, session, problem)


def _every(request: WebRequest) -> bool:
    return request.first("all") == "1"


def _process(held: OfHost[pb.Process], *, several: bool) -> str:
    """What the form calls a process: its pid, and the daemon if there are several."""
    return f"{held.item.pid}@{held.place.address}" if several else str(held.item.pid)


def _cells(process: pb.Process, shown: Sequence[tuple[ListColumn, list[str]]], place: int) -> list[Cell]:
    """A row. place: of the process in the cells of each column."""
    return [_cell(process, column.title, cells[place]) for column, cells in shown]


def _cell(process: pb.Process, title: str, text: str) -> Cell:
    if title in FIGURES:
        return Cell("" if text == NOTHING else text, "number", FIGURES[title](process))
    if title == TRACE:
        return Cell(text, "prose" if text.startswith(UNTRACEABLE) else "status")
    return Cell("" if text == NOTHING else text, "long" if title == LONG else "")
