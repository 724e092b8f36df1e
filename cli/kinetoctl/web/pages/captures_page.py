"""The first page: the captures of the daemon, or the traces that the command line names."""

from dataclasses import asdict
from http import HTTPStatus

from kinetoctl.errors import CliError
from kinetoctl.output.json_yaml import plain
from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest
from kinetoctl.web.pages.capture_facts import row_of
from kinetoctl.web.pages.json_answers import json_answer
from kinetoctl.web.pages.page_context import REFRESH_S, PageContext, render, with_help

MAX_CAPTURES = 100


def captures_page(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """The list of captures, newest first."""
    captures, failure = [], ""
    if not context.files:
        try:
            with context.client() as client:
                captures = [row_of(capture) for capture in client.captures({}, limit=MAX_CAPTURES)]
        except CliError as exc:
            failure = with_help(exc)
    return render(
        "captures.html",
        context,
        request,
        session,
        captures=captures,
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
        raise WebError(HTTPStatus.NOT_FOUND, "this server shows captures: they are at /captures.json")
    return json_answer([asdict(trace) for trace in context.library.listed()])


def captures_json(context: PageContext, _request: WebRequest, _session: WebSession) -> WebAnswer:
    """The same as JSON: the messages of the daemon. Raises the client's errors."""
    with context.client() as client:
        return json_answer([plain(capture) for capture in client.captures({}, limit=MAX_CAPTURES)])
