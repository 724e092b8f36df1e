"""The processes of the host, and the form that starts a capture of one of them."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.base.value_types import parse_positive_duration_ns
from kinetoctl.client.selection import Selection
from kinetoctl.errors import CliError
from kinetoctl.output.cell_values import NOTHING
from kinetoctl.output.json_yaml import plain
from kinetoctl.output.lists.listing import ListColumn, shown_columns
from kinetoctl.output.lists.process_table import PROCESSES, traceable
from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, redirect
from kinetoctl.web.pages.json_answers import json_answer
from kinetoctl.web.pages.page_context import PageContext, render, with_help

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
    """One cell of the list. kind: number, long, status or empty; value: by what the column is sorted."""

    text: str
    kind: str = ""
    value: float | None = None


def live_page(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """What `kinetoctl ps` lists; with all=1 what it lists with --all."""
    every, failure = _every(request), ""
    processes: list[pb.Process] = []
    try:
        processes = _processes(context, every)
    except CliError as exc:
        failure = with_help(exc)
    shown = shown_columns(processes, PROCESSES, wide=False)
    return render(
        "live.html",
        context,
        request,
        session,
        heads=[(column.title, column.title in FIGURES) for column, _ in shown],
        rows=[
            (process.pid, not traceable(process).startswith(UNTRACEABLE), _cells(process, shown, place))
            for place, process in enumerate(processes)
        ],
        every=every,
        failure=failure,
        duration=request.first("duration", DEFAULT_DURATION),
        command=context.command("ps", *(["--all"] if every else [])),
        json="/live.json" + ("?all=1" if every else ""),
    )


def live_json(context: PageContext, request: WebRequest, _session: WebSession) -> WebAnswer:
    """The same as JSON. Raises the client's errors."""
    return json_answer([plain(process) for process in _processes(context, _every(request))])


def trace_form(context: PageContext, request: WebRequest, _session: WebSession) -> WebAnswer:
    """Starts a capture and shows it. Raises WebError, and the client's errors."""
    try:
        pid = int(request.first("pid"))
        duration_ns = parse_positive_duration_ns(request.first("duration"))
    except ValueError as exc:
        raise WebError(HTTPStatus.BAD_REQUEST, f"the form was not understood: {exc}") from exc
    spec = pb.CaptureSpec(selector=Selection(pids=(pid,)).to_proto(), duration_ns=duration_ns)
    with context.client() as client:
        capture = client.create(spec, uuid.uuid4().hex)
    return redirect(f"/c/{capture.id}")


def _every(request: WebRequest) -> bool:
    return request.first("all") == "1"


def _processes(context: PageContext, every: bool) -> list[pb.Process]:
    with context.client() as client:
        return client.processes(Selection().to_proto(), include_without_agent=every, trainers=True)


def _cells(process: pb.Process, shown: Sequence[tuple[ListColumn, list[str]]], place: int) -> list[Cell]:
    """A row. place: of the process in the cells of each column."""
    return [_cell(process, column.title, cells[place]) for column, cells in shown]


def _cell(process: pb.Process, title: str, text: str) -> Cell:
    if title in FIGURES:
        return Cell("" if text == NOTHING else text, "number", FIGURES[title](process))
    if title == TRACE:
        return Cell(text, "prose" if text.startswith(UNTRACEABLE) else "status")
    return Cell("" if text == NOTHING else text, "long" if title == LONG else "")
