"""The processes of the host, and the form that starts a capture of one of them."""

import uuid
from http import HTTPStatus

from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.base.value_types import parse_positive_duration_ns
from kinetoctl.client.selection import Selection
from kinetoctl.errors import CliError
from kinetoctl.output.json_yaml import plain
from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, redirect
from kinetoctl.web.pages.capture_facts import process_row
from kinetoctl.web.pages.json_answers import json_answer
from kinetoctl.web.pages.page_context import PageContext, render, with_help

DEFAULT_DURATION = "5s"


def live_page(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """The processes that can be traced."""
    processes, failure = [], ""
    try:
        processes = [process_row(process) for process in _processes(context)]
    except CliError as exc:
        failure = with_help(exc)
    return render(
        "live.html",
        context,
        request,
        session,
        processes=processes,
        failure=failure,
        duration=request.first("duration", DEFAULT_DURATION),
        command=context.command("ps", "--all"),
    )


def live_json(context: PageContext, _request: WebRequest, _session: WebSession) -> WebAnswer:
    """The same as JSON. Raises the client's errors."""
    return json_answer([plain(process) for process in _processes(context)])


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


def _processes(context: PageContext) -> list[pb.Process]:
    with context.client() as client:
        found = client.processes(Selection(helpers=True).to_proto(), include_without_agent=True)
    return sorted(found, key=_place)


def _place(process: pb.Process) -> tuple[bool, bool, int]:
    """First those that have an agent, then those that use a GPU, then all others."""
    return process.agent_state == pb.AGENT_STATE_NONE, not process.gpus, process.pid
