"""The processes of the hosts, and the form that starts a capture of one of them."""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.base.value_types import parse_positive_duration_ns
from kinetoctl.client.selection import Selection
from kinetoctl.errors import CliError
from kinetoctl.output.listing import PROCESSES, ListColumn, shown_columns, traceable
from kinetoctl.output.units import NOTHING
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, WebSession, redirect
from kinetoctl.web.pages.page_context import HostsFound, OfHost, PageContext, hosts_answer, render, with_help

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
    """A process in the list. process: what the form calls it; can: whether it can be traced."""

    host: str
    process: str
    pid: int
    can: bool
    cells: list[Cell]


def live_page(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """What `kinetoctl ps` lists; with all=1 what it lists with --all."""
    every, failure = _every(request), ""
    found: HostsFound[pb.Process] = HostsFound([])
    try:
        found = context.daemons.processes(every=every)
    except CliError as exc:
        failure = with_help(exc)
    shown = shown_columns([each.item for each in found.items], PROCESSES, wide=False)
    return render(
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
        unanswered=found.unanswered,
        every=every,
        failure=failure,
        duration=request.first("duration", DEFAULT_DURATION),
        command=context.command("ps", *(["--all"] if every else [])),
        json="/live.json" + ("?all=1" if every else ""),
    )


def live_json(context: PageContext, request: WebRequest, _session: WebSession) -> WebAnswer:
    """The same as JSON. Raises the client's errors."""
    found = context.daemons.processes(every=_every(request))
    return hosts_answer(found, "processes", several=context.daemons.several)


def trace_form(context: PageContext, request: WebRequest, _session: WebSession) -> WebAnswer:
    """Starts a capture and shows it. Raises WebError, and the client's errors."""
    try:
        number, _, address = request.first("pid").partition("@")
        pid = int(number)
        duration_ns = parse_positive_duration_ns(request.first("duration"))
    except ValueError as exc:
        raise WebError(HTTPStatus.BAD_REQUEST, f"the form was not understood: {exc}") from exc
    spec = pb.CaptureSpec(selector=Selection(pids=(pid,)).to_proto(), duration_ns=duration_ns)
    return redirect(f"/c/{context.daemons.create(address, spec).id}")


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
