"""The first page: the captures of the daemon, or the files of the command line."""

from kinetoctl.errors import CliError
from kinetoctl.output.json_yaml import plain
from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebRequest
from kinetoctl.web.pages.capture_facts import row_of
from kinetoctl.web.pages.json_answers import json_answer
from kinetoctl.web.pages.page_context import PageContext, render, with_help

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
        traces=list(context.library.files.items()),
        command=context.command("captures", "list"),
    )


def captures_json(context: PageContext, _request: WebRequest, _session: WebSession) -> WebAnswer:
    """The same as JSON: the messages of the daemon. Raises the client's errors."""
    with context.client() as client:
        return json_answer([plain(capture) for capture in client.captures({}, limit=MAX_CAPTURES)])
