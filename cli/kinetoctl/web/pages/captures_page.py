"""The first page: the captures of the daemons, or the traces that the command line names."""

from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from kinetoctl.errors import CliError
from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest
from kinetoctl.web.pages.capture_facts import listed, row_of
from kinetoctl.web.pages.json_answers import hosts_answer, json_answer
from kinetoctl.web.pages.page_context import REFRESH_S, PageContext, render, with_help

MAX_CAPTURES = 100


def captures_page(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """The list of captures, newest first."""
    rows: list[dict[str, Any]] = []
    found, failure = None, ""
    if not context.files:
        try:
            found = context.daemons.captures(MAX_CAPTURES)
            rows = [row_of(capture_id, parts) for capture_id, parts in listed(found.items)[:MAX_CAPTURES]]
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
        raise WebError(HTTPStatus.NOT_FOUND, "this server shows captures: they are at /captures.json")
    return json_answer([asdict(trace) for trace in context.library.listed()])


def captures_json(context: PageContext, _request: WebRequest, _session: WebSession) -> WebAnswer:
    """The same as JSON: the messages of the daemons. Raises the client's errors."""
    found = context.daemons.captures(MAX_CAPTURES)
    newest = [part for _, parts in listed(found.items)[:MAX_CAPTURES] for part in parts]
    return hosts_answer(found._replace(items=newest), "captures", several=context.daemons.several)
